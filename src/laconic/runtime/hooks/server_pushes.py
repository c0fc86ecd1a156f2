"""Pushes to servers that hold the parameters: every bucket is sent, and answered with parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from laconic.core.exchange import Exchange
from laconic.core.payload import Payload
from laconic.core.plan import Plan
from laconic.core.stateful import ParameterState
from laconic.runtime.agreement import meet
from laconic.runtime.buckets import Buckets
from laconic.runtime.engine import Task
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.job import Job
from laconic.runtime.servers.protocol import GroupSettings
from laconic.runtime.servers.server_pool import ServerPool

_UNLIMITED_BYTES = 2**62
"""Where a server answers when it has all buckets of a gradient, no bucket may wait for the answer to another."""


class ServerPushes:
    """The buckets that a worker sends, and in which it gets the answers."""

    def __init__(self, job: Job, pool: ServerPool) -> None:
        self._job = job
        self._pool = pool
        self.buckets = Buckets(job.fixed_plans()[0], job.strategy, job.parameters, {})
        self.views = self.views_of(self.buckets.flats)
        """For each parameter the values to send and, after the exchange, the values that came back."""
        back = job.strategy.compression.back().forgetful()
        # A compressor that sends only a direction cannot update parameters: those then come uncompressed.
        self._back = None if back.traits.lossless or not back.traits.keeps_scale else back

    @property
    def brings_differences(self) -> bool:
        """Whether an answer is the difference from the parameters that this worker has; else it is the parameters."""
        return self._back is not None

    def views_of(self, flats: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """A view of each parameter in flat tensors of the buckets' sizes."""
        # In the order of indices, as servers hold them, whatever a parameter's strides are here.
        return {
            tensor.name: flat[place].view(tensor.shape)
            for bucket, flat in zip(self.buckets.plan.buckets, flats, strict=True)
            for tensor, place in bucket.segments()
        }

    def exchange(self, groups: list[GroupSettings], is_unused: Callable[[str], bool]) -> None:
        """Send all views and wait for the answers.

        groups: settings for an optimizer on the servers. is_unused: whether a parameter, by name, got no gradient.
        """
        job, count = self._job, len(self.buckets.flats)
        tasks = [job.engine.submit(self._task(number, groups, is_unused, count)) for number in range(count)]
        device = self.buckets.flats[0].device
        began = job.stopwatch.mark(device)
        for task in tasks:
            job.engine.wait(task)
        job.stopwatch.note("wait", job.step, began, job.stopwatch.mark(device))

    def _task(self, number: int, groups: list[GroupSettings], is_unused: Callable[[str], bool], count: int) -> Task:
        bucket = self.buckets.plan.buckets[number]
        what = f"bucket {number} ({bucket.tensors[0].name} ...)"
        return Task(
            what,
            partial(self._exchange, number, groups, is_unused, f"{what} in step {self._job.step}"),
            num_waits=1,
            last=number == count - 1,
            step=self._job.step,
            device=bucket.device,
            bucket=number,
            metrics=self.buckets.states[number].metrics,
            credit_bytes=_UNLIMITED_BYTES if self._job.strategy.synchronization.takes_first else 0,
        )

    def _exchange(
        self, number: int, groups: list[GroupSettings], is_unused: Callable[[str], bool], what: str
    ) -> Exchange:
        job, state, flat = self._job, self.buckets.states[number], self.buckets.flats[number]
        bucket = self.buckets.plan.buckets[number]
        state.moment = job.moment()
        state.metrics.clear()
        payload = job.strategy.compression.encode(flat, state)
        unused = [index for index, tensor in enumerate(bucket.tensors) if is_unused(tensor.name)]
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


class PushingHooks(TrainingHooks):
    """The common part of all workers whose servers hold parameters; a subclass decides when to push, and what."""

    def __init__(self, job: Job, pool: ServerPool) -> None:
        super().__init__(job)
        self._pool = pool
        self._pushes = ServerPushes(job, pool)

    def plan(self) -> Plan:
        return self._pushes.buckets.plan

    def state(self) -> ParameterState:
        return self._pushes.buckets.state_by_parameter()

    def load(self, saved: ParameterState, order: list[str], step: int) -> None:
        for state in self._pushes.buckets.states:
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
