"""What is trained, how it communicates, and how far it has come: what session and seams share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from laconic.core.clock import Clock
from laconic.core.event import DiscardEvents, EventSink
from laconic.core.exchange import Exchange
from laconic.core.moment import Moment
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
    strategy: Strategy
    transport: Transport
    engine: Engine
    clock: Clock
    events: EventSink
    stopwatch: Stopwatch
    find_unused_parameters: bool
    step: int = 0
    accumulating: bool = False

    def moment(self) -> Moment:
        """The step that is being made, as this rank sees it."""
        return Moment(self.step, self.transport.rank, self.transport.world_size)

    def bucket_task(self, buckets: Buckets, index: int, *, last: bool) -> Task:
        """The exchange of one bucket, ready to be submitted."""
        bucket = buckets.plan.buckets[index]
        what = f"bucket {index} ({bucket.tensors[0].name} ...)" if len(bucket.tensors) > 1 else bucket.tensors[0].name
        strategy = self.strategy
        moment, state = self.moment(), buckets.states[index]
        measure = moment.step % _MEASURED_EVERY == 0 and not isinstance(self.events, DiscardEvents)

        def start() -> Exchange:
            group = strategy.architecture.group(self.transport, f"{what} in step {self.step}")
            state.moment, state.measure = moment, measure
            state.metrics.clear()
            return strategy.compression.exchange(buckets.flats[index], state, group)

        return Task(
            what,
            start,
            strategy.compression.num_waits(bucket, moment),
            last=last,
            step=self.step,
            device=bucket.device,
            bucket=index,
            metrics=state.metrics,
        )
