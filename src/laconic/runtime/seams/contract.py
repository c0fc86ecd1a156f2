"""What a seam promises to the session, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from laconic.core.clock import Clock
from laconic.core.event import EventSink
from laconic.core.exchange import Exchange
from laconic.core.plan import Plan
from laconic.core.stateful import ParameterState
from laconic.core.transport import Transport
from laconic.runtime.buckets import Buckets
from laconic.runtime.engine import Engine, Task
from laconic.strategy import Strategy


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
    find_unused_parameters: bool
    step: int = 0
    accumulating: bool = False

    def bucket_task(self, buckets: Buckets, index: int, *, last: bool) -> Task:
        """The exchange of one bucket, ready to be submitted."""
        bucket = buckets.plan.buckets[index]
        what = f"bucket {index} ({bucket.tensors[0].name} ...)" if len(bucket.tensors) > 1 else bucket.tensors[0].name
        strategy = self.strategy

        def start() -> Exchange:
            group = strategy.architecture.group(self.transport, f"{what} in step {self.step}")
            return strategy.compression.exchange(buckets.flats[index], buckets.states[index], group)

        return Task(
            what,
            start,
            len(strategy.compression.rounds(bucket)),
            last=last,
            step=self.step,
            device=bucket.device,
            record={
                "bucket": index,
                "wire_bytes": strategy.bucket_bytes(buckets.plan, index, self.transport.world_size),
            },
        )


class Seam(Protocol):
    """One way to get at gradients."""

    def state(self) -> ParameterState:
        """Compressor state by parameter name."""
        ...

    def load_state(self, saved: ParameterState) -> None:
        """Replace the compressor state."""
        ...

    def plan(self) -> Plan:
        """The plan in force."""
        ...

    def check_complete(self) -> None:
        """Raise if gradients are in an unfinished state, e.g. because a backward pass was interrupted."""
        ...

    def detach(self) -> None:
        """Take every hook off and leave gradients as ordinary tensors."""
        ...
