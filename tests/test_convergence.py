"""The benchmark of convergence: every method has a row, training repeats, results are said as they are."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from benchmarks.convergence import subjects
from benchmarks.convergence.__main__ import main
from benchmarks.convergence.recipe import Recipe
from benchmarks.convergence.rows import GROUPS, Row
from benchmarks.convergence.skew import OwnImages, OwnText, Skew
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
    return Result("text", row, RECIPE, [Outcome(loss, None, loss, 100, 1.0)], [plain])


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


@pytest.mark.parametrize("alpha", [0.05, 0.1, 1.0, 100.0])
def test_a_skewed_split_gives_every_sample_to_one_worker(alpha: float) -> None:
    sizes = [150] * 10
    parts = Skew(alpha).split(sizes, 8, seed=3)
    assert parts == Skew(alpha).split(sizes, 8, seed=3)
    assert parts != Skew(alpha).split(sizes, 8, seed=4)
    for group, size in enumerate(sizes):
        places = [place for own in parts for place in range(own[group].start, own[group].stop)]
        assert places == list(range(size))
    totals = [sum(cut.stop - cut.start for cut in own) for own in parts]
    assert min(totals) >= 0.25 * 1500 / 8
    largest = [max(own[group].stop - own[group].start for own in parts) / 150 for group in range(10)]
    assert min(largest) > 0.3 if alpha <= 0.1 else max(largest) < 0.9
    if alpha == 100.0:
        assert max(largest) < 0.25, "nearly an eighth each"


def test_workers_draw_from_their_own_images() -> None:
    subject = subjects.images(2, "drawn", Skew(0.1), workers=8)
    (one, other) = subject.tasks
    assert isinstance(one, OwnImages)
    assert isinstance(other, OwnImages)
    assert sorted(torch.cat(one.parts).tolist()) == list(range(3200)), "4 of 5 images of 4000, each on one worker"
    held = [set(one._labels[part].tolist()) for part in one.parts]
    for rank, classes in enumerate(held):
        drawn = {int(label) for step in range(20) for label in one.batch(step, rank)[1]}
        assert drawn <= classes
    assert len(set(map(frozenset, held))) > 1
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in one.model().modules())
    assert not torch.equal(one.batch(0, 0)[0], other.batch(0, 0)[0]), "another seed is another split"


def test_workers_draw_from_their_own_files() -> None:
    files = [torch.full((3000,), number, dtype=torch.uint8) for number in range(40)]
    task = OwnText(subjects.text(1).tasks[0], files, skew=Skew(0.1), workers=4, seed=0)
    assert sum(map(len, task.parts)) == 40 * 3000
    for rank, part in enumerate(task.parts):
        inputs, targets = task.batch(5, rank)
        assert inputs.shape == targets.shape
        assert set(inputs.flatten().tolist()) <= set(part.tolist())


@pytest.mark.parametrize(
    "text", ["dirichlet", "dirichlet(0)", "dirichlet(-1)", "dirichlet(1e-9)", "uniform(0.1)", "0.1"]
)
def test_a_skew_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"dirichlet\(ALPHA\)"):
        Skew.parse(text)


def test_with_skew_every_row_has_every_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int]] = []

    def trained(self: Trainer, strategy: Strategy, recipe: Recipe, seed: int) -> Outcome:
        assert self.workers == 8
        assert recipe.momentum == 0
        asked.append((strategy.synchronization.name, seed))
        return Outcome(2.0 + seed, 0.5, 2.0, 400, 1.0)

    monkeypatch.setattr(Trainer, "train", trained)
    command = (
        "convergence --skew dirichlet(0.1) --workers 8 --tasks images --images drawn --seeds 2 --momentum 0 --json"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    assert main() == 0
    found = json.loads(capsys.readouterr().out)
    assert {entry["group"] for entry in found} == {"unlike"}
    assert all(entry["losses"] == [2.0, 3.0] and entry["loss"] == 2.5 for entry in found)
    assert {name for name, _ in asked} == {"bsp", "local_sgd", "fedprox", "scaffold", "diloco"}
    assert {seed for _, seed in asked} == {0, 1}
