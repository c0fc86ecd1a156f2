"""Servers that hold the parameters: gradients are sent at the optimizer's step, and parameters come back.

The worker's optimizer finds no gradients and does nothing; the servers' optimizer has made the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from laconic.core.exchange import Exchange
from laconic.core.payload import Payload
from laconic.core.plan import Plan
from laconic.core.stateful import ParameterState
from laconic.errors import CommunicationError
from laconic.runtime.agreement import meet
from laconic.runtime.buckets import Buckets
from laconic.runtime.engine import Task
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.job import Job
from laconic.runtime.servers.protocol import group_settings
from laconic.runtime.servers.server_pool import ServerPool

_UNLIMITED_BYTES = 2**62
"""Where a server answers when it has all buckets of a gradient, no bucket may wait for the answer to another."""


class AsyncServerHooks(TrainingHooks):
    """Sends gradients and takes parameters, bucket by bucket."""

    def __init__(self, job: Job, pool: ServerPool) -> None:
        super().__init__(job)
        self._pool = pool
        self._buckets = Buckets(job.fixed_plans()[0], job.strategy, job.parameters, {})
        # In the order of indices, as servers hold them, whatever a parameter's strides are here.
        self._views = {
            tensor.name: flat[place].view(tensor.shape)
            for bucket, flat in zip(self._buckets.plan.buckets, self._buckets.flats, strict=True)
            for tensor, place in bucket.segments()
        }
        back = job.strategy.compression.back().forgetful()
        # A compressor that sends only a direction cannot update parameters: those then come uncompressed.
        self._back = None if back.traits.lossless or not back.traits.keeps_scale else back
        self._gradients: dict[str, torch.Tensor | None] = {}

    def before_step(self, *, closure: bool) -> None:
        """Push every gradient, overwrite the parameters with the answers, and hide the gradients."""
        job = self._job
        if closure:
            raise CommunicationError(
                f'with "{job.strategy.synchronization}" gradients are sent when optimizer.step() is called, so it '
                "takes no closure. Call backward() first."
            )
        scale, overflow = _amp_scaling(job.optimizer)
        self._gradients = {name: parameter.grad for name, parameter in job.parameters.items()}
        if overflow:
            return
        with torch.no_grad():
            for name, gradient in self._gradients.items():
                if gradient is None:
                    self._views[name].zero_()
                else:
                    self._views[name].copy_(gradient if scale == 1.0 else gradient / scale)
            groups = [group_settings(group) for group in job.optimizer.param_groups]
            count = len(self._buckets.flats)
            tasks = [job.engine.submit(self._task(number, groups, count)) for number in range(count)]
            device = self._buckets.flats[0].device
            began = job.stopwatch.mark(device)
            for task in tasks:
                job.engine.wait(task)
            job.stopwatch.note("wait", job.step, began, job.stopwatch.mark(device))
            for name, view in self._views.items():
                if self._back is None:
                    job.parameters[name].copy_(view)
                else:
                    job.parameters[name].add_(view)
                job.parameters[name].grad = None

    def _task(self, number: int, groups: list[dict[str, object]], count: int) -> Task:
        bucket = self._buckets.plan.buckets[number]
        what = f"bucket {number} ({bucket.tensors[0].name} ...)"
        return Task(
            what,
            partial(self._exchange, number, groups, f"{what} in step {self._job.step}"),
            num_waits=1,
            last=number == count - 1,
            step=self._job.step,
            device=bucket.device,
            bucket=number,
            metrics=self._buckets.states[number].metrics,
            credit_bytes=_UNLIMITED_BYTES if self._job.strategy.synchronization.takes_first else 0,
        )

    def _exchange(self, number: int, groups: list[dict[str, object]], what: str) -> Exchange:
        job, state, flat = self._job, self._buckets.states[number], self._buckets.flats[number]
        bucket = self._buckets.plan.buckets[number]
        state.moment = job.moment()
        state.metrics.clear()
        payload = job.strategy.compression.encode(flat, state)
        unused = [index for index, tensor in enumerate(bucket.tensors) if self._gradients[tensor.name] is None]
        assert self._pool.client is not None
        answer = self._pool.client.push(number, payload.tensors, step=job.step, groups=groups, unused=unused, what=what)
        yield answer
        if self._back is None:
            flat.copy_(answer.tensors[0])
        else:
            self._back.decode(Payload(answer.tensors), flat, state)
        facts = answer.note
        job.staleness, job.lead = max(job.staleness, facts["staleness"]), max(job.lead, facts["lead"])
        state.metrics["staleness"] = torch.tensor(facts["staleness"])
        if job.strategy.synchronization.takes_first:
            # The same for all buckets of a gradient.
            job.dropped += facts["dropped"] if number == 0 else 0
            state.metrics["dropped"] = torch.tensor(facts["dropped"])

    def after_step(self) -> None:
        """Restore the hidden gradients."""
        for name, gradient in self._gradients.items():
            self._job.parameters[name].grad = gradient
        self._gradients = {}

    def plan(self) -> Plan:
        return self._buckets.plan

    def state(self) -> ParameterState:
        return self._buckets.state_by_parameter()

    def load(self, saved: ParameterState, order: list[str], step: int) -> None:
        for state in self._buckets.states:
            state.restore(saved)

    def stop_holding_up(self) -> None:
        assert self._pool.client is not None
        self._pool.client.rest()

    def settle(self) -> None:
        """Take the servers' parameters."""
        self._pool.meet_and_pull()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        self._pool.meet_and_pull()
        yield
        meet(self._job.transport, "all states being saved")


def _amp_scaling(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """The GradScaler's factor on gradients that the optimizer has to unscale itself, and whether they overflow.

    Optimizers made with fused=True check both inside step(), which is too late for gradients that are sent before.
    """
    scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    return (1.0 if scale is None else float(scale)), overflow is not None and bool(overflow)
