"""The contract of a synchronization rule: when replicas agree, on which quantity, and how the result is applied.

`Synchronization` has every property that the runtime, the simulator and the rules of legality use, with plain
bulk-synchronous training as the default. `quantity` and `barrier` say how a rule takes part in training:

    barrier, "gradient"    gradients are averaged before the optimizer's step; `around` does more than average them
    barrier, "momentum"    the optimizer's momentum is averaged in the gradients' place from some step on: `around`
                           puts it in the place of the gradient, where the optimizer reads it. In a step that
                           `begins`, gradients are averaged. In one in which nothing is `due`, each replica steps alone;
                           in one that `returns`, replicas agree again
    barrier, "change"      parameters are averaged after some steps; `outer` applies the mean. See `LocalUpdates`
    no barrier, "gradient" the server applies each gradient with `rate`, or the mean of the first ones of a step where
                           a rule `takes_first`. See `Asynchronous`
    no barrier, "change"   the server applies each worker's change of parameters by `arrive`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal, NamedTuple, Protocol, Self

import torch

from laconic.core.exchange import Exchange
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.stateful import BucketState, Resize
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError
from laconic.settings import Method, count

Quantity = Literal["gradient", "momentum", "change"]
"""gradient: of one step. momentum: the optimizer's, after this step's gradient was added to it. change: the change of
parameters since replicas last agreed."""


class Average(Protocol):
    """The collectives that a rule may use while a bucket is exchanged."""

    def __call__(self, flat: torch.Tensor, own: torch.Tensor | None) -> Exchange:
        """Replace `flat` by the mean; fill `own`, if given, with this rank's contribution to it."""
        ...

    def total(self, number: torch.Tensor) -> Exchange:
        """Replace a number by its sum over all replicas; counted as control traffic."""
        ...


class Pace(NamedTuple):
    """The pace of a worker."""

    last_s: float
    """When the worker's last gradient arrived."""
    step_s: float
    """The time from the server's last answer to the worker until that gradient."""


