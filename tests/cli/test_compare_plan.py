"""`laconic compare --plan`: which choices are measured, and what predicted beside measured comes to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.planner.test_answer import question

from laconic.cli import main
from laconic.cli.compare_plan import checked, first_choices, sections
from laconic.planner import Answer, answer
from laconic.planner.candidates import DDP
from laconic.planner.choice import beginning
from laconic.strategy import Strategy

AMONG = [
    Strategy.parse(text)
    for text in (
        "bsp / all_reduce / int8",
        "bsp / all_reduce / int8 / fusion(bytes=5MiB)",
        "onebit-adam",
        "streaming_diloco(period=100) / all_reduce / int4 + error_feedback",
        "bsp / all_reduce / terngrad",
    )
]


@pytest.fixture(scope="module")
def found() -> Answer:
    return answer(question(), among=AMONG)


def test_plain_ddp_first_then_one_of_each_kind_that_can_be_seen(found: Answer) -> None:
    chosen = first_choices(found, 36)
    assert chosen[0].strategy == DDP
    kinds = [(one.strategy.synchronization.name, one.strategy.compression.name) for one in chosen]
    assert len(set(kinds)) == len(kinds) > 1
    for choice in chosen:
        assert choice.strategy.synchronization.interval <= 36
        assert beginning(choice.strategy, found.question.steps) is None, "its first steps are of another kind"
    long = [choice.strategy.synchronization.name for choice in first_choices(found, None)]
    assert "streaming_diloco" in long


def test_predicted_stands_beside_measured(found: Answer) -> None:
    chosen = first_choices(found, 36)
    # Plain DDP as predicted; the others twice as slow, and the last one refused.
    took = [SimpleNamespace(strategy=str(one.strategy), step_ms=2e3 * one.step_s) for one in chosen[:-1]]
    took[0].step_ms /= 2
    rows = checked(chosen, found, SimpleNamespace(rows=took))
    assert [row.strategy for row in rows] == [str(one.strategy) for one in chosen[:-1]]
    assert rows[0].error == pytest.approx(0.0)
    for row in rows[1:]:
        assert row.error == pytest.approx(-0.5)
        assert row.measured_sooner == pytest.approx(row.predicted_sooner / 2)
    assert len(sections(rows)) == (2 if len(rows) > 1 else 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ddp",), "chooses the strategies itself"),
        (("--bandwidth", "10mbit", "--bandwidth", "20mbit"), "one setting of the links"),
        (("--bandwidth", "unlimited"), "one setting of the links"),
        (("--ranks-per-host", "2"), "one rank per host"),
    ],
)
def test_bad_input(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--plan", "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err
