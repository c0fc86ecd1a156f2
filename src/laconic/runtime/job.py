"""What is trained, how it communicates, and how far it has come: what session and hooks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.core.clock import Clock
from laconic.core.event import DiscardEvents, EventSink
from laconic.core.exchange import Exchange, Servers, Wire
from laconic.core.moment import Moment
from laconic.core.plan import Bucket, Plan
from laconic.core.tensor import TensorSpec
from laconic.core.transport import Transport
from laconic.runtime.buckets import Buckets
from laconic.runtime.engine import Engine, Task
from laconic.runtime.loss_scale import LossScale
from laconic.runtime.shards import Pieces, specs_of
from laconic.runtime.stopwatch import Stopwatch
from laconic.strategy import Strategy

_MEASURED_EVERY = 20
"""Rounds between two that are measured: norms of every bucket cost time, and what they tell changes slowly."""


Phase = Literal["module buffers", "backward pass", "round"]
"""Something ranks do together in every step, or in some."""


class Attendance(NamedTuple):
    """Who takes part in what ranks do together."""

    divisor: int
    """The number of ranks that a mean is taken over."""
    source: int
    """The rank whose module buffers count."""


class Joining(Protocol):
    """What a session knows while its ranks are inside session.join()."""

    def announce(self, phase: Phase) -> Attendance:
        """Tell ranks that have run out of data what comes, so that they take part."""
        ...


@dataclass
class Job:
    """What is trained, how it communicates, and how far it has come."""

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    """Trainable parameters by name, each once, in the order of registration."""
    optimizers: tuple[Optimizer, ...]
    strategy: Strategy
    transport: Transport
    engine: Engine
    clock: Clock
    events: EventSink
    stopwatch: Stopwatch
    find_unused_parameters: bool | None
    """None: parameters may be unused. True: so they may, and buckets are those of DDP with that setting. False: all get
    a gradient in every pass, or it raises."""
    loss_scale: LossScale
    step: int = 0
    accumulating: bool = False
    servers: Servers | None = None
    replan_servers: Callable[[Sequence[Bucket]], None] | None = None
    """Tells servers about other buckets, where there are servers that form sums."""
    updates_in_parts: bool = True
    """Whether the optimizers' steps may be made for some parameters at a time, for schedules that want that."""
    staleness: int = 0
    """The most gradients of others that were applied between two visits of this worker to a server."""
    lead: int = 0
    """The most steps this worker was ahead of the slowest when it was let go on."""
    join: Joining | None = None
    """Set while ranks are inside session.join()."""

    def announce(self, phase: Phase) -> Attendance:
        """Say what this rank is about to do together with all others; outside session.join() all are there."""
        if self.join is None:
            return Attendance(self.transport.world_size, 0)
        return self.join.announce(phase)

    @property
    def optimizer(self) -> Optimizer:
        """The only optimizer, for strategies that take one."""
        (optimizer,) = self.optimizers
        return optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def moment(self, step: int | None = None) -> Moment:
        """The step that is being made, or another, as this rank sees it."""
        step = self.step if step is None else step
        round = self.strategy.synchronization.round_number(step)
        steers = self.strategy.synchronization.quantity == "momentum"
        momentum = float(self.param_groups[0]["betas"][0]) if steers else 0.0
        return Moment(step, self.transport.rank, self.transport.world_size, round, momentum)

    @property
    def values(self) -> Pieces:
        """The parameters, or of each the piece that lives here: what is exchanged and written."""
        return Pieces(self.parameters)

    def specs(self) -> dict[str, TensorSpec]:
        """What is known about `values`."""
        return specs_of(self.model, self.parameters)

    def fixed_plans(self) -> list[Plan]:
        """One plan for each part of the model, made before any gradient has been seen."""
        # Backwards, as gradients usually become ready.
        return self.strategy.plans([*reversed(self.specs().values())], self.transport.world_size)

    def bucket_task(
        self, buckets: Buckets, index: int, *, last: bool, first_bucket: int = 0, step: int | None = None
    ) -> Task:
        """The exchange of one bucket, ready to be submitted.

        first_bucket: buckets of other plans that come before these, so that every bucket has a number of its own.
        step: whose exchange it is, if not that of the step that is being made.
        """
        plan, bucket = buckets.plan, buckets.plan.buckets[index]
        number = first_bucket + index
        what = f"bucket {number} ({bucket.tensors[0].name} ...)" if len(bucket.tensors) > 1 else bucket.tensors[0].name
        strategy = self.strategy
        moment, state = self.moment(step), buckets.states[index]
        measure = moment.round % _MEASURED_EVERY == 0 and not isinstance(self.events, DiscardEvents)

        def start() -> Exchange:
            wire = Wire(self.transport, f"{what} in step {moment.step}", number, self.servers, plan.halves)
            state.moment, state.measure = moment, measure
            state.metrics.clear()

            def average(flat: torch.Tensor, own: torch.Tensor | None) -> Exchange:
                return strategy.architecture.exchange(flat, state, strategy.codec, wire, own)

            return strategy.synchronization.around(buckets.flats[index], state, average)

        return Task(
            what,
            start,
            None if plan.halves else strategy.architecture.num_waits(bucket, strategy.codec, moment),
            last=last,
            step=self.step,
            device=bucket.device,
            nbytes=bucket.nbytes,
            credit_bytes=plan.credit_bytes,
            in_halves=plan.halves,
            bucket=number,
            metrics=state.metrics,
        )
