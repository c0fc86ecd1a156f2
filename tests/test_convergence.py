"""The benchmark of convergence: every method has a row, training repeats, results are said as they are."""

from __future__ import annotations

import json
import sys

import pytest
from benchmarks.convergence import subjects
from benchmarks.convergence.__main__ import main
from benchmarks.convergence.recipe import Recipe
from benchmarks.convergence.rows import GROUPS, Row
from benchmarks.convergence.table import Result
from benchmarks.convergence.training import Outcome, Trainer

from laconic import Strategy
from laconic.compression import COMPRESSORS, Wrapper
from laconic.errors import UsageError

RECIPE = Recipe(optimizer="sgd", learning_rate=0.1)


def test_every_lossy_method_has_a_row_with_its_defaults() -> None:
    rows = GROUPS["compression"](100)
    wanted = [kind.name for kind in COMPRESSORS if not issubclass(kind, Wrapper) and not kind().traits.lossless]
    assert [row.method for row in rows] == wanted
    assert {row.method for row in GROUPS["gentler"](100)} <= set(wanted)


@pytest.mark.parametrize("steps", [1, 2, 7, 300])
def test_the_rate_rises_to_its_peak_and_falls_towards_zero(steps: int) -> None:
    rates = list(RECIPE.rates(steps))
    assert len(rates) == steps
    assert max(rates) == pytest.approx(0.1)
    assert all(rate > 0 for rate in rates)
    assert steps < 300 or (rates[0] < 0.01 and rates[-1] < 1e-5)


def test_training_repeats_and_a_lossless_row_changes_nothing() -> None:
    trainer = Trainer(subjects.text(seeds=2), steps=2)
    first, again = trainer.train(Strategy(), RECIPE, 0), trainer.train(Strategy(), RECIPE, 0)
    assert first.loss == again.loss
    assert trainer.train(Strategy(), RECIPE, 1).loss != first.loss, "another seed is another run"
    assert first.accuracy is None
    assert first.sent_bytes > 0


def result(loss: float) -> Result:
    row = Row(group="compression", method="topk", title="topk", strategy=Strategy.parse("bsp / all_reduce / topk"))
    plain = Outcome(2.0, None, 2.0, 400, 1.0)
    return Result("text", row, RECIPE, Outcome(loss, None, loss, 100, 1.0), plain)


@pytest.mark.parametrize(
    ("loss", "said"), [(2.02, "+1.0%  "), (2.06, "+3.0% *"), (1.9, "-5.0%  "), (float("nan"), "diverged *")]
)
def test_a_line_says_how_far_and_marks_what_misses(loss: float, said: str) -> None:
    line = result(loss).line()
    assert said in line
    assert "4.0x" in line


def test_json_has_null_for_what_diverged() -> None:
    entry = json.loads(json.dumps(result(float("nan")).as_json(), allow_nan=False))
    assert entry["loss"] is None
    assert entry["change"] is None
    assert entry["misses"] is True


def test_without_scikit_learn_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    subjects._digits.cache_clear()
    with pytest.raises(UsageError, match=r"laconic\[benchmarks\].*--images.*--tasks text"):
        subjects.images(1, None)


def test_an_unknown_method_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["convergence", "--only", "topc", "--tasks", "text"])
    assert main() == 2
    assert 'no method "topc"' in capsys.readouterr().err


def test_ctrl_c_ends_cleanly_with_what_was_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: Trainer, strategy: Strategy, recipe: Recipe, seed: int) -> Outcome:
        if strategy != Strategy():
            raise KeyboardInterrupt
        return Outcome(2.0, None, 2.0, 400, 1.0)

    monkeypatch.setattr(Trainer, "train", interrupted)
    monkeypatch.setattr(sys, "argv", ["convergence", "--tasks", "text", "--seeds", "1", "--json"])
    assert main() == 130
    out, err = capsys.readouterr()
    assert json.loads(out) == []
    assert "stopped" in err
