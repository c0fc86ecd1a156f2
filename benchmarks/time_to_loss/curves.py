"""Loss on held-out text while a small GPT trains under a strategy with four workers; kept, because it takes long."""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

import laconic
from benchmarks.convergence.recipe import Recipe
from benchmarks.time_to_loss.contender import Contender
from laconic.core.in_process import InProcessTransport
from laconic.errors import LaconicWarning
from laconic.experiments.tasks import Task, TaskConfig, make_task

WORKERS = 4
_HELD_OUT_RANK = 1000
"""A rank no worker has: its windows of the text are others than those trained on."""
_HELD_OUT_BATCHES = 40
_POINTS = 30
"""How often the loss is looked at in a run."""
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Run:
    """One training, by all that decides how it comes out."""

    strategy: str
    """As `Contender` reads it; "ddp" stands for every strategy that comes to the same bits."""
    size: str
    steps: int
    rate: float
    seed: int
    batch: int


@dataclass(frozen=True)
class Curve:
    """What came of a run."""

    run: Run
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    """On text never trained on, after so many steps; the last one is that of the final model."""
    sent_bytes: int
    """By one worker, in all steps."""
    seconds: float


class Kept:
    """Curves in a file, one per line: what is there need not be trained again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._curves: dict[Run, Curve] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                curve = _read(json.loads(line))
                self._curves[curve.run] = curve

    def __getitem__(self, run: Run) -> Curve:
        return self._curves[run]

    def train(self, runs: Iterable[Run], jobs: int) -> Iterator[Curve]:
        """Train those that are missing, so many at a time; each as soon as it is there."""
        missing = [run for run in dict.fromkeys(runs) if run not in self._curves]
        with ProcessPoolExecutor(jobs) as pool:
            try:
                for done in as_completed([pool.submit(train, run) for run in missing]):
                    curve = done.result()
                    self._curves[curve.run] = curve
                    with self._path.open("a", encoding="utf-8") as lines:
                        lines.write(json.dumps(asdict(curve)) + "\n")
                    yield curve
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _read(record: dict) -> Curve:
    return Curve(
        Run(**record["run"]),
        tuple(record["steps"]),
        tuple(record["losses"]),
        record["sent_bytes"],
        record["seconds"],
    )


def train(run: Run) -> Curve:
    """Train with four workers in threads, and look at the loss now and then."""
    torch.set_num_threads(1)
    began_s = time.perf_counter()
    task = make_task(TaskConfig(size=run.size, batch=run.batch, seed=run.seed))
    held_out = [task.batch(step, _HELD_OUT_RANK) for step in range(_HELD_OUT_BATCHES)]
    model = task.model()
    every = max(1, run.steps // _POINTS)
    contender = Contender.parse(run.strategy)
    strategy = contender.strategy()
    recipe = Recipe(optimizer=contender.optimizer_for(strategy), learning_rate=run.rate)

    def one_rank(transport: InProcessTransport) -> tuple[list[tuple[int, float]], int]:
        replica = copy.deepcopy(model)
        optimizers = recipe.make(replica)
        seen: list[tuple[int, float]] = []
        with laconic.attach(replica, optimizers, strategy, transport=transport, total_steps=run.steps) as session:
            for step, rate in enumerate(recipe.rates(run.steps)):
                inputs, targets = task.batch(step, transport.rank)
                task.loss(replica(inputs), targets).backward()
                recipe.step(optimizers, rate)
                if (step + 1) % every == 0 and step + 1 < run.steps and transport.rank == 0:
                    session.settle()
                    seen.append((step + 1, _loss(replica, task, held_out)))
            sent = session.traffic.sent_bytes("payload")
            if not strategy.synchronization.replicas_identical:
                session.average()
        if transport.rank == 0:
            seen.append((run.steps, _loss(replica, task, held_out)))
        return seen, sent

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaconicWarning)
        seen, sent = laconic.InProcessCluster(WORKERS, timeout_s=_TIMEOUT_S).run(one_rank)[0]
    steps, losses = zip(*seen, strict=True)
    return Curve(run, steps, losses, sent, time.perf_counter() - began_s)


def _loss(model: nn.Module, task: Task, held_out: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    model.eval()
    with torch.no_grad():
        losses = [task.loss(model(inputs), targets).item() for inputs, targets in held_out]
    model.train()
    return sum(losses) / len(losses)
