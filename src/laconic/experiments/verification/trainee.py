"""The small model that every check trains, and its observable state.

Its layers have the names and shapes of larger models (matrices, a normalization, biases), so that wrappers that select
by name or shape have an effect. Weights and batches follow from seeds alone: ranks are threads of one process, and must
not draw from the generator they share.
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
from laconic.experiments.verification.course import with_length
from laconic.experiments.verification.stage import Stage
from laconic.runtime import Session
from laconic.runtime.shards import is_sharded
from laconic.strategy import Strategy

Size = Literal["small", "large"]
_WIDTHS: dict[Size, int] = {"small": 96, "large": 384}
_INPUTS, _OUTPUTS, _BATCH = 16, 8, 16
_HELD_OUT = 10**6
"""A step that no training reaches: its batch is for measuring the loss."""


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
        """The output of the model."""
        hidden = torch.tanh(self.embed(inputs))
        return self.head(self.norm(hidden + torch.tanh(self.block(hidden))))


class Trainee:
    """A model with its optimizer on one rank."""

    def __init__(self, stage: Stage, strategy: Strategy, size: Size | None = None) -> None:
        self.strategy = strategy = with_length(strategy)
        self.rank = stage.rank
        self.model = SmallNet(size or fitting_size(strategy))
        if strategy.architecture.holds_shards:
            self._shard(stage.world_size)
        traits = strategy.compression.traits
        directions = not strategy.synchronization.keeps_scale or not traits.keeps_scale
        # Momentum for strategies without momentum of their own; a direction has length one per parameter already.
        own_momentum = directions or traits.accumulates
        rate = 0.002 if directions else 0.02
        self.optimizer: Optimizer = SGD(self.model.parameters(), lr=rate, momentum=0.0 if own_momentum else 0.9)
        if strategy.synchronization.needs_adam:
            self.optimizer = AdamW(self.model.parameters(), lr=rate / 10)
        self._stage = stage
        self._session: Session | None = None

    def _shard(self, world_size: int) -> None:
        """Shard the model over all ranks, in two parts."""
        # Slow imports that few need.
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        # Without a mesh, fully_shard would move the model to a GPU, of which there may be fewer than ranks.
        mesh = init_device_mesh("cpu", (world_size,))
        fully_shard(self.model.block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def attach(self, start: int = 0) -> Session:
        """Put the strategy to work, as if `start` steps had been made before."""
        self._session = session = self._stage.attach(self.model, self.optimizer, self.strategy)
        if start:
            session.load_state_dict({**session.state_dict(), "step": start})
        return session

    def loss(self, step: int, rank: int | None = None) -> torch.Tensor:
        """The loss on the batch of a rank, by default this one, in a step."""
        inputs, targets = _batch(step, self.rank if rank is None else rank)
        return functional.mse_loss(self.model(inputs), targets)

    def held_out_loss(self) -> float:
        """The loss on a batch that is never trained on, the same for all ranks."""
        with torch.no_grad():
            return self.loss(_HELD_OUT, 0).item()

    def backward(self, step: int) -> None:
        """Compute the gradients of a step."""
        self.optimizer.zero_grad()
        loss = self.loss(step)
        loss.backward()
        if self._session is not None:
            self._session.report_loss(loss)

    def train(self, steps: Iterable[int]) -> None:
        """Make these steps."""
        for step in steps:
            self.backward(step)
            self.optimizer.step()

    def rest(self) -> None:
        """Make the optimizer change nothing from now on."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0

    def parameters(self) -> dict[str, torch.Tensor]:
        """The state of the model, by name."""
        # Its state, not its parameters: state_dict() makes deferred updates first.
        held = self.model.state_dict()
        return {name: value.full_tensor() if is_sharded(value) else value for name, value in held.items()}

    def flat(self) -> torch.Tensor:
        """All parameters one after the other, in float64."""
        return torch.cat([value.reshape(-1).double() for value in self.parameters().values()])

    def specs(self) -> list[TensorSpec]:
        """The parameters in the order that plans use before the first gradient: backwards."""
        return [TensorSpec.of(name, value) for name, value in reversed(self.parameters().items())]


@lru_cache(maxsize=2)
def model_specs(size: Size) -> tuple[TensorSpec, ...]:
    """The same parameters as in `Trainee.specs`, for a size."""
    return tuple(TensorSpec.of(name, value) for name, value in reversed([*SmallNet(size).named_parameters()]))


def fitting_size(strategy: Strategy) -> Size:
    """The smallest model on which the strategy has an effect; raises AttachError if there is none."""
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
    """A text that is equal for equal bits only."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and the outputs of a fixed layer."""
    generator = torch.Generator().manual_seed(1000 * step + rank + 7)
    inputs = torch.randn(_BATCH, _INPUTS, generator=generator)
    teacher = torch.randn(_INPUTS, _OUTPUTS, generator=torch.Generator().manual_seed(2))
    return inputs, torch.tanh(inputs @ teacher / 4)
