"""What is trained, how it communicates, and how far it has come: what session and seams share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.core.clock import Clock
from laconic.core.event import DiscardEvents, EventSink
from laconic.core.exchange import Exchange, Servers, Wire
from laconic.core.moment import Moment
from laconic.core.plan import Plan
from laconic.core.tensor import TensorSpec
from laconic.core.transport import Transport
from laconic.runtime.buckets import Buckets
from laconic.runtime.engine import Engine, Task
from laconic.runtime.stopwatch import Stopwatch
from laconic.strategy import Strategy

_MEASURED_EVERY = 20
"""Steps between two that are measured: norms of every bucket cost time, and what they tell changes slowly."""


@dataclass
class Job:
    """What is trained, how it communicates, and how far it has come."""

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    """Trainable parameters by name, each once, in the order of registration."""
    optimizer: Optimizer
    strategy: Strategy
    transport: Transport
    engine: Engine
    clock: Clock
    events: EventSink
    stopwatch: Stopwatch
    find_unused_parameters: bool
    step: int = 0
    accumulating: bool = False
    servers: Servers | None = None
    staleness: int = 0
    """The most gradients of others that were applied between two visits of this worker to a server."""
    lead: int = 0
    """The most steps this worker was ahead of the slowest when it was let go on."""

    def moment(self) -> Moment:
        """The step that is being made, as this rank sees it."""
        round = self.strategy.synchronization.round_number(self.step)
        return Moment(self.step, self.transport.rank, self.transport.world_size, round)

    def fixed_plans(self) -> list[Plan]:
        """One plan for each part of the model, made before any gradient has been seen."""
        # Backwards, as gradients usually become ready.
        specs = [TensorSpec.of(name, parameter) for name, parameter in reversed([*self.parameters.items()])]
        return self.strategy.plans(specs, self.transport.world_size)

    def bucket_task(self, buckets: Buckets, index: int, *, last: bool, first_bucket: int = 0) -> Task:
        """The exchange of one bucket, ready to be submitted.

        first_bucket: buckets of other plans that come before these, so that every bucket has a number of its own.
        """
        bucket = buckets.plan.buckets[index]
        number = first_bucket + index
        what = f"bucket {number} ({bucket.tensors[0].name} ...)" if len(bucket.tensors) > 1 else bucket.tensors[0].name
        strategy = self.strategy
        moment, state = self.moment(), buckets.states[index]
        measure = moment.step % _MEASURED_EVERY == 0 and not isinstance(self.events, DiscardEvents)

        def start() -> Exchange:
            wire = Wire(self.transport, f"{what} in step {moment.step}", number, self.servers)
            state.moment, state.measure = moment, measure
            state.metrics.clear()

            def average(flat: torch.Tensor, own: torch.Tensor | None) -> Exchange:
                return strategy.architecture.exchange(flat, state, strategy.compression, wire, own)

            return strategy.synchronization.around(buckets.flats[index], state, average)

        return Task(
            what,
            start,
            strategy.architecture.num_waits(bucket, strategy.compression, moment),
            last=last,
            step=self.step,
            device=bucket.device,
            bucket=number,
            metrics=state.metrics,
        )
