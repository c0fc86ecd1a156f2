"""How far published measurements differ: the yardstick of `benchmarks/serving_errors.py --spread`."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.random_trees import forest
from benchmarks.serving_spread import TPOT, TTFT, distinct, learned, left_in_groups, repeats, series

from laconic.simulator.reference.published import Row
from laconic.simulator.reference.rows import Compared
from laconic.simulator.reference.tables import published_table

_TABLE = published_table("serving")


def row(first_ms: float, token_ms: float = 10.0, predicted_ms: float = 100.0, **cells: str) -> Compared:
    fixed = {"backend": "vllm", "model_path": "m", "system": "s", "mode": "agg", "concurrency": "8", **cells}
    measured = {TTFT: str(first_ms), TPOT: str(token_ms)}
    empty = dict.fromkeys((*_TABLE.columns, *_TABLE.carried_along), "")
    predicted = {TTFT: predicted_ms, TPOT: 10.0}
    errors = {TTFT: predicted_ms / first_ms - 1, TPOT: 10.0 / token_ms - 1}
    return Compared(Row({**empty, **fixed, **measured}), predicted, errors)


def test_a_measurement_under_two_names_counts_once() -> None:
    rows = [row(100.0, tp_size="8"), row(100.001, tp_size="64"), row(130.0, tp_size="8"), row(100.0, concurrency="16")]
    assert [one.row[TTFT] for one in distinct(rows)] == ["100.0", "130.0", "100.0"]


def test_repeats_differ_in_version_and_date_alone() -> None:
    rows = [row(100.0, backend_version="1"), row(110.0, backend_version="1"), row(150.0, backend_version="2")]
    rows.append(row(500.0, backend_version="1", tp_size="2"))
    assert repeats(rows, TTFT, same_version=True) == pytest.approx([0.1])
    assert sorted(repeats(rows, TTFT, same_version=False)) == pytest.approx([150 / 110 - 1, 0.5])


def test_a_series_that_grows_evenly_has_no_deviation() -> None:
    even = [row(100.0 * n**0.5, concurrency=str(n)) for n in (4, 8, 16, 128)]
    assert series(even, TTFT) == pytest.approx([0.0])
    assert series([*even[:1], row(600.0, concurrency="8"), even[2]], TTFT) == pytest.approx([1 - (2**0.5) / 3])


def test_groups_lose_their_own_median() -> None:
    rows = [row(50.0), row(50.0), row(100.0), row(10.0, model_path="other")]
    assert sorted(left_in_groups(rows, TTFT)) == pytest.approx([0.0, 0.0, 0.0, 0.5])


def test_the_regressor_learns_what_other_parts_show() -> None:
    rows = [row(100.0 + 100.0 * (n % 2), tp_size=str(1 + n % 2)) for n in range(20)]
    parts = [n // 4 for n in range(20)]
    assert learned(rows, TTFT, parts, range(5), predicted=False) == pytest.approx([0.0] * 20)
    assert len(learned(rows, TTFT, parts, (0,), predicted=True)) == 4


def test_a_forest_meets_a_smooth_function_between_its_rows() -> None:
    known = np.linspace(0, 1, 200)[:, None]
    asked = np.array([[0.2525], [0.7525]])
    assert forest(known, known[:, 0] ** 2, asked) == pytest.approx(asked[:, 0] ** 2, abs=0.02)
    assert forest(known, np.ones(200), asked).tolist() == [1.0, 1.0]
