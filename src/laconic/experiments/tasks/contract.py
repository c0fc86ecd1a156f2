"""What a task is: a model, an optimizer, batches that depend on nothing but seed, step and rank, and a loss."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.errors import UsageError

TaskKind = Literal["text", "images", "replay"]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Which task, and how large."""

    kind: TaskKind = "text"
    size: str = "small"
    """Of the model; a replayed workload has the size it has."""
    batch: int = 2
    """Samples per rank and step; a replayed workload has its own."""
    learning_rate: float = 1e-3
    seed: int = 0
    """Of initial weights and batches."""
    data: str | None = None
    """A text file, an .npz file, a workload's name or file; None: the standard library's source text."""
    compute_s: float | None = None
    """replay: how long one step computes; None: as long as the workload says."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UsageError(f"batch must be >= 1, got {self.batch}.")
        if not 0 < self.learning_rate < float("inf"):
            raise UsageError(f"the learning rate must be > 0, got {self.learning_rate}.")
        if self.compute_s is not None and self.kind != "replay":
            raise UsageError(f"compute_s has no effect on the task {self.kind}; only replayed compute can be slept.")
        if self.kind == "replay":
            for field in fields(self):
                if field.name not in ("kind", "data", "compute_s") and getattr(self, field.name) != field.default:
                    raise UsageError(f"{field.name} has no effect on a replayed workload; leave it out.")
        if self.compute_s is not None and not 0 < self.compute_s <= 3600:
            raise UsageError(f"the compute time of a step must be > 0 and at most an hour, got {self.compute_s:g} s.")


class Task(Protocol):
    """Something to train; making one checks that its data is there."""

    title: str
    """The work in a few words, e.g. GPT (small, 1.9 M parameters) on text."""
    learns: bool
    """Whether its loss means anything."""

    def model(self) -> nn.Module:
        """A new model; the same weights every time."""
        ...

    def optimizer(self, model: nn.Module, *, directions: bool = False) -> Optimizer:
        """An optimizer for it; directions: for a strategy that gives directions of length one, not gradients."""
        ...

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets: the same for the same step and rank, whatever strategy asks."""
        ...

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """What to minimise."""
        ...


def batch_generator(seed: int, step: int, rank: int) -> torch.Generator:
    """Random numbers that belong to one batch alone."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + rank)


def millions(num_parameters: int) -> str:
    """1.9 M, for titles."""
    return f"{num_parameters / 1e6:.3g} M"
