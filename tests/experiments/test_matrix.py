"""The matrix of `verify --matrix`: every two registered methods meet in a strategy, or a rule refuses both together."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from laconic.compression import Wrapper
from laconic.errors import IllegalCombination
from laconic.experiments.verification import PLACES, Findings, Outcome
from laconic.experiments.verification.matrix import Matrix, Name, Row, matrix, pairs_of, registered
from laconic.strategy import AXES, Strategy

NAMES = {
    "synchronization": ["bsp", "asp", "local_sgd", "demo"],
    "architecture": ["all_reduce", "parameter_server", "gossip", "choco"],
    "compression": ["none", "topk", "powersgd", "signsgd"],
    "wrapper": ["error_feedback", "ef21", "chain"],
    "scheduling": ["fusion", "dear"],
}


@pytest.fixture(scope="module")
def small() -> Matrix:
    return matrix(NAMES)


def is_legal(row: Row) -> bool:
    when, whom, what, around, order = (name.name for name in row)
    text = f"{when} / {whom} / {what}{f' + {around}' if around else ''} / {order}"
    try:
        Strategy.parse(text)
    except IllegalCombination:
        return False
    return True


def test_every_pair_that_can_meet_does_and_no_other_is_refused(small: Matrix) -> None:
    """Against all strategies that these names make."""
    names = [[Name(place, name) for name in NAMES[place]] for place in PLACES]
    names[3].append(Name("wrapper", ""))
    legal = [row for row in product(*names) if is_legal(row)]
    can_meet = {pair for row in legal for pair in pairs_of(row)}
    wanted = {
        (Name(one, left), Name(other, right))
        for one, other in combinations(PLACES, 2)
        for left, right in product(NAMES[one], NAMES[other])
    }
    assert {pair for row in small.rows.values() for pair in pairs_of(row)} == can_meet
    assert set(small.refused) == wanted - can_meet
    assert set(small.pairs()) == wanted
    assert len(small.rows) < len(legal) / 2


def test_a_refused_pair_names_the_rule_that_parts_it(small: Matrix) -> None:
    def reason(**two: str) -> tuple[str, str]:
        refused = small.refused[tuple(Name(place, name) for place, name in two.items())]
        return refused.rule, refused.reason

    rule, words = reason(compression="signsgd", wrapper="ef21")
    assert rule == "A wrapper that adds up what is decoded needs values with their size."
    assert "ef21" in words
    assert "signsgd" in words
    # Not that ef21 has no effect on "none", which is what a strategy has if nothing is said.
    assert "parameter_server" in reason(architecture="parameter_server", wrapper="ef21")[1]
    assert "dear" in reason(synchronization="local_sgd", scheduling="dear")[1]


def test_a_pair_passes_with_one_strategy_that_does(small: Matrix) -> None:
    def findings(strategy: Strategy, verdict: str) -> Findings:
        outcome = Outcome(verdict, "seen")  # type: ignore[arg-type]
        return Findings(strategy=str(strategy), workers=2, where="threads", outcomes={"bytes": outcome}, seconds=1.0)

    first, *others = small.rows
    verdicts = small.verdicts([findings(first, "failed")])
    assert {pair for pair, verdict in verdicts.items() if verdict == "failed"} == set(pairs_of(small.rows[first]))
    assert {pair for pair, verdict in verdicts.items() if verdict == "refused"} == set(small.refused)
    assert list(verdicts.values()).count("not reached") > 0
    verdicts = small.verdicts([findings(first, "failed"), *(findings(other, "passed") for other in others)])
    shared = set(pairs_of(small.rows[first])) & {pair for other in others for pair in pairs_of(small.rows[other])}
    assert shared
    assert all(verdicts[pair] == "passed" for pair in shared)
    assert "not reached" not in verdicts.values()


def test_every_registered_name_has_its_place() -> None:
    found = registered()
    assert [name for place in PLACES for name in found[place] if place != "wrapper"] == [
        method.name for registry in AXES.values() for method in registry if not issubclass(method, Wrapper)
    ]
    assert found["wrapper"] == [method.name for method in AXES["compression"] if issubclass(method, Wrapper)]
