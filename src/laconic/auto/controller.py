"""The steps of `auto`, the same on all ranks.

After every few steps all ranks meet: rank 0 says what to do next (decisions.py), the others follow.

    watch      time the layers until the next meeting
    unwatch    stop timing
    measure    stop timing; gather the compute times of all ranks, probe the links; rank 0 starts a search
    use        change to a strategy, with the reason

After the last step of training, if it is known, replicas that train alone become one model, as DDP would leave it.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from dataclasses import replace
from itertools import pairwise

import torch

from laconic.auto.decisions import FEWEST_STEPS, Lead, Order
from laconic.auto.layer_times import LayerTimes, Passes, workload_of
from laconic.auto.planning import Findings, Planner, device_name
from laconic.cluster import Cluster
from laconic.cluster.probe import cluster_of, probe
from laconic.core.event import Event
from laconic.core.exchange import one_round
from laconic.errors import UsageError, one_line
from laconic.runtime import Session
from laconic.runtime.agreement import gather_bytes
from laconic.runtime.job import Job
from laconic.strategy import Strategy
from laconic.workload.device_time import DeviceTime, Mark

PROBED_STEPS = 15
"""The links are probed for about the time of this many steps: 1.5% of 1,000 steps."""
_PROBE_S = 2.0
"""The links are probed for no longer than this."""
_LIKE = 0.05
"""Ranks whose compute times differ by less count as equal."""

_LOG = logging.getLogger("laconic")


class Controller:
    """Watches one session.

    total_steps: optimizer steps of the whole training, if that is known.
    """

    def __init__(self, session: Session, planner: Planner, total_steps: int | None = None) -> None:
        self._session = session
        self._total_steps = total_steps
        self._lead = Lead(planner)
        self._watch: LayerTimes | None = None
        self._time: DeviceTime | None = None
        self._ended: list[Mark] = []
        """Ends of the last meeting and of the steps since."""
        self._left = FEWEST_STEPS
        """Steps until the next meeting."""
        self._is_over = False
        """Whether the last of `total_steps` was made: nothing is decided any more."""

    def begin(self) -> None:
        """Begin with the next step."""
        self._session.call_after_step(self.step_made)
        self._session.call_on_detach(self._close)

    def step_made(self, job: Job) -> None:
        """A step has ended; every rank calls it."""
        if self._is_over:
            return
        if self._total_steps is not None and job.step >= self._total_steps:
            self._end(job)
            return
        if self._time is None:
            device = next(iter(job.parameters.values())).device
            self._time = DeviceTime(device, job.clock)
            self._lead.watches_freely = device.type != "cuda"
        self._ended.append(self._time.mark())
        if self._watch is not None:
            self._watch.step_made()
        self._left -= 1
        if not self._left:
            self._time.settle()
            self._meet(job, [self._time.between_s(begin, end) for begin, end in pairwise(self._ended)])
            # The time of a meeting does not count as a step.
            self._ended = [self._time.mark()]

    def _meet(self, job: Job, times_s: list[float]) -> None:
        order = Order()
        if job.transport.rank == 0:
            order = self._lead.next(times_s, self._session.strategy)
        order = _told(job, order)
        self._left = order.steps
        if order.do == "watch":
            self._unwatch()
            self._watch = LayerTimes(job)
        elif order.do == "unwatch":
            self._unwatch()
        elif order.do == "measure":
            self._measure(job, statistics.median(times_s))
        elif order.do == "use":
            self._use(job, order)

    def _measure(self, job: Job, step_s: float) -> None:
        """Measure compute times and links; all ranks take part, and rank 0 turns the results into a question."""
        assert self._watch is not None
        self._session.wait()  # a round in flight would share the links, and the order of operations, with the probe
        self._watch.detach()
        passes, self._watch = self._watch.passes(), None
        compute_s = gather_numbers(job, 0.0 if passes is None else passes.compute_s, "how fast ranks compute")
        step_s = gather_numbers(job, step_s, "how long steps take")[0]
        free_bytes = min(gather_numbers(job, _free_bytes(job), "how much memory is free"))
        if passes is None or min(compute_s) <= 0:
            self._lead.gave_up("its layers could not be timed: a step is more than one forward and backward pass")
            return
        try:
            cluster = _links(job, min(_PROBE_S, PROBED_STEPS * step_s), compute_s)
        except UsageError as error:
            self._lead.gave_up(one_line(error))
            return
        if job.transport.rank == 0:
            self._lead.search(self._findings(job, passes, cluster, free_bytes))

    def _findings(self, job: Job, passes: Passes, cluster: Cluster, free_bytes: float) -> Findings:
        return Findings(
            workload=workload_of(passes, job.parameters),
            cluster=cluster,
            device=device_name(next(iter(job.parameters.values())).device),
            seen=self._lead.seen,
            given_up=self._lead.given_up,
            steps_left=None if self._total_steps is None else self._total_steps - job.step,
            free_bytes=None if math.isinf(free_bytes) else int(free_bytes),
        )

    def _use(self, job: Job, order: Order) -> None:
        before = str(self._session.strategy)
        if order.strategy != before:
            refused = self._session.why_not_changed_to(order.strategy)
            if refused:
                self._lead.refused(order.strategy)
                order = Order(
                    "use", before, f'"{order.strategy}" is predicted to be faster, but cannot be used: {refused}'
                )
            else:
                self._session.change_strategy(order.strategy, reason=order.reason)
        self._tell(job, order, before)

    def _tell(self, job: Job, order: Order, before: str) -> None:
        """Say what is used and why: an event on every rank, a line of the log on rank 0."""
        data = {"strategy": order.strategy, "before": before, "reason": order.reason}
        job.events.write(Event("auto", job.clock.now(), job.transport.rank, job.step, 0.0, {**data}))
        if job.transport.rank == 0:
            _LOG.info('auto: step %d: "%s". %s', job.step, order.strategy, order.reason)

    def _end(self, job: Job) -> None:
        """The last of `total_steps` is made."""
        self._is_over = True
        self._close()
        if not self._session.strategy.exchanges_gradients():
            self._use(job, Order("use", str(Strategy()), "The last step was made: replicas become one model."))

    def _close(self) -> None:
        self._lead.close()
        self._unwatch()

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.detach()
            self._watch = None


def _told(job: Job, order: Order) -> Order:
    """Rank 0's order, on every rank."""
    text = json.dumps([order.do, order.strategy, order.reason]).encode() if order.do else b""
    size, steps = _broadcast(job, torch.tensor([len(text), order.steps], dtype=torch.int64)).tolist()
    if not size:
        return Order(steps=steps)
    mine = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if job.transport.rank == 0
        else torch.zeros(size, dtype=torch.uint8)
    )
    return Order(*json.loads(bytes(_broadcast(job, mine).tolist())), steps=steps)


