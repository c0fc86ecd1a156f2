"""Every optimizer under every schedule: replicas equal to each other and to plain fusion, bit for bit.

python -m pytest -s tests/beside_ddp/test_optimizers.py     # prints the table
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.beside_ddp.matrix import DEFERRING, SCHEDULES, Result, cell, train
from tests.beside_ddp.optimizers import ROWS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

_cells: dict[tuple[str, str], str] = {}


@functools.cache
def reference(name: str) -> Result | None:
    """The same optimizer under plain fusion."""
    return None if ROWS[name].refused else train(ROWS[name], "fusion")


def table(cells: dict[tuple[str, str], str]) -> str:
    """Markdown: a row for each optimizer, a column for each schedule."""
    lines = [f"| optimizer | {' | '.join(SCHEDULES)} |", "|---" * (len(SCHEDULES) + 1) + "|"]
    for name in ROWS:
        found = [cells.get((name, schedule), "").partition(":")[0] for schedule in SCHEDULES]
        lines.append(f"| {name} | {' | '.join(found)} |")
    return "\n".join(lines)


@pytest.fixture(scope="module", autouse=True)
def _print_the_table() -> Iterator[None]:
    yield
    print("\n" + table(_cells))


def test_there_are_enough() -> None:
    assert len(ROWS) >= 15


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ROWS)
def test_optimizer(name: str, schedule: str) -> None:
    _cells[name, schedule] = found = cell(name, schedule, reference(name))
    if found.startswith("WRONG"):
        pytest.fail(found, pytrace=False)
    row = ROWS[name]
    if schedule in DEFERRING and not row.refused and not row.closure and row.prepare is None:
        # A step that cannot be made in parts waits for all gradients, and says so; every other one need not wait.
        assert found == ("equal" if row.separable else "equal, waits")
    elif not row.refused and schedule not in DEFERRING:
        assert found == "equal"
