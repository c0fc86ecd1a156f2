"""What a synchronization rule promises: when replicas agree, on which quantity, and how the result is applied.

A rule that works on gradients writes `around` if it does more than average them. One that lets replicas train alone for
a while and then exchanges how far they have come extends `LocalUpdates` and writes `outer`. Rules without a barrier
(`Asynchronous`) are carried out by whoever holds the common state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

import torch

from laconic.core.exchange import Exchange
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.stateful import BucketState, Resize
from laconic.core.tensor import TensorSpec
from laconic.settings import Method, count

Quantity = Literal["gradient", "change"]
"""gradient: of one step. change: how far parameters have moved since replicas last agreed."""

Average = Callable[[torch.Tensor, "torch.Tensor | None"], Exchange]
"""Replaces its first argument by the mean; fills the second, if given, with what this rank contributed to it."""


@dataclass(frozen=True, kw_only=True)
class Synchronization(Method):
    """WHEN replicas agree."""

    axis: ClassVar[str] = "synchronization"
    quantity: ClassVar[Quantity]
    """What is averaged."""
    replicas_identical: ClassVar[bool]
    """All replicas hold the same parameters after every step, where all average with all."""
    barrier: ClassVar[bool] = True
    """Everybody takes part in a round; else each goes on by itself."""
    needs_everyone: ClassVar[bool] = False
    """Works on the mean over all replicas, not only over a few of them."""
    acts_alone: ClassVar[bool] = False
    """Does something even where there is only one worker."""
    remembers_unsent: ClassVar[bool] = False
    """Keeps what compression does not send, so it needs a compressor that loses something and forgets it."""
    fields: ClassVar[Mapping[str, Resize]] = {}
    """What it remembers per element, and what becomes of that when the number of workers changes."""
    scale_equivariant: ClassVar[bool] = True
    """Twice the gradients give twice the result. False where only a direction comes out: a GradScaler divides that by
    its scale, so every step would shrink."""
    scaled_fields: ClassVar[frozenset[str]] = frozenset()
    """Those fields that are in the unit of the gradients: they follow when a GradScaler changes its scale."""

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Raise AttachError if this cannot work with these parameters and this optimizer."""

    def rounds_per_step(self) -> float:
        """How often everything is exchanged, per optimizer step."""
        return 1.0

    def round_number(self, step: int) -> int:
        """How many rounds were made before `step` steps were complete."""
        return step

    def due(self, num_steps: int) -> list[int]:
        """Parts whose exchange begins when `num_steps` steps are complete."""
        return [0]

    def parts(self, tensors: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
        """The tensors that are exchanged at one time; several lists where they take turns."""
        return [list(tensors)]

    def remembered(self) -> dict[str, Resize]:
        """Every field it remembers per element."""
        return dict(self.fields)

    def init(self, state: BucketState) -> None:
        """Add what is remembered about the state's bucket."""
        bucket = state.bucket
        for field in self.remembered():
            state.flat[field] = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)

    def around(self, flat: torch.Tensor, state: BucketState, average: Average) -> Exchange:
        """Exchange one bucket, with what this rule does before and after averaging."""
        return average(flat, None)


