"""Replayed compute: layers sleep for their compute time, and their gradients are real and cross the real links."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.errors import UsageError
from laconic.experiments.replayed import NoUpdate, ReplayedModel
from laconic.experiments.tasks.contract import TaskConfig, millions
from laconic.workload import workload


class ReplayTask:
    """A workload, step after step, without learning."""

    learns = False

    def __init__(self, config: TaskConfig) -> None:
        if config.data is None:
            raise UsageError("give a workload: a built-in name or a JSON file.")
        self.workload = workload(config.data)
        if config.compute_s is not None:
            self.workload = self.workload.scaled(compute_s=config.compute_s)
        self._first: ReplayedModel | None = None
        self.num_parameters = self.workload.num_parameters
        about = f"{millions(self.num_parameters)} parameters, {self.workload.compute_s * 1e3:.0f} ms compute"
        self.title = f"{self.workload.name} replayed ({about})"

    def model(self) -> nn.Module:
        """All models of a process share the memory of their parameters, which never change."""
        model = ReplayedModel(self.workload, storage=self._first)
        self._first = self._first or model
        return model

    def optimizer(self, model: nn.Module, *, directions: bool = False) -> Optimizer:
        return NoUpdate(model.parameters())

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """An empty batch: gradients do not depend on it."""
        return torch.zeros(1), torch.zeros(1)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """A scalar to start the backward pass from."""
        return outputs.sum()
