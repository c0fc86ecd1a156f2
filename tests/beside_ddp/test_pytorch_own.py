"""PyTorch's own tests of DistributedDataParallel, with laconic in its place.

python -m pytest -s tests/beside_ddp/test_pytorch_own.py     # prints the table
"""

from __future__ import annotations

import functools
import re
from collections import Counter

import pytest

from tests.beside_ddp.pytorch_on_cpu import names
from tests.beside_ddp.pytorch_tables import NOT_APPLICABLE, REFUSED
from tests.beside_ddp.trials import Outcome, run_trials

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(300)]

NAMES = names()
APPLICABLE = [name for name in NAMES if name not in NOT_APPLICABLE]


@functools.cache
def outcomes(world_size: int) -> dict[str, Outcome]:
    """How each applicable test ended; all run in the same processes."""
    found = run_trials("tests.beside_ddp.pytorch_on_cpu:with_laconic", APPLICABLE, world_size=world_size)
    print("\n" + table(world_size, found))
    return found


def verdict(name: str, outcome: Outcome) -> str:
    """In a word or two: as the tables above say, or wrong."""
    kinds = {text.partition(":")[0] for text in outcome.ranks}
    if name in REFUSED:
        said = all(text.startswith("refused: ") and re.search(REFUSED[name], text) for text in outcome.ranks)
        return "refused by design" if said else "WRONG"
    if kinds == {"skipped"}:
        return "skipped by PyTorch"
    return "pass" if kinds == {"passed"} else "WRONG"


def table(world_size: int, found: dict[str, Outcome]) -> str:
    """Markdown: how many, and which."""
    verdicts = {name: verdict(name, outcome) for name, outcome in found.items()}
    counts = Counter(verdicts.values()) + Counter({"not applicable": len(NAMES) - len(found)})
    lines = [f"PyTorch's {len(NAMES)} tests of DistributedDataParallel with {world_size} ranks", ""]
    lines += ["| outcome | tests |", "|---|---|", *(f"| {kind} | {count} |" for kind, count in counts.most_common())]
    lines += [f"{found[name].text[:600]}\n" for name, said in verdicts.items() if said == "WRONG"]
    return "\n".join(lines)


def test_the_tables_name_tests_that_exist() -> None:
    assert not (REFUSED.keys() | NOT_APPLICABLE.keys()) - set(NAMES)
    assert not REFUSED.keys() & NOT_APPLICABLE.keys()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", APPLICABLE)
def test_pytorchs_own(name: str, world_size: int) -> None:
    outcome = outcomes(world_size)[name]
    if verdict(name, outcome) == "WRONG":
        pytest.fail(outcome.text, pytrace=False)