@dataclass(frozen=True, kw_only=True)
class Synchronization(Method):
    """WHEN replicas agree."""

    axis: ClassVar[str] = "synchronization"
    quantity: ClassVar[Quantity]
    """The quantity that is averaged."""
    replicas_identical: ClassVar[bool]
    """All replicas hold the same parameters after every step, if the architecture averages over all of them."""
    barrier: ClassVar[bool] = True
    """All replicas take part in every exchange; False: each trains without waiting for the others."""
    elastic: ClassVar[bool] = False
    """Training may continue when ranks die, join or leave: state that only one rank holds is a residual, or may be lost
    with it, and an exchange can be repeated."""
    needs_everyone: ClassVar[bool] = False
    """Needs the mean over all replicas, not over a few neighbours."""
    among_neighbours: ClassVar[bool] = False
    """Makes an outer step with the mean over a few neighbours, from an anchor of each replica's own."""
    acts_alone: ClassVar[bool] = False
    """Has an effect even with one worker."""
    keeps_scale: ClassVar[bool] = True
    """True: the optimizer gets the averaged values. False: it gets a direction of length one per parameter, which needs
    the learning rate of sign methods and an optimizer without momentum."""
    needs_clocks: ClassVar[bool] = False
    """Makes the fastest worker wait for the slowest, so the architecture must keep the step of each worker."""
    takes_first: ClassVar[bool] = False
    """An update is the mean of the first gradients of a step and later ones are dropped: see `num_first`. So one server
    must receive the gradients of all workers."""
    for_servers: ClassVar[tuple[str, ...]] = ()
    """Settings that take effect only where servers apply gradients."""
    server_fields: ClassVar[tuple[str, ...]] = ()
    """State per element that servers keep where they apply changes; zero at the start."""
    remembers_unsent: ClassVar[bool] = False
    """Keeps the values that compression does not send, so it needs a lossy compressor without a residual of its own."""
    adds_up_differences: ClassVar[bool] = False
    """Adds up, over all rounds, the differences between the mean and this replica's own change. So values that
    compression loses must be sent later: they would add up as well."""
    needs_factors: ClassVar[bool] = False
    """Makes its step from the two thin matrices that a low-rank compressor decodes, so it needs one that returns them
    (`BucketState.factors`)."""
    lazy: ClassVar[bool] = False
    """An exchange that is due begins by asking all replicas, and ends there if none has anything new to send. So the
    predicted bytes are an upper bound."""
    fields: ClassVar[Mapping[str, Resize]] = {}
    """Its state per element, and what becomes of each field when the number of workers changes."""
    whole_fields: ClassVar[Mapping[str, Resize]] = {}
    """Its state of a few numbers, kept with every parameter; `note` writes them, `noted` reads them."""
    asks_for_loss: ClassVar[bool] = False
    """When the next round is due depends on the loss, which the training loop reports: see `after_round`."""
    losses_field: ClassVar[str] = ""
    """The one of `whole_fields` that holds the losses this replica has reported since the last round: their sum and
    number. Written by the code that saves a state."""
    scale_equivariant: ClassVar[bool] = True
    """Twice the gradients give twice the result. False if the result is a direction: a GradScaler would divide it by
    its scale and shrink every step."""
    owed_fields: ClassVar[frozenset[str]] = frozenset()
    """Those fields that hold changes still to be sent, as they would be exchanged: they are applied when another
    strategy takes over."""
    partners: ClassVar[Mapping[str, str]] = {}
    """The default methods for axes that a strategy leaves off, where the general ones do not fit: axis -> text. As
    text, because the other axes are not known here."""
    scaled_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields in the unit of the gradients, which are rescaled when a GradScaler changes its scale."""
    corrects: ClassVar[bool] = False
    """`correct` changes a replica's parameters before each of its steps, where changes are exchanged."""
    needs_adam: ClassVar[bool] = False
    """Uses the moments of the optimizer, which must be Adam or one of its variants."""

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Raise AttachError if this cannot work with these parameters and this optimizer."""

    @property
    def usual_rate(self) -> str:
        """The learning rate to begin with where the optimizer gets a direction (`keeps_scale` is False), in words."""
        return "as for Adam"

    @property
    def interval(self) -> int:
        """Optimizer steps from one exchange of a fragment of the model to the next."""
        return 1

    @property
    def num_parts(self) -> int:
        """The number of fragments of the model that are exchanged at different times."""
        return 1

    @property
    def delay(self) -> int:
        """Steps between the launch of an exchange and its effect."""
        return 0

    @property
    def deadline_s(self) -> float | None:
        """Seconds after which a round ends even if fewer than `interval` steps have been made: the steps that are left
        are skipped, and ranks are weighted by the steps they have made. None: only steps count.
        """
        return None

    @property
    def warmup(self) -> int:
        """The number of steps at the start with an exchange each."""
        return 0

    @property
    def cycle(self) -> int:
        """Optimizer steps after which rounds of all parts come in the same order again."""
        return self.interval

    def rounds_per_step(self, moment: str = "") -> float:
        """Exchanges of the whole model, or of one of `moments`, per optimizer step."""
        return 1.0 / self.interval

    def round_number(self, step: int) -> int:
        """Exchanges of one fragment before `step` steps were complete."""
        early = min(step, self.warmup)
        return early + max(0, step // self.interval - self.warmup // self.interval)

    def due(self, num_steps: int) -> list[int]:
        """Fragments whose exchange is launched when `num_steps` steps are complete; where gradients or momenta are
        exchanged, with the last of these steps.
        """
        if num_steps <= self.warmup:
            return list(range(self.num_parts))
        every = self.interval
        return [part for part in range(self.num_parts) if num_steps % every == part * every // self.num_parts]

    def parts(self, tensors: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
        """The tensors of each fragment, with about the same number of bytes, then one list for each moment."""
        # Of all shards, so that those of one tensor go at the same time, however uneven they are.
        sizes = [tensor.whole_bytes or tensor.nbytes for tensor in tensors]
        total = sum(sizes)
        cut: list[list[TensorSpec]] = [[] for _ in range(self.num_parts)]
        for tensor, nbytes, end in zip(tensors, sizes, accumulate(sizes), strict=True):
            middle = end - nbytes / 2
            cut[min(self.num_parts - 1, int(middle * self.num_parts / max(total, 1)))].append(tensor)
        return cut + [[tensor.moment_of(moment) for tensor in tensors] for moment in self.moments]

    # -- what depends on the length of training ------------------------------------------------------------------

    def planned(self, total_steps: int) -> Self:
        """The same rule with the number of optimizer steps of training; raises if they are too few."""
        if self.interval > total_steps:
            raise AttachError(
                f"synchronization.{self.name} makes an outer step every {self.interval} steps, and training "
                f"takes {total_steps}: there would be none. Give a shorter period."
            )
        return self

    @property
    def asks_for_length(self) -> bool:
        """Whether it cannot be attached before it is `planned`."""
        return False

    @property
    def beginning(self) -> str:
        """The compressor of the steps in which the strategy's own is not used; "": that is used in all."""
        return ""

    def begins(self, step: int) -> bool:
        """Whether this step uses the compressor `beginning`."""
        return False

    # -- where the optimizer's momentum is averaged: quantity "momentum" ------------------------------------------

    def refresh(self, step: int, beta2: float) -> float:
        """The weight of this step's squared gradient in the variance once that is no longer Adam's own.

        0: no refresh, because `around` leaves a momentum and no gradient.
        """
        return 0.0

    def returns(self, step: int) -> bool:
        """Whether this step begins at the parameters that replicas last agreed on (`anchor`), whatever each has done
        since: its momentum represents all those steps.
        """
        return False

    @property
    def momentum_field(self) -> str:
        """The field that holds the momentum all replicas last agreed on."""
        return f"{self.name}.momentum"

    @property
    def variance_floor(self) -> float:
        """The smallest variance of an element when v is frozen, as a share of its tensor's mean."""
        return 0.0

    # -- where parameters are averaged after some steps: quantity "change" ---------------------------------------

    @property
    def anchor(self) -> str:
        """The field that holds x_old, the parameters replicas last agreed on."""
        return f"{self.name}.anchor"

    @property
    def keep(self) -> float:
        """The weight of a replica's own parameters when the new anchor is mixed in."""
        return 0.0

    @property
    def departure(self) -> str:
        """The field that holds a replica's own parameters at the start of a round, where the steps that it makes while
        the round is in flight are added to the result; "": they are not.
        """
        return ""

    @property
    def lasting_rounds(self) -> int:
        """Rounds after the last step of training in which the mean of all replicas still moves, by a momentum of each
        replica's own.
        """
        return 0

    @property
    def moments(self) -> Sequence[str]:
        """The names of optimizer states that are averaged uncompressed, besides the parameters; each is a fragment of
        its own, after those of the model.
        """
        return ()

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        """Move `anchor`, the parameters last agreed on, by the mean `change`.

        memory: this method's fields for the same elements. rate: the optimizer's learning rate for them.
        """
        raise NotImplementedError

    def correct(self, values: torch.Tensor, anchor: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        """Change a replica's parameters before the optimizer's step; gradients have been computed by then, except by a
        closure.

        values: of one parameter. anchor, memory: x_old and this method's fields for it, of its shape.
        rate: the optimizer's learning rate for it.
        """
        raise NotImplementedError

    # -- where workers do not wait for each other: no barrier ----------------------------------------------------

    @property
    def optimizer_on_servers(self) -> bool:
        """Whether servers run the optimizer, if there are servers; otherwise each worker runs its own."""
        return not self.barrier and self.quantity == "gradient"

    @property
    def lead(self) -> int | None:
        """Steps by which the fastest worker may be ahead of the slowest; None: any number."""
        return 0

    @property
    def sure_lead(self) -> int | None:
        """Steps by which the fastest worker may always be ahead; beyond these, up to `lead`, as `more_steps` says."""
        return self.lead

    def more_steps(self, fastest: Pace, slowest: Pace, room: int) -> int:
        """The steps, at most `room`, that the fastest worker makes before it waits; used beyond `sure_lead`."""
        return 0

    @property
    def compensation(self) -> float:
        """The strength of the correction of a gradient for updates since its worker last got parameters."""
        return 0.0

    def rate(self, world_size: int, staleness: int) -> float:
        """The factor of the learning rate for a gradient of this staleness, where gradients are sent."""
        raise NotImplementedError

    def arrive(
        self,
        values: torch.Tensor,
        change: torch.Tensor,
        memory: Mapping[str, torch.Tensor],
        *,
        arrival: int,
        world_size: int,
    ) -> None:
        """Move `values`, which a server holds, by the change that one worker has sent, where changes are sent.

        memory: `server_fields` for the same elements. arrival: the number of changes that came before this one.
        """
        raise NotImplementedError

    def num_first(self, world_size: int) -> int:
        """The number of gradients that make one update, where a rule `takes_first`.

        Raises AttachError if there are too few workers.
        """
        raise NotImplementedError

    # -- where the loss decides when the next round is due: asks_for_loss ------------------------------------------

    def after_round(self, num_steps: int, loss: float) -> Self:
        """The rule from here on: a round was due when `num_steps` steps were complete, and `loss` is the mean of
        the losses that all replicas have reported since the previous round.
        """
        return self

    def note(self, state: BucketState) -> None:
        """Write `whole_fields` into the state of a bucket."""

    def noted(self, state: BucketState) -> Self:
        """The rule that `whole_fields` in the state of a bucket describe."""
        return self

    # -- what is remembered ----------------------------------------------------------------------------------------

    def remembered(self) -> dict[str, Resize]:
        """Every field of its state per element: x_old where changes are exchanged, and its own."""
        agreed: dict[str, Resize] = {self.anchor: "copy"} if self.quantity == "change" else {}
        return {**agreed, **self.fields}

    def init(self, state: BucketState) -> None:
        """Add this rule's state for the bucket."""
        bucket = state.bucket
        for field in self.remembered():
            state.flat[field] = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)

    def around(self, flat: torch.Tensor, state: BucketState, average: Average) -> Exchange:
        """Exchange one bucket, with what this rule does before and after averaging."""
        return average(flat, None)


