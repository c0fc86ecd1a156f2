"""From curves and step times to a verdict, without training."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import benchmarks.time_to_loss.gpt2.__main__ as gpt2
import pytest
from benchmarks.convergence.recipe import Recipe
from benchmarks.time_to_loss.contender import Contender
from benchmarks.time_to_loss.curves import Curve, Kept, Run, train
from benchmarks.time_to_loss.step_times import DDP, first_of, seconds_until, steady_of
from benchmarks.time_to_loss.verdict import Question, lines, loss_lines, sentence

from laconic.errors import UsageError
from laconic.experiments.small_gpt import SmallGpt, gpt_shape

QUESTION = Question("tiny", 2, 100, (1.0, 2.0), (0.001, 0.003), 2)
SLOW = "bsp / all_reduce / int8 / fusion"
NEVER = "bsp / all_reduce / topk / fusion"


def _curve(run: Run) -> Curve:
    """DDP ends at 2 with the higher rate; SLOW has that after 150 steps of a run of 200, and NEVER not at all."""
    half = run.steps // 2
    if run.strategy == "ddp":
        final = (2.0 if run.rate == 0.003 else 2.5) + 0.1 * run.seed
        return Curve(run, (half, run.steps), (3.0, final), 1000 * run.steps, 1.0)
    if run.strategy == SLOW and run.steps == 200:
        return Curve(run, (150, 200), (1.9 + 0.1 * run.seed, 1.8), 250 * run.steps, 1.0)
    return Curve(run, (half, run.steps), (3.0, 2.4), 100 * run.steps, 1.0)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    path = tmp_path / "curves.jsonl"

    def keep(runs: Iterable[Run]) -> Kept:
        with path.open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(asdict(_curve(run))) + "\n" for run in runs)
        return Kept(path)

    strategies = ("ddp", SLOW, NEVER)
    tried = keep(run for strategy in strategies for run in QUESTION.trials(strategy))
    return keep(run for strategy in strategies for run in QUESTION.runs(tried, strategy))


def test_time_to_the_loss_of_ddp(kept: Kept) -> None:
    times_s = {("slow", DDP): 1.0, ("slow", SLOW): 0.25, ("slow", NEVER): 0.01}
    ddp, slow, never = lines(QUESTION, kept, [SLOW, NEVER], times_s, ["slow"])
    assert (ddp.rate, ddp.final, ddp.sooner) == (0.003, (2.0, 2.1), (1.0, 1.0))
    # A run of 100 steps does not get there; one of 200 does, after 150.
    assert slow.steps == 200
    assert slow.sooner == pytest.approx((100 / 37.5, 100 / 37.5))
    assert slow.fewer_bytes == pytest.approx(4.0)
    assert never.sooner == ()
    assert never.gap == pytest.approx((2.4 / 2.0 + 2.4 / 2.1) / 2 - 1)
    said = sentence("slow", [ddp, slow, never])
    assert said.startswith(f"On slow {SLOW} has torch DDP's loss 2.7 times sooner (2.7 to 2.7 over 2 seeds)")
    assert sentence("slow", [ddp, never]) == "On slow nothing here has torch DDP's loss sooner than torch DDP."
    assert "not within these steps" in never.text()


def test_losses_alone(kept: Kept) -> None:
    ddp, slow = loss_lines(QUESTION, kept, [SLOW])
    assert ddp.split()[:5] == ["ddp", "0.0030", "100", "2.0500", "+0.00%"]
    assert ddp.endswith("2.0000 2.1000")
    assert f"{(2.4 / 2.0 + 2.4 / 2.1) / 2 - 1:+.2%}" in slow
    assert "10.0x" in slow


def test_steps_of_two_kinds() -> None:
    strategy = "onebit_adam(warmup_share=0.1, refresh_share=0)"
    assert steady_of(strategy) == "bsp / all_reduce / onebit + error_feedback / fusion"
    assert first_of(strategy) == "bsp / all_reduce / int8 / fusion"
    assert first_of("powersgd") == ""
    assert seconds_until(strategy, 50, 100, 0.1, 1.0) == pytest.approx(10 * 1.0 + 40 * 0.1)
    assert seconds_until("powersgd", 50, 100, 0.1, None) == pytest.approx(5.0)


@pytest.mark.timeout(120)
def test_a_short_training_gives_a_curve() -> None:
    run = Run("onebit-adam", "tiny", 6, 0.003, 0, 1)
    curve = train(run)
    assert curve.steps == (1, 2, 3, 4, 5, 6)
    assert all(0 < loss < 10 for loss in curve.losses)
    assert curve.sent_bytes > 0


def test_a_contender_names_its_optimizer() -> None:
    plain, muon = Contender.parse("ddp"), Contender.parse("diloco(period=8) with muon")
    assert (plain.optimizer_for(plain.strategy()), muon.optimizer_for(muon.strategy())) == ("adamw", "muon")
    assert Contender.parse("demo-int4").optimizer_for(Contender.parse("demo-int4").strategy()) == "sgd"
    with pytest.raises(UsageError, match='the only other optimizer is muon: write "ddp with muon"'):
        Contender.parse("ddp with lion")
    with pytest.raises(UsageError, match=r'demo gives the optimizer directions .* Write "demo-int4"'):
        Contender.parse("demo-int4 with muon").strategy()


def test_muon_trains_the_matrices_of_blocks_and_adamw_the_rest() -> None:
    model = SmallGpt(gpt_shape("tiny"))
    recipe = Recipe(optimizer="muon", learning_rate=0.01)
    muon, adamw = recipe.make(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices = {names[id(parameter)] for group in muon.param_groups for parameter in group["params"]}
    others = {names[id(parameter)] for group in adamw.param_groups for parameter in group["params"]}
    layers = ("qkv", "out", "up", "down")
    assert matrices == {f"blocks.{block}.{layer}.weight" for block in range(2) for layer in layers}
    assert matrices | others == set(names.values())
    assert not matrices & others
    assert {"tokens.weight", "positions.weight", "norm.bias"} <= others


def test_torch_ddp_with_muon_is_timed_and_trained_as_torch_ddp_is() -> None:
    words = ["--strategies", "torch DDP with muon", "--times-only", "torch DDP with muon", "--ddp-steps", "3"]
    jobs = [job for job in gpt2._jobs(gpt2._options(words), "text") if job.contender == "torch DDP with muon"]
    assert [(job.link, job.made, job.evaluates) for job in jobs] == [("", 600, True), ("1gbit", 3, False)]
