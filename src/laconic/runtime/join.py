"""Ranks with different numbers of batches: a rank that has run out contributes zeros to the others' exchanges.

    with session.join():
        for batch in data:
            ...

torch's Join does the same for DDP. Before each joint operation, every rank that still trains announces the operation
and its step. A rank that has run out waits for the announcement, takes part with zeros, and leaves when no rank trains
any more. Then all continue from the model of the rank that trained last: parameters, buffers and, unlike DDP, the
optimizer's state, without which replicas would diverge in the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import torch

from laconic.core.exchange import one_round
from laconic.errors import CommunicationError
from laconic.runtime.agreement import agree, broadcast_all
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.hooks.module_buffers import ModuleBuffers
from laconic.runtime.job import Attendance, Job, Phase
from laconic.runtime.optimizer_state import broadcast_optimizer_state
from laconic.runtime.shards import is_sharded

_PHASES: tuple[Phase, ...] = get_args(Phase)
_WHAT = "which ranks still have data"


@contextmanager
def join(
    job: Job, hooks: TrainingHooks | None, buffers: ModuleBuffers | None, *, divide_by_initial_world_size: bool
) -> Iterator[None]:
    """Train until all ranks have run out of data; a rank without data takes part in the exchanges of the others."""
    if job.recovery is not None:
        raise CommunicationError(
            "session.join() does not work with elastic. Use session.batches(), under which all ranks have equally many "
            "batches."
        )
    if hooks is None or job.transport.world_size == 1:
        yield
        return
    _refuse(job, hooks)
    # Ranks exchange one number per parameter group, so the number of groups is compared as well.
    groups = len(job.param_groups)
    agree(job, f"join() of {groups} parameter groups, dividing by {divide_by_initial_world_size}")
    joining = _Joining(job, divide_by_initial_world_size)
    job.join = joining
    try:
        yield  # an error ends the block at once; the session announces it to other ranks
        joining.follow(hooks, buffers)
    finally:
        job.join = None
    joining.end(hooks, buffers)


def _refuse(job: Job, hooks: TrainingHooks) -> None:
    """Raise where a rank without data cannot take part."""
    strategy = job.strategy
    if job.join is not None:
        raise CommunicationError("session.join() was called inside session.join(). One block is enough.")
    if any(map(is_sharded, job.parameters.values())):
        raise CommunicationError(
            "session.join() is not for sharded models: a rank without data could not take part in the collectives of "
            "FSDP or tensor parallelism, which run in every pass. Give all ranks the same number of batches."
        )
    if not hooks.can_join or strategy.architecture.has_servers:
        raise CommunicationError(
            f'session.join() does not work with "{strategy}": only bsp and local updates over all_reduce know what a '
            "rank without data has to do. Give every rank the same number of batches, e.g. with "
            "DistributedSampler(drop_last=True); for a model wrapped in DistributedDataParallel use torch's Join."
        )
    if strategy.synchronization.quantity == "momentum":
        raise CommunicationError(
            f"session.join() does not work with {strategy.synchronization.name}: a rank without data has no momentum "
            "of its own. Give every rank the same number of batches."
        )
    for layer in strategy.compression.layers():
        if not layer.own_traits.keeps_scale:
            raise CommunicationError(
                f"session.join() does not work with {layer.name}: a rank without data would vote too, because one bit "
                "cannot say zero. Give every rank the same number of batches."
            )


class _Joining:
    """One block of session.join() on one rank."""

    def __init__(self, job: Job, by_initial: bool) -> None:
        self._job = job
        self._by_initial = by_initial
        self._following: Attendance | None = None
        self._last: int | None = None
        self._all_trained = True

    def announce(self, phase: Phase) -> Attendance:
        if self._following is not None:
            return self._following
        _, attendance = self._gather(phase)
        assert attendance is not None
        return attendance

    def _gather(self, phase: Phase | None) -> tuple[Phase | None, Attendance | None]:
        """The next joint operation of the ranks with data, and these ranks; nothing if there are none."""
        job, transport = self._job, self._job.transport
        kind = 0 if phase is None else 1 + _PHASES.index(phase)
        rates = [float(group["lr"]) for group in job.param_groups]
        mine = torch.tensor([kind, job.step, *rates], dtype=torch.float64).to(transport.control_device)
        rows = torch.empty((transport.world_size, mine.numel()), dtype=torch.float64, device=mine.device)
        job.engine.call(
            _WHAT,
            lambda: one_round(transport.all_gather(rows, mine, purpose="control", what=_WHAT)),
            step=job.step,
            device=mine.device,
        )
        said = rows.tolist()
        active = [rank for rank, row in enumerate(said) if row[0]]
        if not active:
            job.step = int(max(row[1] for row in said))
            return None, None
        first, source = said[active[0]], active[-1]
        for rank in active:
            if said[rank][:2] != first[:2]:
                where = [f"{_PHASES[int(row[0]) - 1]} of step {int(row[1])}" for row in (first, said[rank])]
                raise CommunicationError(
                    f"inside session.join() rank {active[0]} is in the {where[0]}, rank {rank} in the {where[1]}. "
                    "Ranks may run out of data, but until then all must do the same in every step."
                )
        self._last = source
        self._all_trained = len(active) == transport.world_size
        if phase is None:
            job.step = int(first[1])
            # Rules that use the learning rate must use that of ranks whose scheduler still advances.
            for group, rate in zip(job.param_groups, said[source][2:], strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
        divisor = transport.world_size if self._by_initial else len(active)
        return _PHASES[int(first[0]) - 1], Attendance(divisor, source)

    def follow(self, hooks: TrainingHooks, buffers: ModuleBuffers | None) -> None:
        """Take part in the others' operations until none of them has data."""
        while True:
            phase, attendance = self._gather(None)
            if attendance is None:
                return
            self._following = attendance
            if phase == "module buffers":
                assert buffers is not None
                buffers.synchronize()
            else:
                hooks.take_part()
            self._following = None

    def end(self, hooks: TrainingHooks, buffers: ModuleBuffers | None) -> None:
        """Copy the state of the rank that trained last to all ranks."""
        job = self._job
        hooks.settle()
        if buffers is not None:
            buffers.restart()
        if self._last is None or not job.strategy.exchanges_gradients():
            return
        tensors = [*job.model.parameters(), *job.model.buffers()]
        source, device, transport = self._last, tensors[0].device, job.transport
        what = f"the model of rank {source}"
        with torch.no_grad():
            job.engine.call(
                what,
                lambda: broadcast_all(transport, tensors, purpose="control", what=what, source=source),
                step=job.step,
                device=device,
            )
            if not self._all_trained:
                job.engine.call(
                    f"the optimizer of rank {source}",
                    lambda: broadcast_optimizer_state(transport, job.optimizers, job.parameters, source=source),
                    step=job.step,
                    device=device,
                )
