"""Hooks for a module wrapped in DistributedDataParallel, whose communication hook passes on every bucket.

DDP keeps deciding buckets, order, unused parameters and buffers; the strategy decides what is sent and with whom. A
communication hook cannot be removed, so ours stays and, while no session is attached, averages as DDP does.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from laconic.core.plan import Bucket, Plan
from laconic.core.stateful import ParameterState
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError
from laconic.runtime.buckets import Buckets
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.job import Job
from laconic.scheduling import Fusion, Schedule


class DdpHookState:
    """The state of our communication hook, kept by DDP: the attached hooks, if any."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.hooks: DdpHooks | None = None


def _communicate(state, bucket):
    """Forward a bucket to the attached hooks, or average it as DDP would."""
    if state.hooks is not None:
        return state.hooks.exchange(bucket)
    # Multiplied, not divided: the same operation as DDP without a hook, bit for bit.
    flat = bucket.buffer().mul_(1.0 / state.group.size())
    work = dist.all_reduce(flat, group=state.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class DdpHooks(TrainingHooks):
    """Exchanges the buckets of one DDP module."""

    def __init__(self, job: Job, model: DistributedDataParallel) -> None:
        super().__init__(job)
        self._model = model
        self._scale = job.strategy.architecture.share(job.transport.world_size)
        self._names = {id(parameter): name for name, parameter in job.parameters.items()}
        # DDP shows its buckets only during a backward pass; until then state is kept parameter by parameter.
        self._saved: ParameterState = {}
        for name, parameter in job.parameters.items():
            alone = Bucket((TensorSpec.of(name, parameter),))
            self._saved |= job.strategy.init(alone).by_parameter()
        self._buckets: dict[tuple[str, ...], Buckets] = {}
        self._lock = threading.Lock()
        self._hook = _hook_of(model)
        if self._hook.hooks is not None:
            raise AttachError("this model is already attached; call session.detach() first.")
        self._hook.hooks = self

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of one of DDP's buckets."""
        job = self._job
        flat = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[flat.device] if flat.is_cuda else None
        )
        if job.engine.failed():
            # DDP cannot carry our error through its future; the optimizer's hook raises it.
            future.set_result(flat)
            return future
        buckets = self._for(bucket)
        flat.mul_(self._scale)
        buckets.flats[0] = flat
        task = job.bucket_task(buckets, 0, last=bucket.is_last())
        task.what = f"DDP bucket {bucket.index()}"
        task.on_done = lambda: future.set_result(flat)
        job.engine.submit(task)
        return future

    def _for(self, bucket: dist.GradBucket) -> Buckets:
        names = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        with self._lock:
            if names not in self._buckets:
                # DDP regroups parameters after the first step: carry the state over to the new buckets.
                self._saved = self.state()
                self._buckets = {known: old for known, old in self._buckets.items() if not set(known) & set(names)}
                spec = Bucket(tuple(TensorSpec.of(name, self._job.parameters[name]) for name in names))
                self._buckets[names] = Buckets(
                    Plan((spec,)), self._job.strategy, self._job.parameters, self._saved, [bucket.buffer()]
                )
            return self._buckets[names]

    def state(self) -> ParameterState:
        merged = dict(self._saved)
        for buckets in self._buckets.values():
            merged |= buckets.state_by_parameter()
        return merged

    def load(self, saved: ParameterState, order: list[str], step: int) -> None:
        self._saved = saved
        self._buckets.clear()

    def plan(self) -> Plan:
        """DDP's buckets; before DDP has shown them, those that its rules give."""
        if self._buckets:
            return Plan(tuple(buckets.plan.buckets[0] for buckets in self._buckets.values()))
        specs = [TensorSpec.of(name, parameter) for name, parameter in self._job.parameters.items()]
        return self._job.strategy.plan(specs, self._job.transport.world_size, observed=False)

    def accumulating(self) -> AbstractContextManager[object]:
        return self._model.no_sync()

    def detach(self) -> None:
        self._hook.hooks = None


def check_schedule(model: DistributedDataParallel, schedule: Schedule) -> None:
    """Raise unless the strategy's schedule is the one that DDP follows anyway, so that no setting is ignored."""
    limit: int = model.bucket_bytes_cap
    first: int = min(dist._DEFAULT_FIRST_BUCKET_BYTES, limit) if model.bucket_bytes_cap_default else limit
    if schedule.bucket_limits != (first, limit):
        raise AttachError(
            f"the model is wrapped in DistributedDataParallel, which schedules buckets itself as "
            f'"{Fusion.with_limits(first, limit)}"; the strategy asks for "{schedule}". '
            "Use that schedule, or attach to the plain module (ddp.module) before wrapping it."
        )


def _hook_of(model: DistributedDataParallel) -> DdpHookState:
    """Our hook on this model, installed if it is not there yet."""
    for _, state in model._comm_hooks:
        if isinstance(state, DdpHookState):
            return state
    if model._comm_hooks:
        raise AttachError(
            "this DistributedDataParallel model already has a communication hook, which cannot be replaced. "
            "Attach before registering one, or attach to the plain module."
        )
    assert model.process_group is not None
    hook = DdpHookState(model.process_group)
    model.register_comm_hook(state=hook, hook=_communicate)
    return hook
