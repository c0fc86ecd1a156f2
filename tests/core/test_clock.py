"""Clocks never go backwards."""

from __future__ import annotations

import math
import time

import pytest

from laconic.core.clock import Clock, VirtualClock, WallClock


def test_wall_clock_measures_real_seconds() -> None:
    clock: Clock = WallClock()
    started_s, reference_s = clock.now(), time.monotonic()
    time.sleep(0.05)
    passed_s, reference_passed_s = clock.now() - started_s, time.monotonic() - reference_s
    assert passed_s >= 0.05
    assert abs(passed_s - reference_passed_s) < 0.02
    readings = [clock.now() for _ in range(1000)]
    assert readings == sorted(readings)


def test_virtual_clock_moves_only_when_told() -> None:
    clock: VirtualClock = VirtualClock()
    assert clock.now() == 0.0
    clock.advance_to(1.5)
    time.sleep(0.01)
    assert clock.now() == 1.5
    clock.advance_to(1.5)
    assert clock.now() == 1.5
    assert VirtualClock(7.0).now() == 7.0


@pytest.mark.parametrize("time_s", [0.9999, -1.0, -math.inf, math.nan])
def test_virtual_clock_refuses_to_go_back(time_s: float) -> None:
    clock = VirtualClock(1.0)
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance_to(time_s)
    assert clock.now() == 1.0
