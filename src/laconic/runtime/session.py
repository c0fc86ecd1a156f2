"""A strategy at work on one model: what attach() returns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any, Self

import torch

from laconic.core.plan import Plan
from laconic.core.stateful import Resize
from laconic.core.transport import DETACHING, Traffic, Transport
from laconic.errors import CheckpointError, PeerLost, one_line
from laconic.runtime.agreement import agree
from laconic.runtime.checkpoint import compare, pack, read
from laconic.runtime.consensus import average, consensus_distance
from laconic.runtime.digest import digests
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.hooks.module_buffers import ModuleBuffers
from laconic.runtime.hooks.rounds import PENDING
from laconic.runtime.job import Job
from laconic.runtime.join import join
from laconic.runtime.pairwise_messages import PER_EDGE
from laconic.runtime.reenterable import Reenterable
from laconic.runtime.servers.server_pool import ServerPool
from laconic.runtime.shards import as_attached, as_saved, check_other_shards, is_sharded, reshard
from laconic.strategy import Strategy


class Session:
    """A strategy attached to a model and an optimizer.

    Use it as a context manager, or call detach() yourself. Every rank attaches and detaches.
    """

    def __init__(
        self,
        job: Job,
        hooks: TrainingHooks | None,
        buffers: ModuleBuffers | None,
        pool: ServerPool | None,
        cleanup: ExitStack,
    ) -> None:
        self._job = job
        self._hooks = hooks
        self._buffers = buffers
        self._pool = pool
        self._cleanup = cleanup
        self._attached = True
        self._handled_before = sys.exception()

    @property
    def strategy(self) -> Strategy:
        """What is running."""
        return self._job.strategy

    @property
    def rank(self) -> int:
        """This rank."""
        return self._job.transport.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that train together."""
        return self._job.transport.world_size

    @property
    def step(self) -> int:
        """Optimizer steps completed, including those before a checkpoint that was loaded."""
        return self._job.step

    @property
    def traffic(self) -> Traffic:
        """Bytes this rank has sent, as counted by the transport."""
        return self._job.transport.traffic

    @property
    def plan(self) -> Plan:
        """Buckets and their order from the next backward pass on."""
        return self._hooks.plan() if self._hooks is not None else Plan(())

    def predicted_bytes_per_step(self) -> int:
        """Payload bytes this rank should send per step, from formulas alone."""
        return self.strategy.plan_bytes_per_step(self.plan, self._job.moment())

    def consensus_distance(self) -> float:
        """How far replicas are from their mean, relative to its norm; 0 where all are equal. Every rank calls it.

            sqrt(mean_i |x_i - m|^2) / |m|,   m = mean_i(x_i)

        Costs one all-reduce of all parameters, counted as control traffic. Of a sharded model, of this rank's pieces.
        """
        self._agree("consensus_distance()")
        return consensus_distance(self._job)

    def average(self) -> None:
        """Make all replicas their mean: the final model of local SGD, gossip and the like. Every rank calls it.

        What is on its way is applied first. Floating-point buffers are averaged too, others become rank 0's.
        """
        if self._hooks is not None:
            self._agree("average()")
            self._hooks.settle()
        reshard(self._job.model)  # what an evaluation has left whole would stay as it was
        average(self._job)
        if self._hooks is not None:
            self._hooks.adopt()

    def _agree(self, operation: str, about: Mapping[str, str] | None = None) -> list[dict[str, str]]:
        """Return when every rank has come to this operation; raise if one cannot."""
        self._job.engine.check()
        if self._hooks is not None:
            self._hooks.stop_holding_up()
        return agree(self._job, operation, about)

    def join(self, *, divide_by_initial_world_size: bool = True) -> AbstractContextManager[None]:
        """Ranks may run out of data inside: they take part in what the others do, with nothing, until all are done.

            with session.join():
                for batch in data:
                    ...

        What torch's Join does for DDP, for bsp and local updates over all_reduce. Every rank enters the block. When it
        ends, replicas that are kept equal are those of the rank that trained last, its optimizer included; those of
        local updates go on as they are, call average() for one model. A rank that has run out waits for the next
        exchange of the others no longer than timeout_s.

        divide_by_initial_world_size: means are over all ranks; False: over those that still have data.
        """
        return join(self._job, self._hooks, self._buffers, divide_by_initial_world_size=divide_by_initial_world_size)

    def wait(self) -> None:
        """Return when nothing of this rank's is on its way; what has arrived is applied when its time comes."""
        if self._hooks is not None:
            self._hooks.wait()

    @property
    def staleness(self) -> int:
        """The most updates by others that a gradient of this rank has met with on a server so far (ssp, asp)."""
        return self._job.staleness

    @property
    def lead(self) -> int:
        """The most steps this rank was ahead of the slowest one when it was let go on (ssp, asp)."""
        return self._job.lead

    def accumulate(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Backward passes inside add up gradients locally; the first one outside exchanges the sum:

            for index, batch in enumerate(batches):
                with session.accumulate(index + 1 < len(batches)):
                    loss(model(batch)).backward()
            optimizer.step()

        As in DDP, put the forward pass inside as well. What is returned may be entered any number of times.

        enabled: False exchanges as if there were no block.
        """
        return Reenterable(self._hooks.accumulating if self._hooks is not None and enabled else nullcontext)

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to continue, beside the model's and the optimizer's own state.

        Every rank calls it, and saves the model after this call: what is in flight may still change parameters, and
        where nobody waits for others (ssp, asp) they become what servers hold or neighbours see.
        """
        self._agree("state_dict()")
        with self._hooks.at_rest() if self._hooks is not None else nullcontext():
            state = self._hooks.state() if self._hooks is not None else {}
            if self._pool is not None:
                for name, fields in self._pool.state().items():
                    state.setdefault(name, {}).update(fields)
            copied = {name: self._copied(fields) for name, fields in state.items()}
            digest = self._digest()
        specs = self._job.specs()
        if not self.strategy.architecture.holds_shards:  # else what is remembered is of whole gradients, on each rank
            per_element = lambda name: {PENDING, *self.strategy.per_element(specs[name])}  # noqa: E731
            copied = as_saved(copied, self._job.parameters, per_element)
        order = self._hooks.order() if self._hooks is not None else []
        return pack(
            str(self.strategy),
            self.world_size,
            self.step,
            order,
            self._resize(),
            rank=self.rank,
            state=copied,
            digest={} if digest is None else {str(self.rank): digest},
            same_step=self.strategy.synchronization.barrier,
            loss_scaled=self._job.loss_scale.unit != 1.0,
        )

    def _copied(self, fields: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A copy of what is remembered of one parameter, in the unit of gradients without a GradScaler's scale."""
        unit, scaled = self._job.loss_scale.unit, self.strategy.scaled_fields()
        return {
            key: value / unit if unit != 1.0 and key.partition("|")[0] in scaled else value.clone()
            for key, value in fields.items()
        }

    def _resize(self) -> dict[str, Resize]:
        """What becomes of each field that may be saved when the number of workers changes."""
        resize: dict[str, Resize] = {**self.strategy.resize(), PENDING: "reset"}
        if self.strategy.architecture.compensates:
            for field in PER_EDGE:
                resize[field] = "reset"
        return resize

    def _digest(self) -> torch.Tensor | None:
        """One number for each parameter that stands for its values; none of a model that may be sharded otherwise."""
        if any(map(is_sharded, self._job.parameters.values())):
            return None
        return torch.tensor(digests(self._job.parameters.values()), dtype=torch.int64)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what state_dict() returned on this rank; load model and optimizer first.

        Every rank calls it. If one of them cannot load its state, all raise and nothing has changed.
        """
        self._job.engine.check()
        report = read(
            state_dict,
            lambda state: as_attached(state, self._job.parameters),
            str(self.strategy),
            list(self._job.parameters),
            world_size=self.world_size,
            rank=self.rank,
            expected=self._hooks.state() if self._hooks is not None else {},
            # What servers remember, they know.
            kinds=None if self._pool is not None else self._resize(),
            digest=self._digest(),
            replicas_differ=not self.strategy.exchanges_gradients(),
        )
        report.unfit = report.unfit or self._job.loss_scale.why_not_loaded(scaled=state_dict["loss_scaled"])
        said = self._agree("load_state_dict()", report.summary())
        limit_s = self._job.transport.timeout_s
        try:
            compare(said, report, rank=self.rank, same_step=self.strategy.synchronization.barrier)
        except CheckpointError:
            check_other_shards(self._job.parameters, report.step, can_load=False, timeout_s=limit_s)
            raise
        check_other_shards(self._job.parameters, report.step, can_load=True, timeout_s=limit_s)
        step, order, state = report.step, report.order, report.state
        self._job.loss_scale.loaded()
        if self._hooks is not None:
            self._hooks.load(state, order, step)
        if self._pool is not None:
            self._pool.load(state)
        self._job.step = step

    def settle(self) -> None:
        """Return when every optimizer.step() so far has been applied to all parameters.

        Schedules that defer updates to the next forward pass (priority, dear) leave some of them waiting. Call this
        before reading or writing parameters between step() and the next forward pass: clamping, weight averaging,
        copying the model. With other schedules it returns at once.
        """
        if self._hooks is not None:
            self._hooks.finish_updates()

    def call_on_detach(self, action: Callable[[], object]) -> None:
        """Call `action` when this session is detached, also after an error: to undo what was done because of it."""
        self._cleanup.callback(action)

    def detach(self) -> None:
        """Remove every hook; model, optimizer and their state are as if laconic had never been there.

        Where replicas are equal after every step, module buffers are made equal one last time. Elsewhere each rank
        keeps what it has; call average() before for one model. Detaching twice is fine.

        After an error that the training loop has seen, or while one is being handled, it waits for nothing and raises
        nothing: in `finally` it never hides the first error.
        """
        if not self._attached:
            return
        handled = sys.exception()
        # One that was being handled when the session began is not of this training; StopIteration ends a loop.
        if handled is not None and handled is not self._handled_before and not isinstance(handled, StopIteration):
            self._release_after(handled)
        elif self._job.engine.failure_was_raised:
            self._release()
        else:
            try:
                self._finish()
            except BaseException as error:
                self._release_after(error)
                raise
            self._release()

    def _finish(self) -> None:
        """What the last step leaves to be done, together with the other ranks."""
        self._job.transport.set_status(DETACHING)  # a rank that waits for this one elsewhere does so in vain
        if self._hooks is not None:
            self._hooks.finish_updates()
            self._hooks.wait()
        if self._buffers is not None:
            self._buffers.synchronize()
        self._job.stopwatch.flush()
        if self._hooks is not None:
            self._hooks.leave()
        if self._pool is not None:
            self._pool.leave()

    def _release(self) -> None:
        self._attached = False
        self._cleanup.close()

    def _release_after(self, error: BaseException) -> None:
        """Undo everything without waiting for anybody, and tell the others why this rank will not come."""
        self._attached = False
        if not self._job.engine.failed():
            announce(self._job.transport, error)
        close_after(error, self._cleanup)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.detach()
        elif self._attached:
            self._release_after(error)


def announce(transport: Transport, error: BaseException, *, while_doing: str = "") -> None:
    """Tell the other ranks why this one will not come: another one's fault, if the error says so."""
    said, lost = one_line(error), error.rank if isinstance(error, PeerLost) else None
    if lost is None or lost == transport.rank:
        why = f": {said}" if said else ""  # Ctrl-C says nothing
        transport.announce_failure(f"raised {type(error).__name__}{while_doing}{why}")
    else:
        transport.announce_failure(f"was lost, says rank {transport.rank}: {said}", rank=lost)


def close_after(error: BaseException, cleanup: ExitStack) -> None:
    """Undo everything; a problem with that is noted on the first error and never takes its place."""
    try:
        cleanup.close()
    except Exception as problem:  # noqa: BLE001 - the first error is the one to raise
        error.add_note(f"laconic: while detaching, {type(problem).__name__}: {one_line(problem)}")
