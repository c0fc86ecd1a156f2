"""How a model is trained: an optimizer, and a learning rate that rises, then falls to zero."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

OptimizerName = Literal["adamw", "muon", "sgd"]
_NAMES: dict[OptimizerName, str] = {"adamw": "AdamW", "muon": "Muon", "sgd": "SGD"}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One optimizer with one schedule: linear warm-up, then half a cosine down to zero."""

    optimizer: OptimizerName
    """muon: for the matrices of a transformer's blocks, with steps as long as AdamW's; AdamW for the rest."""
    learning_rate: float
    """The highest one, at the end of warm-up."""
    momentum: float = 0.0
    """Of SGD."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW; otherwise, AdamW and Muon have torch's defaults."""
    warmup: float = 0.05
    """Its share of the steps."""

    def make(self, model: nn.Module) -> list[Optimizer]:
        """The optimizers for `model`."""
        parameters = list(model.parameters())
        if self.optimizer == "sgd":
            return [SGD(parameters, lr=self.learning_rate, momentum=self.momentum)]
        if self.optimizer == "adamw":
            return [AdamW(parameters, lr=self.learning_rate, betas=self.betas)]
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        matrices = [parameter for parameter in parameters if parameter.dim() == 2 and id(parameter) not in embeddings]
        others = [parameter for parameter in parameters if parameter.dim() != 2 or id(parameter) in embeddings]
        return [
            Muon(matrices, lr=self.learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            AdamW(others, lr=self.learning_rate, betas=self.betas),
        ]

    def rates(self, steps: int) -> Iterator[float]:
        """The learning rate of each step."""
        warmup = max(1, round(self.warmup * steps))
        for step in range(steps):
            fallen = max(0, step - warmup) / max(1, steps - warmup)
            yield self.learning_rate * min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * fallen))

    @staticmethod
    def step(optimizers: Sequence[Optimizer], rate: float) -> None:
        """One step of all of them with this learning rate; gradients are then gone."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()

    def __str__(self) -> str:
        momentum = f", momentum {self.momentum:g}" if self.momentum else ""
        return f"{_NAMES[self.optimizer]} {self.learning_rate:g}{momentum}"