@dataclass(frozen=True, kw_only=True)
class Asynchronous(Synchronization):
    """Each worker continues without waiting for the others, or not for long.

    Where servers hold the parameters, a worker sends them the gradient of each step, or its change of parameters after
    some steps, and gets parameters back.
    """

    quantity: ClassVar[Quantity] = "gradient"
    replicas_identical: ClassVar[bool] = False
    barrier: ClassVar[bool] = False
    acts_alone: ClassVar[bool] = True

    @property
    def lead(self) -> int | None:
        """No limit: a worker never waits for another."""
        return None


@dataclass(frozen=True, kw_only=True)
class LocalUpdates(Synchronization):
    """Replicas train alone for `period` steps, then make an outer step along the mean change.

    d = mean_i(x_old - x_i),   x_old <- outer(x_old, d),   x_i <- x_old
    """

    quantity: ClassVar[Quantity] = "change"
    replicas_identical: ClassVar[bool] = False
    needs_everyone: ClassVar[bool] = True

    period: int = count(32, at_least=1, advice='To average every step use "bsp".')
    """Optimizer steps between two outer steps."""

    @property
    def interval(self) -> int:
        return self.period


def nesterov(anchor: torch.Tensor, change: torch.Tensor, momentum: torch.Tensor, lr: float, beta: float) -> None:
    """One step of SGD with Nesterov momentum, as torch.optim.SGD takes it."""
    momentum.mul_(beta).add_(change)
    anchor.add_(change, alpha=-lr).add_(momentum, alpha=-lr * beta)


def exchange_momentum(
    momentum: torch.Tensor, beta: float, flat: torch.Tensor, average: Average, *, removed: float = 1.0
) -> Exchange:
    """Add `flat` to a decaying momentum, average the part that the compressor selects, and keep the rest.

    m <- beta m + flat,   q = C(m),   m <- m - removed q,   flat <- mean(q)
    """
    momentum.mul_(beta).add_(flat)
    flat.copy_(momentum)
    sent = torch.empty_like(flat)
    yield from average(flat, sent)
    momentum.sub_(sent, alpha=removed)
    # Values that are not finite have been sent, so all ranks have them; keeping them would spoil all later steps.
    momentum.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
