"""Train one row on one task with several workers in this process."""

from __future__ import annotations

import copy
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

import laconic
from benchmarks.convergence.recipe import Recipe
from benchmarks.convergence.subjects import WORKERS, Subject
from laconic.core.in_process import InProcessTransport

_TIMEOUT_S = 300.0
"""Far above any step, on a machine that others use as well."""

_ENDING_S = 10.0
"""How long Ctrl-C waits for a worker to end its step."""


class Stopped(Exception):
    """Ends the workers' threads after Ctrl-C."""


@dataclass(frozen=True)
class Outcome:
    """What training came to."""

    loss: float
    """On data held out, after the last step."""
    accuracy: float | None
    training_loss: float
    """Mean over all workers and the last tenth of the steps."""
    sent_bytes: int
    """By one worker, in all steps."""
    seconds: float


@dataclass
class Trainer:
    """Trains on one subject, and trains without compression only once for each recipe and seed."""

    subject: Subject
    steps: int
    progress: Callable[[Subject, str, int, int], None] | None = None
    """Called by one worker after each step: what is learned, how, the step's number and how many there will be."""
    workers: int = WORKERS
    stop: threading.Event = field(default_factory=threading.Event)
    _plain: dict[tuple[Recipe, int], Outcome] = field(default_factory=dict)

    def plain(self, recipe: Recipe, seed: int) -> Outcome:
        """Without compression."""
        if (recipe, seed) not in self._plain:
            self._plain[recipe, seed] = self.train(laconic.Strategy(), recipe, seed)
        return self._plain[recipe, seed]

    def train(self, strategy: laconic.Strategy, recipe: Recipe, seed: int) -> Outcome:
        """Train from the seed's weights on the seed's batches; Ctrl-C ends it."""
        began_s = time.perf_counter()
        task = self.subject.tasks[seed]
        model = task.model()

        ended = threading.Semaphore(0)

        def one_rank(transport: InProcessTransport) -> tuple[list[float], nn.Module, int]:
            try:
                return until_stopped(transport)
            finally:
                ended.release()

        def until_stopped(transport: InProcessTransport) -> tuple[list[float], nn.Module, int]:
            replica = copy.deepcopy(model)
            optimizers = recipe.make(replica)
            losses: list[float] = []
            with laconic.attach(replica, optimizers, strategy, transport=transport, total_steps=self.steps) as session:
                for step, rate in enumerate(recipe.rates(self.steps)):
                    if self.stop.is_set():
                        raise Stopped
                    inputs, targets = task.batch(step, transport.rank)
                    loss = task.loss(replica(inputs), targets)
                    loss.backward()
                    session.report_loss(loss)
                    recipe.step(optimizers, rate)
                    losses.append(loss.item())
                    if transport.rank == 0 and self.progress is not None:
                        self.progress(self.subject, str(strategy), step + 1, self.steps)
                sent = session.traffic.sent_bytes("payload")
                if not (strategy.exchanges_gradients() and strategy.synchronization.replicas_identical):
                    session.average()
            return losses, replica, sent

        try:
            replicas = laconic.InProcessCluster(self.workers, timeout_s=_TIMEOUT_S).run(one_rank)
        except KeyboardInterrupt:
            self.stop.set()
            # A thread that is still computing when the interpreter ends takes it down with a core dump.
            for _ in range(self.workers):
                ended.acquire(timeout=_ENDING_S)
            raise
        tail = max(1, self.steps // 10)
        training_loss = statistics.fmean(loss for losses, _, _ in replicas for loss in losses[-tail:])
        loss, accuracy = self.subject.judge(replicas[0][1])
        return Outcome(loss, accuracy, training_loss, replicas[0][2], time.perf_counter() - began_s)
