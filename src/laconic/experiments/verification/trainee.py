"""The small model every check trains, and what can be seen of it.

Its layers have the names and shapes of larger models (matrices, a normalization, biases), so that wrappers which go by
name or shape find something to do. Weights and batches follow from seeds alone: ranks are threads of one process, and
must not draw from the generator they share.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError
from laconic.experiments.verification.stage import Stage
from laconic.runtime import Session
from laconic.runtime.shards import is_sharded
from laconic.strategy import Strategy

Size = Literal["small", "large"]
_WIDTHS: dict[Size, int] = {"small": 96, "large": 384}
_INPUTS, _OUTPUTS, _BATCH = 16, 8, 16
_STEPS = 100
"""For strategies that want to know how long training is."""
_HELD_OUT = 10**6
"""A step no training reaches: its batch is for looking at the loss."""


class SmallNet(nn.Module):
    """Three layers and a normalization."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = _WIDTHS[size]
        self.embed = nn.Linear(_INPUTS, width)
        self.block = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _OUTPUTS)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(noise / math.sqrt(parameter.shape[1]))
                elif not name.startswith("norm"):
                    parameter.zero_()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the model makes of a batch."""
        hidden = torch.tanh(self.embed(inputs))
        return self.head(self.norm(hidden + torch.tanh(self.block(hidden))))


class Trainee:
    """A model with its optimizer, in the hands of one rank."""

    def __init__(self, stage: Stage, strategy: Strategy, size: Size | None = None) -> None:
        self.strategy = strategy = strategy.planned(_STEPS) if strategy.synchronization.asks_for_length else strategy
        self.rank = stage.rank
        self.model = SmallNet(size or fitting_size(strategy))
        if strategy.architecture.holds_shards:
            self._shard()
        traits = strategy.compression.traits
        directions = not strategy.synchronization.keeps_scale or not traits.keeps_scale
        # Momentum is for those that bring none of their own; a direction has length one per parameter already.
        own_momentum = directions or traits.accumulates
        rate = 0.002 if directions else 0.02
        self.optimizer: Optimizer = SGD(self.model.parameters(), lr=rate, momentum=0.0 if own_momentum else 0.9)
        if strategy.synchronization.quantity == "momentum":
            self.optimizer = AdamW(self.model.parameters(), lr=rate / 10)
        self._stage = stage

    def _shard(self) -> None:
        """Cut the model up among all ranks, in two parts."""
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - takes a second, and few need it

        fully_shard(self.model.block)
        fully_shard(self.model)

    def attach(self, start: int = 0) -> Session:
        """Put the strategy to work, as if `start` steps had been made before."""
        session = self._stage.attach(self.model, self.optimizer, self.strategy)
        if start:
            session.load_state_dict({**session.state_dict(), "step": start})
        return session

    def loss(self, step: int, rank: int | None = None) -> torch.Tensor:
        """Of the batch that a rank, this one if none is named, has in a step."""
        inputs, targets = _batch(step, self.rank if rank is None else rank)
        return functional.mse_loss(self.model(inputs), targets)

    def held_out_loss(self) -> float:
        """On a batch nobody trains on, the same for all."""
        with torch.no_grad():
            return self.loss(_HELD_OUT, 0).item()

    def backward(self, step: int) -> None:
        """Compute the gradients of a step."""
        self.optimizer.zero_grad()
        self.loss(step).backward()

    def train(self, steps: Iterable[int]) -> None:
        """Make these steps."""
        for step in steps:
            self.backward(step)
            self.optimizer.step()

    def rest(self) -> None:
        """Let the optimizer change nothing from here on."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0

    def parameters(self) -> dict[str, torch.Tensor]:
        """What the model holds, by name."""
        # Its state, not its parameters: updates that wait for the next forward pass are made before a state is given.
        held = self.model.state_dict()
        return {name: value.full_tensor() if is_sharded(value) else value for name, value in held.items()}

    def flat(self) -> torch.Tensor:
        """All parameters one after the other, in float64."""
        return torch.cat([value.reshape(-1).double() for value in self.parameters().values()])

    def specs(self) -> list[TensorSpec]:
        """The parameters as plans see them before any gradient has been seen: backwards."""
        return [TensorSpec.of(name, value) for name, value in reversed(self.parameters().items())]


@lru_cache(maxsize=2)
def model_specs(size: Size) -> tuple[TensorSpec, ...]:
    """The same without a model at hand."""
    return tuple(TensorSpec.of(name, value) for name, value in reversed([*SmallNet(size).named_parameters()]))


def fitting_size(strategy: Strategy) -> Size:
    """The smallest model on which the strategy has something to do; raises AttachError if there is none."""
    for size in _WIDTHS:
        try:
            strategy.compression.check(model_specs(size)[::-1], OptimizerFacts(name="SGD"))
        except AttachError:
            if size == "large":
                raise
        else:
            return size
    raise AssertionError("the largest size returns or raises")


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """A text that is the same for the same bits, and only for these."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and what a fixed layer makes of them."""
    generator = torch.Generator().manual_seed(1000 * step + rank + 7)
    inputs = torch.randn(_BATCH, _INPUTS, generator=generator)
    teacher = torch.randn(_INPUTS, _OUTPUTS, generator=torch.Generator().manual_seed(2))
    return inputs, torch.tanh(inputs @ teacher / 4)
