"""Sources of time: the wall clock, or a number that the simulator advances."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The only source of time in laconic."""

    def now(self) -> float:
        """Seconds since a fixed point in time; never goes backwards."""
        ...


class WallClock:
    """Real time, monotonic."""

    def now(self) -> float:
        """Seconds of the performance counter."""
        return time.perf_counter()


class VirtualClock:
    """A clock that advances only when it is told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """The virtual time."""
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Move to `time_s`; time never goes backwards."""
        if not time_s >= self._now_s:  # in this form it also refuses NaN
            raise ValueError(f"a clock cannot go back from {self._now_s} to {time_s}")
        self._now_s = time_s
