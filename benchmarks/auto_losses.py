"""Is the loss under `auto` the same when a link becomes ten times slower in the middle of training?

    python -m benchmarks.auto_losses [--steps 600] [--seeds 3]

Four hosts train the tiny GPT on the standard library's source with "auto(max_loss_gap=5%)": behind links of 500 Mbit/s,
and behind links that become 50 Mbit/s after half of the steps, so that `auto` plans anew and changes the strategy. The
loss is that of other random windows of the same text. Below the losses stand the decisions of each run.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import laconic
from benchmarks.auto import BEFORE, DROP, DROPS, LOSS_GAP, run_behind
from benchmarks.convergence.recipe import Recipe
from laconic.core.event import EventList
from laconic.experiments.tasks import TaskConfig, make_task

_HELD_OUT_RANK, _HELD_OUT_BATCHES = 1000, 64
"""Windows of a rank that does not train."""


@dataclass(frozen=True)
class Run:
    """One training."""

    link: str
    steps: int
    seed: int
    result: str


def rank(run: Run) -> None:
    """All of one rank."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    task = make_task(TaskConfig(size="tiny", batch=8, seed=run.seed))
    model, recipe, events = task.model(), Recipe(optimizer="adamw", learning_rate=2e-3), EventList()
    optimizers = recipe.make(model)
    strategy = f"auto(max_loss_gap={LOSS_GAP:.0%})"
    with laconic.attach(model, optimizers, strategy, total_steps=run.steps, timeout_s=120, events=events):
        for step, rate in enumerate(recipe.rates(run.steps)):
            inputs, targets = task.batch(step, dist.get_rank())
            task.loss(model(inputs), targets).backward()
            recipe.step(optimizers, rate)
            if first and run.link == DROP and step + 1 == run.steps // 2:
                print(DROPS, flush=True)
    if first:
        with torch.no_grad():
            batches = [task.batch(step, _HELD_OUT_RANK) for step in range(_HELD_OUT_BATCHES)]
            loss = statistics.fmean(task.loss(model(inputs), targets).item() for inputs, targets in batches)
        decisions = [(event.step, event.data["strategy"]) for event in events.events if event.kind == "auto"]
        Path(run.result).write_text(json.dumps({"loss": loss, "decisions": decisions}), encoding="utf-8")
    dist.destroy_process_group()


def trained(link: str, steps: int, seed: int) -> tuple[float, list[str]]:
    """The loss at the end, and the decisions."""
    with tempfile.TemporaryDirectory(prefix="laconic-") as scratch:
        result, config = Path(scratch) / "found.json", Path(scratch) / "run.json"
        config.write_text(json.dumps(asdict(Run(link, steps, seed, str(result)))), encoding="utf-8")
        run_behind(link, [sys.executable, "-m", "benchmarks.auto_losses", "--rank", str(config)])
        found = json.loads(result.read_text(encoding="utf-8"))
    return found["loss"], [f"step {step}: {strategy}" for step, strategy in found["decisions"]]


def main() -> None:
    """One line for each link, then the decisions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rank", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(Run(**json.loads(Path(options.rank).read_text(encoding="utf-8"))))
        return
    losses: dict[str, list[float]] = {BEFORE: [], DROP: []}
    told: list[str] = []
    for seed in range(options.seeds):
        for link, found in losses.items():
            loss, decisions = trained(link, options.steps, seed)
            found.append(loss)
            told.append(f"{link:>8}, seed {seed}: {loss:.4f}; {'; '.join(decisions)}")
            print(told[-1], file=sys.stderr, flush=True)
    for link, found in losses.items():
        changes = [loss / first - 1 for loss, first in zip(found, losses[BEFORE], strict=True)]
        spread = statistics.pstdev(changes)
        seeds = " ".join(f"{loss:.4f}" for loss in found)
        print(f"{link:>8}  {statistics.fmean(found):.4f}  {statistics.fmean(changes):+.2%} (+-{spread:.2%})  {seeds}")
    print("\n".join(["", *told]))


if __name__ == "__main__":
    main()
