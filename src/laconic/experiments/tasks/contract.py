"""The contract of a task: a model, an optimizer, batches that depend only on seed, step and rank, and a loss."""

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
    """The task and its size."""

    kind: TaskKind = "text"
    size: str = "small"
    """The size of the model; a replayed workload has its own."""
    batch: int = 2
    """Samples per rank and step; a replayed workload has its own."""
    learning_rate: float = 1e-3
    seed: int = 0
    """The seed of initial weights and batches."""
    data: str | None = None
    """A text file, an .npz file, a workload's name or file; None: the standard library's source text."""
    compute_s: float | None = None
    """replay: the compute time of one step; None: the workload's own."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UsageError(f"batch must be >= 1, got {self.batch}.")
        if not 0 < self.learning_rate < float("inf"):
            raise UsageError(f"the learning rate must be > 0, got {self.learning_rate}.")
        if self.compute_s is not None and self.kind != "replay":
            raise UsageError(f"compute_s has no effect on the task {self.kind}, only on replay. Leave it out.")
        if self.kind == "replay":
            for field in fields(self):
                if field.name not in ("kind", "data", "compute_s") and getattr(self, field.name) != field.default:
                    raise UsageError(f"{field.name} has no effect on a replayed workload; leave it out.")
        if self.compute_s is not None and not 0 < self.compute_s <= 3600:
            raise UsageError(f"the compute time of a step must be > 0 and at most an hour, got {self.compute_s:g} s.")


class Task(Protocol):
    """A task; constructing one checks that its data can be read."""

    title: str
    """The task in a few words, e.g. GPT (small, 1.84 M parameters) on text."""
    num_parameters: int
    """The number of parameters of the model."""
    learns: bool
    """Whether its loss means anything."""

    def model(self) -> nn.Module:
        """A new model; the same weights every time."""
        ...

    def optimizer(self, model: nn.Module, *, directions: bool = False) -> Optimizer:
        """An optimizer for the model; directions: for a strategy that gives directions of length one, not gradients."""
        ...

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets: the same for the same step and rank under every strategy."""
        ...

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss to minimise."""
        ...


def batch_generator(seed: int, step: int, rank: int) -> torch.Generator:
    """Random numbers that belong to one batch alone."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + rank)


def millions(num_parameters: int) -> str:
    """The number in millions for titles, such as 1.84 M."""
    return f"{num_parameters / 1e6:.3g} M"
