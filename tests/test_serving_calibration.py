"""The learning curve of `benchmarks/serving_calibration.py`."""

from __future__ import annotations

import pytest
from benchmarks import serving_calibration
from benchmarks.serving_calibration import curve, left_out

from laconic.simulator.reference.residuals import Smoothing
from tests.simulator.reference.test_residuals import TABLE, TPOT, TTFT, row


def test_errors_that_all_rows_share_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_calibration, "_SHARES", (0.0, 0.5))
    rows = [row({TTFT: 150.0, TPOT: 100.0}, concurrency=str(4 + number)) for number in range(20)]
    found = curve(TABLE, rows, {id(rows[0])}, 2)
    assert found[TTFT][0] == pytest.approx(1 / 3)
    assert found[TTFT][1] < 0.01
    assert found[TPOT] == pytest.approx([0.0, 0.0])


def test_a_row_left_out_is_corrected_by_the_others_alone() -> None:
    rows = [row({TTFT: 150.0}), row({TTFT: 150.0}, concurrency="9"), row({TTFT: 150.0}, concurrency="10")]
    assert left_out(TABLE, rows, Smoothing(), TTFT) < 0.05
    apart = [row({TTFT: 150.0}), row({TTFT: 100.0}, mode="disagg")]
    assert left_out(TABLE, apart, Smoothing(), TTFT) == pytest.approx((1 / 3 + 0) / 2)
