"""Which plan the next backward passes follow, the same on all ranks.

pass 1          tensors in the order of registration
for good        with find_unused_parameters=True, for schedules that follow DDP in that case
then            in the order in which rank 0's gradients became ready
after pass 4    with times, for schedules that use them: when gradients were ready, and the cost of an exchange
every 100       with new times, if rank 0 sees that they have drifted
passes 2 - 25   one plan after another, for schedules that try candidates; the one with the shortest steps stays
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from laconic.core.exchange import one_round
from laconic.core.plan import Plan
from laconic.core.timing import Timing
from laconic.core.transport import Transport
from laconic.runtime.engine import Task
from laconic.runtime.job import Job

_WARM_PASSES = 1
_TIMED_PASSES = 3
_CHECKED_EVERY = 100
_DRIFT = 0.25
"""Relative drift of times beyond which a new plan is made."""
_TRIED_PASSES = 6
_SMALL_BYTES, _LARGEST_BYTES = 4096, 2**25
_LONG_ENOUGH_S = 0.05


@dataclass
class _Busy:
    """An interval during which some exchange was always in flight."""

    began_s: float
    ended_s: float
    nbytes: int = 0


class Planning:
    """Observes passes and makes plans."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._schedule = job.strategy.scheduling
        self._specs = job.specs()
        self._lasting: Plan | None = None
        if job.find_unused_parameters and not job.strategy.architecture.has_servers:
            self._lasting = job.strategy.lasting_plan(list(self._specs.values()), job.transport.world_size)
        if job.recovery is not None:
            self._lasting = job.fixed_plans()[0]  # a rank that joins has seen no gradients
        self.order: list[str] = []
        """Names in the order in which gradients become ready; empty while it is not known."""
        self._passes = 0
        self._began_s = 0.0
        self._seen: dict[str, float] = {}
        self._times: list[dict[str, float]] = []
        self._busy: list[_Busy] = []
        self._timing: Timing | None = None
        self._ended_s: float | None = None
        self._tried: list[list[float]] = []
        self._begin_trial()

    def first_plan(self) -> Plan:
        """The plan before the first gradient."""
        if self._lasting is not None:
            return self._lasting
        return self._job.strategy.plan(list(self._specs.values()), self._job.transport.world_size, observed=False)

    def follow(self, order: list[str]) -> Plan:
        """Continue with an order that was observed earlier."""
        if self._lasting is not None:
            return self._lasting
        self.order = list(order)
        self._passes = max(self._passes, _WARM_PASSES)
        if self._schedule.candidates > 1:
            self._begin_trial()
        return self._plan()

    def _plan(self, candidate: int = 0) -> Plan:
        return self._job.strategy.plan(
            [self._specs[name] for name in self.order],
            self._job.transport.world_size,
            timing=self._timing,
            candidate=candidate,
        )

    def ready(self, name: str) -> None:
        """A gradient is ready."""
        if not self._seen:
            self._began_s = self._job.clock.now()
        # The last time counts: a tensor used twice is complete then.
        self._seen.pop(name, None)
        self._seen[name] = self._job.clock.now() - self._began_s

    def start_over(self) -> None:
        """The observed pass was interrupted."""
        self._seen = {}

    def pass_ended(self) -> Plan | None:
        """A new plan, if the passes so far call for one; every rank calls it after every pass."""
        if self._lasting is not None:
            self._seen = {}
            return None
        self._passes += 1
        self._times = [*self._times[-_TIMED_PASSES + 1 :], self._seen]
        self._seen = {}
        if not self.order:
            self._agree_on_order()
            return self._plan()
        if self._schedule.needs_timing:
            if self._timing is None and self._passes == _WARM_PASSES + _TIMED_PASSES:
                return self._agree_on_times(self._measure_link())
            if self._timing is not None and self._passes % _CHECKED_EVERY == 0:
                return self._look_for_drift(self._timing)
        if self._schedule.candidates > 1:
            return self._try_next()
        return None

    def _broadcast(self, values: torch.Tensor, what: str) -> torch.Tensor:
        job = self._job
        values = values.to(job.transport.control_device)
        job.engine.call(
            what,
            lambda: one_round(job.transport.broadcast(values, source=0, purpose="control", what=what)),
            step=job.step,
            device=job.transport.control_device,
        )
        return values.cpu()

    def _agree_on_order(self) -> None:
        names = list(self._specs)
        seen = self._times[-1]
        positions = {name: index for index, name in enumerate(names)}
        order = [positions[name] for name in [*seen, *(name for name in reversed(names) if name not in seen)]]
        indices = self._broadcast(torch.tensor(order, dtype=torch.int32), "the order of gradients")
        self.order = [names[index] for index in indices.tolist()]
        self._times = []

    # -- times -------------------------------------------------------------------------------------------------

    def _ready_s(self) -> list[float]:
        """For each tensor the median over the observed passes; never decreasing."""
        found, latest = [], 0.0
        for name in self.order:
            times = [seen[name] for seen in self._times if name in seen]
            latest = max(latest, statistics.median(times) if times else latest)
            found.append(latest)
        return found

    def exchanged(self, tasks: Sequence[Task]) -> None:
        """All exchanges of a pass have ended; they were submitted in this order."""
        periods: list[_Busy] = []
        for task in tasks:
            if task.ended_s is None:  # on a GPU the host does not see the end
                return
            if not periods or task.submitted_s > periods[-1].ended_s:
                periods.append(_Busy(task.submitted_s, task.ended_s))
            periods[-1].ended_s = max(periods[-1].ended_s, task.ended_s)
            periods[-1].nbytes += task.nbytes
        longest = max(periods, key=lambda period: period.nbytes, default=None)
        if longest is not None and longest.nbytes:
            self._busy = [*self._busy[-_TIMED_PASSES + 1 :], longest]

    def _agree_on_times(self, link: tuple[float, float]) -> Plan:
        startup_s, byte_s = link
        if self._busy:
            # Back-to-back exchanges show the time per byte better than one large exchange; of the observed passes, the
            # fastest counts.
            byte_s = min(max(0.0, busy.ended_s - busy.began_s - startup_s) / busy.nbytes for busy in self._busy)
        known = torch.tensor([startup_s, byte_s, *self._ready_s()], dtype=torch.float64)
        startup_s, byte_s, *ready_s = self._broadcast(known, "times of gradients").tolist()
        self._timing = Timing(tuple(ready_s), startup_s, byte_s)
        return self._plan()

    def _look_for_drift(self, timing: Timing) -> Plan | None:
        now, then = self._ready_s()[-1:], timing.ready_s[-1:]
        drifted = bool(now) and abs(now[0] - then[0]) > _DRIFT * max(now[0], then[0])
        answer = self._broadcast(torch.tensor([float(drifted)], dtype=torch.float64), "whether times have drifted")
        if not answer.item():
            return None
        return self._agree_on_times(self._measure_link())

    def _measure_link(self) -> tuple[float, float]:
        """Fit a and b of t(M) = a + b M from all-reduces of a small and of a larger tensor, by bytes sent."""
        transport = self._job.transport
        small_s = statistics.median([self._timed(transport, _SMALL_BYTES) for _ in range(5)])
        nbytes = 16 * _SMALL_BYTES
        long_s = self._timed(transport, nbytes)
        while nbytes < _LARGEST_BYTES and self._longest(long_s) < _LONG_ENOUGH_S:
            nbytes *= 2
            long_s = self._timed(transport, nbytes)
        long_s = min(long_s, self._timed(transport, nbytes))
        byte_s = max(0.0, long_s - small_s) / (nbytes - _SMALL_BYTES)
        tensors = list(self._specs.values())
        return self._job.strategy.exchange_line(tensors, transport.world_size, small_s, byte_s)

    def _longest(self, seconds: float) -> float:
        """Rank 0's value, so that all ranks continue or stop together."""
        return self._broadcast(torch.tensor([seconds], dtype=torch.float64), "how long an exchange took").item()

    def _timed(self, transport: Transport, nbytes: int) -> float:
        job = self._job
        tensor = torch.zeros(nbytes // 4, device=next(iter(job.parameters.values())).device)
        what = "measuring the link"
        began_s = job.clock.now()
        job.engine.call(
            what,
            lambda: one_round(transport.all_reduce(tensor, purpose="control", what=what)),
            step=job.step,
            device=tensor.device,
        )
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        return job.clock.now() - began_s

    # -- trying ------------------------------------------------------------------------------------------------

    def _begin_trial(self) -> None:
        self._passes = min(self._passes, _WARM_PASSES)
        self._tried = [[] for _ in range(self._schedule.candidates)]
        self._ended_s = None

    def _try_next(self) -> Plan | None:
        """Note how long the step took; after a few steps, return the next candidate, and in the end the best one."""
        now_s = self._job.clock.now()
        took_s, self._ended_s = None if self._ended_s is None else now_s - self._ended_s, now_s
        turn, number = divmod(self._passes - _WARM_PASSES - 1, _TRIED_PASSES)
        if turn >= len(self._tried):
            return None
        if took_s is not None and number > 1:  # the first steps after a change also pay for it
            self._tried[turn].append(took_s)
        if number < _TRIED_PASSES - 1:
            return None
        if turn + 1 < len(self._tried):
            return self._plan(turn + 1)
        medians = [statistics.median(times) for times in self._tried]
        best = self._broadcast(torch.tensor([medians.index(min(medians))]), "the best plan of those tried")
        return self._plan(int(best.item()))
