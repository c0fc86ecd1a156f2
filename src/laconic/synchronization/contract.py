"""What a synchronization rule promises: when replicas agree, on which quantity, and how the result is applied.

`Synchronization` holds every question that the runtime, the simulator and the rules of legality ask, with the answer of
plain bulk-synchronous training as the default. `quantity` and `barrier` say how a rule takes part in training:

    barrier, "gradient"    gradients are averaged before the optimizer's step; `around` does more than average them
    barrier, "momentum"    the optimizer's momentum is averaged in the gradients' place from some step on: `around`
                           leaves it where the gradient was, and the optimizer is given it; `begins`: not yet
    barrier, "change"      parameters are averaged after some steps; `outer` applies the mean. See `LocalUpdates`
    no barrier             whoever holds the common state applies each gradient with `rate`. See `Asynchronous`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal, Self

import torch

from laconic.core.exchange import Exchange
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.stateful import BucketState, Resize
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError
from laconic.settings import Method, count

Quantity = Literal["gradient", "momentum", "change"]
"""gradient: of one step. momentum: the optimizer's, after this step's gradient was added to it. change: how far
parameters have moved since replicas last agreed."""

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
    keeps_scale: ClassVar[bool] = True
    """The optimizer gets what was averaged with its size; else a direction of length one per parameter, which needs the
    learning rate of sign methods and an optimizer without momentum."""
    needs_clocks: ClassVar[bool] = False
    """Makes the fastest worker wait for the slowest, so something must know how far each is."""
    for_servers: ClassVar[tuple[str, ...]] = ()
    """Settings that take effect only where servers apply gradients."""
    remembers_unsent: ClassVar[bool] = False
    """Keeps what compression does not send, so it needs a compressor that loses something and forgets it."""
    fields: ClassVar[Mapping[str, Resize]] = {}
    """What it remembers per element, and what becomes of that when the number of workers changes."""
    scale_equivariant: ClassVar[bool] = True
    """Twice the gradients give twice the result. False where only a direction comes out: a GradScaler divides it
    by its scale, which would shrink every step."""
    partners: ClassVar[Mapping[str, str]] = {}
    """What parts of a strategy that are left off are, where the general defaults would not do: axis -> text. By name,
    because the other axes are not known here."""
    scaled_fields: ClassVar[frozenset[str]] = frozenset()
    """Those fields that are in the unit of the gradients: they follow when a GradScaler changes its scale."""

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Raise AttachError if this cannot work with these parameters and this optimizer."""

    @property
    def interval(self) -> int:
        """Optimizer steps from one round of a part of the model to the next."""
        return 1

    @property
    def num_parts(self) -> int:
        """Into how many parts the model is cut that are exchanged at different times."""
        return 1

    @property
    def delay(self) -> int:
        """Steps between the start of a round and its effect."""
        return 0

    @property
    def warmup(self) -> int:
        """Steps at the beginning with a round each."""
        return 0

    def rounds_per_step(self) -> float:
        """How often everything is exchanged, per optimizer step."""
        return 1.0 / self.interval

    def round_number(self, step: int) -> int:
        """Rounds of one part before `step` steps were complete."""
        early = min(step, self.warmup)
        return early + max(0, step // self.interval - self.warmup // self.interval)

    def due(self, num_steps: int) -> list[int]:
        """Parts whose exchange begins when `num_steps` steps are complete."""
        if num_steps <= self.warmup:
            return list(range(self.num_parts))
        every = self.interval
        return [part for part in range(self.num_parts) if num_steps % every == part * every // self.num_parts]

    def parts(self, tensors: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
        """The tensors that are exchanged at one time: as many lists as there are parts, of about equally many bytes."""
        # Of all shards, so that those of one tensor go at the same time, however uneven they are.
        sizes = [tensor.whole_bytes or tensor.nbytes for tensor in tensors]
        total = sum(sizes)
        cut: list[list[TensorSpec]] = [[] for _ in range(self.num_parts)]
        for tensor, nbytes, end in zip(tensors, sizes, accumulate(sizes), strict=True):
            middle = end - nbytes / 2
            cut[min(self.num_parts - 1, int(middle * self.num_parts / max(total, 1)))].append(tensor)
        return cut

    # -- what depends on how long training will be ----------------------------------------------------------------

    def planned(self, total_steps: int) -> Self:
        """The same, knowing how many optimizer steps training will take; raises if they are too few."""
        if self.interval > total_steps:
            raise AttachError(
                f"synchronization.{self.name} has a round every {self.interval} steps, and training takes "
                f"{total_steps}: there would be none. Give a shorter period."
            )
        return self

    @property
    def asks_for_length(self) -> bool:
        """Whether it cannot be attached before it is `planned`."""
        return False

    @property
    def beginning(self) -> str:
        """The compressor of the steps in which the strategy's is not used; "": it is used in all."""
        return ""

    def begins(self, step: int) -> bool:
        """Whether `beginning` sends what is exchanged in this step."""
        return False

    # -- where the optimizer's momentum is averaged: quantity "momentum" ------------------------------------------

    def refresh(self, step: int, beta2: float) -> float:
        """How much the squared gradient of this step counts in the second moment once that is no longer Adam's own.

        0: nothing, because `around` leaves a momentum and no gradient.
        """
        return 0.0

    @property
    def momentum_field(self) -> str:
        """The field that holds the momentum all replicas last agreed on."""
        return f"{self.name}.momentum"

    @property
    def variance_floor(self) -> float:
        """The least second moment of an element when it is frozen, as a share of its tensor's mean."""
        return 0.0

    # -- where parameters are averaged after some steps: quantity "change" ---------------------------------------

    @property
    def anchor(self) -> str:
        """The field that holds x_old, the parameters replicas last agreed on."""
        return f"{self.name}.anchor"

    @property
    def keep(self) -> float:
        """The weight of a replica's own parameters when the outcome of a round is mixed in."""
        return 0.0

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        """Move `anchor`, the parameters last agreed on, by the mean `change`.

        memory: this method's fields for the same elements. rate: the optimizer's learning rate for them.
        """
        raise NotImplementedError

    # -- where each worker goes on by itself: no barrier -----------------------------------------------------------

    @property
    def lead(self) -> int | None:
        """Steps by which the fastest worker may be ahead of the slowest; None: any number."""
        return 0

    @property
    def compensation(self) -> float:
        """How strongly a gradient is corrected for what has changed since its worker last got parameters."""
        return 0.0

    def rate(self, world_size: int, staleness: int) -> float:
        """What the learning rate is multiplied by for a gradient that so many others have overtaken."""
        raise NotImplementedError

    # -- what is remembered ----------------------------------------------------------------------------------------

    def remembered(self) -> dict[str, Resize]:
        """Every field it remembers per element: x_old where changes are exchanged, and its own."""
        agreed: dict[str, Resize] = {self.anchor: "copy"} if self.quantity == "change" else {}
        return {**agreed, **self.fields}

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

    @property
    def lead(self) -> int | None:
        """See Synchronization; nobody waits for anybody."""
        return None


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
    def interval(self) -> int:
        """See Synchronization."""
        return self.period


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
