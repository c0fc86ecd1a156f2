"""The speeds of the jobs of a round: number of GPUs, slow hosts, and shared links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from laconic.cluster import Cluster
from laconic.cluster.fabric import Floats, Indices
from laconic.jobs.contention import Links, Options, Shared, overlapped, shared
from laconic.jobs.job import Job
from laconic.jobs.policies import Policy
from laconic.jobs.pool import Placement

if TYPE_CHECKING:
    from laconic.jobs.strategy_prices import StrategyPrices

Fidelity = Literal["throughput", "flow"]


@dataclass(eq=False)
class Place:
    """The placement of a running job."""

    placement: Placement
    gpus: int
    begin_s: float
    strategy: str = ""
    """Its strategy in this round, where the costs of strategies were computed."""


@dataclass(eq=False)
class Speeds:
    """Speeds relative to the speed on all GPUs that a job asks for, on one host."""

    jobs: Sequence[Job]
    cluster: Cluster
    policy: Policy
    fidelity: Fidelity
    prices: StrategyPrices | None
    loads: list[tuple[float, Floats]] = field(default_factory=list)
    """When a round began, and the load of each link in it."""
    _last: tuple[object, Shared] | None = None

    def __post_init__(self) -> None:
        self.links = Links(self.cluster) if self.fidelity == "flow" else None
        self._spread = np.array([job.spread_slowdown for job in self.jobs])
        self._bytes = np.array([job.traffic.gradient_bytes if job.traffic else math.nan for job in self.jobs])
        self._host_speeds = self.cluster.speeds if len(set(self.cluster.speeds)) > 1 else None
        uses_strategies = self.policy.chooses_strategies or any(
            job.traffic is not None and job.traffic.strategy != "ddp" for job in self.jobs
        )
        if self.links is not None and uses_strategies and self.prices is None:
            # Strategies need torch, which takes seconds to import; most runs do not need it.
            from laconic.jobs.strategy_prices import StrategyPrices  # noqa: PLC0415

            self.prices = StrategyPrices()

    def first_guess(self, steps_per_s: Floats) -> Floats:
        """Speeds of jobs that never ran: as if each were alone on as few hosts as can hold it."""
        hosts = np.ceil(np.array([job.gpus for job in self.jobs]) / self.cluster.devices_per_host)
        return self.alone(np.arange(len(self.jobs)), steps_per_s, hosts)

    def alone(self, numbers: Indices, steps_per_s: Floats, hosts: Floats | int) -> Floats:
        """Speeds of jobs, each of them alone on `hosts` hosts of one rack."""
        if self.links is None:
            return np.where(np.asarray(hosts) > 1, 1 / self._spread[numbers], 1.0)
        compute_s = 1 / steps_per_s
        byte_s = 2 * (hosts - 1) / hosts / min(link.bytes_per_s for link in self.cluster.links)
        return compute_s / overlapped(compute_s, byte_s * np.nan_to_num(self._bytes[numbers]))

    def of(self, numbers: Indices, places: Sequence[Place], steps_per_s: Floats, now_s: float) -> Floats:
        """Speeds of jobs that run at the same time; steps_per_s: of each, undisturbed."""
        speed, slower = np.ones(len(numbers)), np.ones(len(numbers))
        for row, (number, at) in enumerate(zip(numbers.tolist(), places, strict=True)):
            job = self.jobs[number]
            if at.gpus != job.gpus:
                speed[row] = self.policy.speed(job, at.gpus)
                # Steps on more GPUs hold more samples.
                slower[row] = at.gpus / job.gpus / job.speed_on(at.gpus)
            if self._host_speeds is not None:
                slowest = min(self._host_speeds[host] for host, _ in at.placement)
                speed[row] *= slowest
                slower[row] /= slowest
        several = np.array([row for row, at in enumerate(places) if len(at.placement) > 1], dtype=np.int64)
        known = several[~np.isnan(self._bytes[numbers[several]])] if self.links is not None else several[:0]
        unknown = np.setdiff1d(several, known)
        speed[unknown] /= self._spread[numbers[unknown]]
        if self.links is not None:
            compute_s = slower[known] / steps_per_s[known]
            here = [places[row] for row in known.tolist()]
            speed[known] *= self._left_by_links(self.links, numbers[known], here, compute_s, now_s)
        return speed

    def _left_by_links(
        self, links: Links, numbers: Indices, places: Sequence[Place], compute_s: Floats, now_s: float
    ) -> Floats:
        """The share of speed that links leave to jobs on several hosts with these compute times per step."""
        if not len(numbers):
            self.loads.append((now_s, np.zeros(links.num_links)))
            return np.ones(0)
        options, names = Options.plain(len(numbers)), list[list[str]]()
        if self.prices is not None:
            jobs = [self.jobs[number] for number in numbers.tolist()]
            options, names = self.prices.options(jobs, choose=self.policy.chooses_strategies)
        placements = [at.placement for at in places]
        key = (numbers.tobytes(), compute_s.tobytes(), tuple(placements))
        # From round to round often nothing changes.
        if self._last is None or self._last[0] != key:
            nbytes, interleaved = self._bytes[numbers], self.policy.interleaves
            self._last = (key, shared(links, placements, compute_s, nbytes, options, interleaved=interleaved))
        found = self._last[1]
        self.loads.append((now_s, found.link_load))
        for at, own, option in zip(places, names, found.option.tolist(), strict=False):
            at.strategy = own[option]
        return compute_s / (found.step_s * options.steps_ratio[np.arange(len(numbers)), found.option])
