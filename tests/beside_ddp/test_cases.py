"""Awkward models and loops, with DDP and with laconic, 2, 3 and 4 ranks.

python -m pytest -s tests/beside_ddp/test_cases.py     # prints the table
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from tests.beside_ddp.cases import CASES, verdict
from tests.beside_ddp.trials import Outcome, run_trials

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(300)]

WORLD_SIZES = (2, 3, 4)


def names(world_size: int) -> list[str]:
    return [case.name for case in CASES.values() if world_size in case.ranks]


@functools.cache
def outcomes(world_size: int) -> dict[str, Outcome]:
    """How each case ended; all run in the same processes."""
    found = run_trials("tests.beside_ddp.cases:compare", names(world_size), world_size=world_size)
    print("\n" + table(world_size, found))
    return found


def table(world_size: int, found: dict[str, Outcome]) -> str:
    """Markdown: how many of each kind, and what is wrong by name."""
    verdicts = {name: verdict(name, outcome.ranks) for name, outcome in found.items()}
    lines = [f"{len(found)} awkward models and loops with {world_size} ranks", "", "| outcome | cases |", "|---|---|"]
    lines += [f"| {kind} | {count} |" for kind, count in Counter(verdicts.values()).most_common()]
    lines += ["", *(f"WRONG {name}: {found[name].text[:300]}" for name, kind in verdicts.items() if kind == "WRONG")]
    return "\n".join(lines)


def test_there_are_enough() -> None:
    assert len(CASES) >= 80


@pytest.mark.parametrize(("name", "world_size"), [(name, size) for size in WORLD_SIZES for name in names(size)])
def test_beside_ddp(name: str, world_size: int) -> None:
    outcome = outcomes(world_size)[name]
    if verdict(name, outcome.ranks) == "WRONG":
        pytest.fail(f"expected {CASES[name].expected}\n{outcome.text}", pytrace=False)