@dataclass(frozen=True, kw_only=True)
class Asynchronous(Synchronization):
    """Each worker goes on without waiting for the others, or not for long.

    Where servers hold the parameters, a worker sends them the gradient of each step and gets parameters back.
    """

    quantity: ClassVar[Quantity] = "gradient"
    replicas_identical: ClassVar[bool] = False
    barrier: ClassVar[bool] = False
    acts_alone: ClassVar[bool] = True
    needs_clocks: ClassVar[bool] = False
    """Makes the fastest worker wait for the slowest, so something must know how far each is."""
    for_servers: ClassVar[tuple[str, ...]] = ()
    """Settings that take effect only where servers apply gradients."""

    @property
    def lead(self) -> int | None:
        """Steps by which the fastest worker may be ahead of the slowest; None: any number."""
        return None

    @property
    def compensation(self) -> float:
        """How strongly a gradient is corrected for what has changed since its worker last got parameters."""
        return 0.0

    def rate(self, world_size: int, staleness: int) -> float:
        """What the learning rate is multiplied by for a gradient that so many others have overtaken."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LocalUpdates(Synchronization):
    """Replicas train alone for `period` steps, then agree on how far they have come.

    d = mean_i(x_old - x_i),   x_old <- outer(x_old, d),   x_i <- x_old
    """

    quantity: ClassVar[Quantity] = "change"
    replicas_identical: ClassVar[bool] = False
    needs_everyone: ClassVar[bool] = True

    period: int = count(32, at_least=1, advice='To average every step use "bsp".')
    """Optimizer steps between two rounds."""

    @property
    def anchor(self) -> str:
        """The field that holds x_old, the parameters replicas last agreed on."""
        return f"{self.name}.anchor"

    @property
    def num_parts(self) -> int:
        """Into how many parts the model is cut that are exchanged at different times."""
        return 1

    @property
    def delay(self) -> int:
        """Steps between the start of a round and its effect."""
        return 0

    @property
    def keep(self) -> float:
        """The weight of a replica's own parameters when the outcome of a round is mixed in."""
        return 0.0

    @property
    def warmup(self) -> int:
        """Steps at the beginning with a round each."""
        return 0

    def rounds_per_step(self) -> float:
        """Once per period."""
        return 1.0 / self.period

    def round_number(self, step: int) -> int:
        """Rounds of one part before `step` steps were complete."""
        early = min(step, self.warmup)
        return early + max(0, step // self.period - self.warmup // self.period)

    def due(self, num_steps: int) -> list[int]:
        """Parts whose exchange begins when `num_steps` steps are complete."""
        if num_steps <= self.warmup:
            return list(range(self.num_parts))
        return [
            part for part in range(self.num_parts) if num_steps % self.period == part * self.period // self.num_parts
        ]

    def parts(self, tensors: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
        """As many lists as there are parts, in order, of about the same number of bytes."""
        total = sum(tensor.nbytes for tensor in tensors)
        cut: list[list[TensorSpec]] = [[] for _ in range(self.num_parts)]
        for tensor, end in zip(tensors, accumulate(tensor.nbytes for tensor in tensors), strict=True):
            middle = end - tensor.nbytes / 2
            cut[min(self.num_parts - 1, int(middle * self.num_parts / max(total, 1)))].append(tensor)
        return cut

    def remembered(self) -> dict[str, Resize]:
        """The parameters last agreed on, and what else is remembered."""
        return {self.anchor: "copy", **self.fields}

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        """Move `anchor`, the parameters last agreed on, by the mean `change`.

        memory: this method's fields for the same elements. rate: the optimizer's learning rate for them.
        """
        raise NotImplementedError


def nesterov(anchor: torch.Tensor, change: torch.Tensor, momentum: torch.Tensor, lr: float, beta: float) -> None:
    """One step of SGD with Nesterov momentum, as torch.optim.SGD takes it."""
    momentum.mul_(beta).add_(change)
    anchor.add_(change, alpha=-lr).add_(momentum, alpha=-lr * beta)


def exchange_momentum(momentum: torch.Tensor, beta: float, flat: torch.Tensor, average: Average) -> Exchange:
    """Add `flat` to a decaying momentum, average what the compressor takes out of it, and keep the rest.

    m <- beta m + flat,   q = C(m),   m <- m - q,   flat <- mean(q)
    """
    momentum.mul_(beta).add_(flat)
    flat.copy_(momentum)
    sent = torch.empty_like(flat)
    yield from average(flat, sent)
    momentum -= sent
    # What is not finite has been sent as it is, for everyone to see; remembering it would spoil all that follows.
    momentum.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
