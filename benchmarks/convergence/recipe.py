"""How a model is trained: an optimizer, and a learning rate that rises, then falls to zero."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import SGD, AdamW, Optimizer


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One optimizer with one schedule: linear warm-up, then half a cosine down to zero."""

    optimizer: Literal["adamw", "sgd"]
    learning_rate: float
    """The highest one, at the end of warm-up."""
    momentum: float = 0.0
    """Of SGD; AdamW has torch's defaults."""
    warmup: float = 0.05
    """Its share of the steps."""

    def make(self, model: nn.Module) -> Optimizer:
        """The optimizer for `model`."""
        if self.optimizer == "adamw":
            return AdamW(model.parameters(), lr=self.learning_rate)
        return SGD(model.parameters(), lr=self.learning_rate, momentum=self.momentum)

    def rates(self, steps: int) -> Iterator[float]:
        """The learning rate of each step."""
        warmup = max(1, round(self.warmup * steps))
        for step in range(steps):
            fallen = max(0, step - warmup) / max(1, steps - warmup)
            yield self.learning_rate * min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * fallen))

    def __str__(self) -> str:
        name = "AdamW" if self.optimizer == "adamw" else "SGD"
        return f"{name} {self.learning_rate:g}" + (f", momentum {self.momentum:g}" if self.momentum else "")
