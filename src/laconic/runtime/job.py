"""The state that session and hooks share: the model, its strategy and its progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.core.clock import Clock
from laconic.core.event import DiscardEvents, EventSink
from laconic.core.exchange import Exchange, PartialMeans, Servers, Wire, one_round
from laconic.core.moment import Moment
from laconic.core.plan import Bucket, Plan
from laconic.core.stateful import CARRIED, BucketState
from laconic.core.tensor import TensorSpec
from laconic.core.transport import Transport
from laconic.runtime.averaging import Averaging
from laconic.runtime.buckets import Buckets
from laconic.runtime.engine import Engine, Task
from laconic.runtime.loss_scale import LossScale
from laconic.runtime.reported_losses import ReportedLosses
from laconic.runtime.shards import Pieces, specs_of
from laconic.runtime.stopwatch import Stopwatch
from laconic.strategy import Strategy

_T = TypeVar("_T")
_MEASURED_EVERY = 20
"""Rounds between two measured ones: norms of every bucket cost time, and change slowly."""


Phase = Literal["module buffers", "backward pass", "round"]
"""An operation that all ranks make together, in every step or in some."""


class Attendance(NamedTuple):
    """The ranks that take part in a joint operation."""

    divisor: int
    """The number of ranks that a mean is taken over."""
    source: int
    """The rank whose module buffers all ranks take over."""


class Joining(Protocol):
    """The state of a session while its ranks are inside session.join()."""

    def announce(self, phase: Phase) -> Attendance:
        """Announce the next operation to ranks that have run out of data, so that they take part."""
        ...


class Recovery(Protocol):
    """Continues a session when ranks die, join or leave; runtime/elastic has the only implementation."""

    def guard(self, task: Task, again: Callable[[], Task], flat: torch.Tensor, state: BucketState) -> None:
        """Make the exchange of a bucket repeatable: undo it, and create it anew with `again`."""
        ...

    @property
    def raised(self) -> Sequence[bool]:
        """For each flag of the last joint operation, whether any rank has raised it."""
        ...

    def together(self, what: str, attempt: Callable[[], _T], tasks: Sequence[Task], flags: Sequence[bool] = ()) -> _T:
        """Repeat a joint operation of all ranks until it succeeds; `tasks` are those it waits for.

        flags: one for each parameter; `raised` then says which of them any rank has raised.
        """
        ...

    def weigh(self, count: int, what: str) -> None:
        """Weight this rank by a count in the next mean; all ranks exchange their counts."""
        ...

    def step_made(self) -> None:
        """All optimizers have made their step."""
        ...


@dataclass
class Job:
    """The model, its optimizers, its strategy and transport, and the number of steps made."""

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
    """None: parameters may be unused. True: the same, with DDP's buckets for that setting. False: every parameter gets
    a gradient in every pass, or the pass raises."""
    loss_scale: LossScale
    step: int = 0
    passes: int = 0
    """The number of backward passes that have exchanged gradients."""
    compared: int = 0
    """The number of passes up to which steps have been compared with other ranks."""
    accumulating: bool = False
    servers: Servers | None = None
    replan_servers: Callable[[Sequence[Bucket]], None] | None = None
    """Tells servers about other buckets, where there are servers that form sums."""
    partial_means: PartialMeans | None = None
    """Set where means are formed only of the contributions that arrive in time."""
    updates_in_parts: bool = True
    """Whether the optimizers are separable, for schedules that defer updates."""
    staleness: int = 0
    """The most gradients of others that were applied between two visits of this worker to a server."""
    lead: int = 0
    """The largest number of steps by which this worker was ahead of the slowest when it got its answer."""
    dropped: int = 0
    """The number of this worker's gradients that a server has dropped because they arrived too late."""
    losses: ReportedLosses = field(default_factory=ReportedLosses)
    """The losses that the training loop has reported, for strategies that decide by them."""
    join: Joining | None = None
    """Set while ranks are inside session.join()."""
    recovery: Recovery | None = None
    """Handles changes of the set of ranks; None: the set is fixed."""
    after_backward: bool = False
    """Whether gradients are exchanged only after the backward pass, whatever the schedule says; the same on all ranks,
    and never changed during a pass."""
    chosen_by: str = ""
    """The chooser of the strategy during training, as text; empty: the user's strategy is fixed."""
    after_step: list[Callable[[Job], None]] = field(default_factory=list)
    """Called after each step, in this order."""

    def share(self, phase: Phase) -> float:
        """The factor on this rank's contribution before it is exchanged; 1 where `recovery` scales it."""
        if self.recovery is not None:
            return 1.0
        return self.strategy.architecture.share(self.announce(phase).divisor)

    def share_by_count(self, count: int, what: str) -> float:
        """Like `share`, but for a mean weighted by a count of each rank; all ranks exchange their counts."""
        transport = self.transport
        if self.recovery is not None:
            self.recovery.weigh(count, what)
            return 1.0
        counts = [count] if transport.world_size == 1 else self.gather_counts(count, what)
        equal = self.strategy.architecture.share(transport.world_size)
        # Where all have the same, so that nothing is rounded.
        return equal if set(counts) == {count} else equal * transport.world_size * count / sum(counts)

    def gather_counts(self, count: int, what: str) -> list[int]:
        """The count of each rank, by rank; every rank calls it."""
        transport = self.transport
        mine = torch.tensor([count], dtype=torch.int64, device=transport.control_device)
        rows = torch.empty((transport.world_size, 1), dtype=torch.int64, device=transport.control_device)
        self.engine.call(
            what,
            lambda: one_round(transport.all_gather(rows, mine, purpose="control", what=what)),
            step=self.step,
            device=mine.device,
        )
        return [row[0] for row in rows.tolist()]

    def together(self, what: str, attempt: Callable[[], _T], tasks: Sequence[Task], flags: Sequence[bool] = ()) -> _T:
        """Return the result of the joint operation `attempt`; `tasks` and `flags` as in Recovery."""
        return attempt() if self.recovery is None else self.recovery.together(what, attempt, tasks, flags)

    def announce(self, phase: Phase) -> Attendance:
        """Announce a joint operation and return who takes part: outside session.join() all ranks do."""
        if self.join is None:
            return Attendance(self.transport.world_size, 0)
        return self.join.announce(phase)

    def compare_steps(self, *, last: bool = False) -> None:
        """Find out whether all ranks have made this step, where they exchange gradients in every one."""
        if (last or self.passes > self.compared) and self.passes and self.strategy.exchanges_gradients():
            self.compared = self.passes
            self.transport.compare_steps(self.passes, self.step, last=last)

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
        """The moment of this rank in the current step, or in another."""
        step = self.step if step is None else step
        round = self.strategy.synchronization.round_number(step)
        steers = self.strategy.synchronization.quantity == "momentum"
        momentum = float(self.param_groups[0]["betas"][0]) if steers else 0.0
        return Moment(step, self.transport.rank, self.transport.world_size, round, momentum)

    @property
    def values(self) -> Pieces:
        """The parameters, or this rank's pieces of them: the tensors that are exchanged and written."""
        return Pieces(self.parameters)

    def specs(self) -> dict[str, TensorSpec]:
        """The specs of `values`."""
        return specs_of(self.model, self.parameters)

    def fixed_plans(self) -> list[Plan]:
        """One plan for each fragment of the model, made before the first gradient."""
        # Backwards, as gradients usually become ready.
        return self.strategy.plans([*reversed(self.specs().values())], self.transport.world_size)

    def _num_waits(self, bucket: Bucket, moment: Moment) -> int | None:
        strategy = self.strategy
        if strategy.synchronization.lazy:
            return None  # that depends on what the others say
        if strategy.exchanges_gradients() and not strategy.synchronization.due(moment.step + 1):
            return 0
        return strategy.architecture.num_waits(bucket, strategy.codec, moment)

    def bucket_task(
        self, buckets: Buckets, index: int, *, last: bool, first_bucket: int = 0, step: int | None = None
    ) -> Task:
        """The exchange of one bucket, ready to be submitted.

        first_bucket: the number of buckets in earlier plans, so that every bucket has a number of its own.
        step: the step that the exchange belongs to, if not the current one.
        """
        task = self._bucket_task(buckets, index, last, first_bucket, step)
        if self.recovery is not None:
            again = lambda: self._bucket_task(buckets, index, last, first_bucket, step)  # noqa: E731
            self.recovery.guard(task, again, buckets.flats[index], buckets.states[index])
        return task

    def _bucket_task(self, buckets: Buckets, index: int, last: bool, first_bucket: int, step: int | None) -> Task:
        plan, bucket = buckets.plan, buckets.plan.buckets[index]
        number = first_bucket + index
        what = f"bucket {number} ({bucket.tensors[0].name} ...)" if len(bucket.tensors) > 1 else bucket.tensors[0].name
        strategy = self.strategy
        moment, state = self.moment(step), buckets.states[index]
        measure = moment.round % _MEASURED_EVERY == 0 and not isinstance(self.events, DiscardEvents)

        def start() -> Exchange:
            where = f"{what} in step {moment.step}"
            wire = Wire(self.transport, where, number, self.servers, plan.decoupled, self.partial_means)
            state.moment, state.measure = moment, measure
            state.metrics.clear()
            if (carried := state.flat.pop(CARRIED, None)) is not None:
                buckets.flats[index].add_(carried)
            return strategy.synchronization.around(buckets.flats[index], state, Averaging(strategy, state, wire))

        return Task(
            what,
            start,
            None if plan.decoupled else self._num_waits(bucket, moment),
            last=last,
            step=self.step,
            device=bucket.device,
            nbytes=bucket.nbytes,
            credit_bytes=plan.credit_bytes,
            decoupled=plan.decoupled,
            over_group=strategy.architecture.servers is None and strategy.architecture.loss_bound is None,
            bucket=number,
            metrics=state.metrics,
        )
