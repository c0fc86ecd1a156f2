"""Workers that see different data: each gets a random share of every class of images, or of every source file of text.

    p_c ~ Dirichlet(alpha, ..., alpha),   worker w gets the share p_c[w] of the samples of group c

A small alpha gives most of a group to one worker; a large one gives all workers the same mixture. Shares are drawn
again until every worker has a quarter of an equal part. Every worker draws its batches from its own part alone, so that
the mean of all workers' losses is minimised, whatever the size of their parts.

Reference: Yurochkin et al. 2019, arXiv:1905.12022; Li et al. 2022, arXiv:2102.02079.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from laconic.errors import UsageError
from laconic.experiments.tasks import Task
from laconic.experiments.tasks.contract import batch_generator

_LEAST_PART = 0.25
"""Of an equal part: a worker with fewer samples would only learn these by heart."""
_MOST_DRAWS = 10_000
_LEAST_ALPHA = 0.01
"""Below, shares are 0 or 1 but for rounding."""


@dataclass(frozen=True)
class Skew:
    """How unequal the shares are."""

    alpha: float

    @classmethod
    def parse(cls, text: str) -> Skew:
        """Read dirichlet(0.1)."""
        found = re.fullmatch(r"dirichlet\(\s*(?:alpha\s*=\s*)?(\d+(?:\.\d*)?(?:e-?\d+)?)\s*\)", text.strip())
        if found is None or not _LEAST_ALPHA <= float(found[1]) <= 1e6:
            raise UsageError(
                f'skew must be dirichlet(ALPHA) with ALPHA >= {_LEAST_ALPHA:g}, such as "dirichlet(0.1)"; got "{text}".'
            )
        return cls(float(found[1]))

    def __str__(self) -> str:
        return f"dirichlet({self.alpha:g})"

    def split(self, sizes: Sequence[int], workers: int, seed: int) -> list[list[slice]]:
        """For each worker its piece of every group: groups have these sizes, and every sample goes to one worker."""
        generator = np.random.default_rng(seed)
        least = _LEAST_PART * sum(sizes) / workers
        for _ in range(_MOST_DRAWS):
            shares = generator.dirichlet([self.alpha] * workers, size=len(sizes))
            ends = np.rint(np.cumsum(shares, axis=1) * np.array(sizes)[:, None]).astype(int)
            starts = np.concatenate([np.zeros((len(sizes), 1), dtype=int), ends[:, :-1]], axis=1)
            if (ends - starts).sum(axis=0).min() >= least:
                return [
                    [slice(int(start), int(end)) for start, end in zip(starts[:, worker], ends[:, worker], strict=True)]
                    for worker in range(workers)
                ]
        raise UsageError(
            f"{self} gave some of {workers} workers nearly nothing {_MOST_DRAWS} times. Use a larger alpha."
        )


class _OwnData:
    """A task whose workers draw from parts of their own; everything else is the task's."""

    learns = True

    def __init__(self, task: Task, seed: int) -> None:
        self._task, self._seed = task, seed
        self.title = f"{task.title}, different data on every worker"
        self.num_parameters = task.num_parameters

    def model(self) -> nn.Module:
        return self._task.model()

    def optimizer(self, model: nn.Module, *, directions: bool = False) -> Optimizer:
        return self._task.optimizer(model, directions=directions)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """As the task has it."""
        return self._task.loss(outputs, targets)


class OwnImages(_OwnData):
    """Images split by class.

    Groups of channels are normalised in place of batches: statistics of a batch are those of a worker's own classes,
    and no mean of them fits the data of all (Hsieh et al. 2020, arXiv:1910.00189).
    """

    def __init__(
        self, task: Task, images: torch.Tensor, labels: torch.Tensor, *, skew: Skew, workers: int, seed: int
    ) -> None:
        super().__init__(task, seed)
        self._images, self._labels = images, labels
        self._size = len(task.batch(0, 0)[1])
        generator = torch.Generator().manual_seed(seed)
        classes = [torch.nonzero(labels == label).flatten() for label in labels.unique()]
        classes = [places[torch.randperm(len(places), generator=generator)] for places in classes]
        pieces = skew.split([len(places) for places in classes], workers, seed)
        self.parts = [torch.cat([places[cut] for places, cut in zip(classes, own, strict=True)]) for own in pieces]
        """For each worker the places of its images."""

    def model(self) -> nn.Module:
        """The task's, with the same weights."""
        return _without_batch_norm(super().model())

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images of this worker's part alone."""
        part = self.parts[rank]
        chosen = part[torch.randint(len(part), (self._size,), generator=batch_generator(self._seed, step, rank))]
        return self._images[chosen], self._labels[chosen]


class OwnText(_OwnData):
    """Text split by source file; a file that several workers share is cut into one piece for each."""

    def __init__(self, task: Task, files: Sequence[torch.Tensor], *, skew: Skew, workers: int, seed: int) -> None:
        super().__init__(task, seed)
        inputs, _ = task.batch(0, 0)
        self._size, self._window = inputs.shape[0], inputs.shape[1] + 1
        pieces = skew.split([len(file) for file in files], workers, seed)
        self.parts = [torch.cat([file[cut] for file, cut in zip(files, own, strict=True)]) for own in pieces]
        """The text of each worker."""

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows of this worker's part alone."""
        part = self.parts[rank]
        generator = batch_generator(self._seed, step, rank)
        starts = torch.randint(len(part) - self._window, (self._size,), generator=generator)
        rows = torch.stack([part[start : start + self._window] for start in starts.tolist()]).to(torch.int64)
        return rows[:, :-1], rows[:, 1:]


def _without_batch_norm(module: nn.Module) -> nn.Module:
    """The same with GroupNorm wherever it has BatchNorm2d."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, nn.GroupNorm(4, child.num_features))
        else:
            _without_batch_norm(child)
    return module
