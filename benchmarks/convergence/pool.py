"""Train several rows at a time, each in a process of its own: for machines with many cores."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache

import torch

import laconic
from benchmarks.convergence import subjects
from benchmarks.convergence.recipe import Recipe
from benchmarks.convergence.skew import Skew
from benchmarks.convergence.subjects import Subject
from benchmarks.convergence.training import Outcome, Trainer
from laconic.errors import LaconicWarning


@dataclass(frozen=True)
class Subjects:
    """What is needed to make the same subject anywhere."""

    name: str
    seeds: int
    images: str | None
    skew: Skew | None = None
    workers: int = subjects.WORKERS

    def make(self) -> Subject:
        """The subject itself."""
        if self.name == "text":
            return subjects.text(self.seeds, self.skew, self.workers)
        return subjects.images(self.seeds, self.images, self.skew, self.workers)


@dataclass
class PooledTrainer:
    """What Trainer is, except that everything asked for beforehand is trained at the same time."""

    wanted: Subjects
    steps: int
    pool: ProcessPoolExecutor
    _jobs: dict[tuple[str, Recipe, int], Future[Outcome]] = field(default_factory=dict)

    def ask(self, runs: Iterable[tuple[laconic.Strategy, Recipe, int]]) -> None:
        """Begin with these, in this order, as far as there are processes."""
        for strategy, recipe, seed in runs:
            self._job(strategy, recipe, seed)

    def train(self, strategy: laconic.Strategy, recipe: Recipe, seed: int) -> Outcome:
        """The outcome, when it is there."""
        return self._job(strategy, recipe, seed).result()

    def plain(self, recipe: Recipe, seed: int) -> Outcome:
        """Without compression."""
        return self.train(laconic.Strategy(), recipe, seed)

    def _job(self, strategy: laconic.Strategy, recipe: Recipe, seed: int) -> Future[Outcome]:
        key = str(strategy), recipe, seed
        if key not in self._jobs:
            self._jobs[key] = self.pool.submit(_train, self.wanted, self.steps, *key)
        return self._jobs[key]


def processes(jobs: int) -> ProcessPoolExecutor:
    """So many processes, which share nothing with this one."""
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))


@cache
def _subject(wanted: Subjects) -> Subject:
    return wanted.make()


def _train(wanted: Subjects, steps: int, strategy: str, recipe: Recipe, seed: int) -> Outcome:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", LaconicWarning)
    trainer = Trainer(_subject(wanted), steps, workers=wanted.workers)
    return trainer.train(laconic.Strategy.parse(strategy), recipe, seed)