def _broadcast(job: Job, values: torch.Tensor) -> torch.Tensor:
    transport, what = job.transport, "what auto does next"
    values = values.to(transport.control_device)
    job.engine.call(
        what,
        lambda: one_round(transport.broadcast(values, source=0, purpose="control", what=what)),
        step=job.step,
        device=transport.control_device,
    )
    return values.cpu()


def gather_numbers(job: Job, number: float, what: str) -> list[float]:
    """The numbers of all ranks, by rank; every rank gets them."""
    rows = gather_bytes(job.transport, f"{number:.9e}".ljust(24).encode(), what)
    return [float(row.decode()) for row in rows]


def _free_bytes(job: Job) -> float:
    """Free memory of the device; infinite on a CPU, where it is not known how much a process may take."""
    device = next(iter(job.parameters.values())).device
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else float("inf")


def _links(job: Job, limit_s: float, compute_s: list[float]) -> Cluster:
    """The cluster as probed, with hosts as slow as their slowest rank, relative to rank 0."""
    device, transport = next(iter(job.parameters.values())).device, job.transport
    measured = probe(transport, job.clock, device=device, limit_s=limit_s, quick=True)
    found = cluster_of(measured, transport.hosts, source="Probed while training.")
    slowest = [max(compute_s[rank] for rank in host) for host in transport.hosts]
    speeds = tuple(compute_s[0] / time_s if abs(time_s / compute_s[0] - 1) > _LIKE else 1.0 for time_s in slowest)
    return replace(found, speeds=speeds)
