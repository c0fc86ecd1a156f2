"""The outcome of the jobs of a trace under one policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laconic.cluster.fabric import Floats
from laconic.jobs.job import Job
from laconic.jobs.pool import Placement
from laconic.jobs.serving import Served

UNFAIR = 1.1
"""A job is treated unfairly if it takes longer than this many times what its own share of the cluster would take."""


@dataclass(frozen=True, kw_only=True)
class Stay:
    """A job on the same GPUs without an interruption."""

    job: int
    begin_s: float
    end_s: float
    gpus: int
    placement: Placement
    strategy: str = ""
    """The last strategy it used there; empty: the job's own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """Completion times and the events of a run."""

    policy: str
    jobs: Sequence[Job]
    num_gpus: int
    arrival_s: Floats
    """When each job could have begun: after its arrival and the end of the job it waits for."""
    finish_s: Floats
    stays: Sequence[Stay]
    served: Sequence[Served]
    """The outcome of inference services; their GPUs are not counted below."""
    num_rounds: int
    num_starts: int
    """The number of times a job got GPUs it did not have before."""
    busy_gpu_s: float
    """GPU-seconds that were given to jobs."""
    link_names: Sequence[str]
    load_times_s: Floats
    """Start times of the rounds in `loads`."""
    link_load: Floats
    """[round, link]: share of the time in which the link was busy; empty where links are not modelled."""

    @property
    def completion_s(self) -> Floats:
        """From arrival to the end, by job."""
        return self.finish_s - self.arrival_s

    @property
    def makespan_s(self) -> float:
        """When the last job ends."""
        return float(self.finish_s.max())

    @property
    def average_completion_s(self) -> float:
        """The mean over all jobs."""
        return float(self.completion_s.mean())

    @property
    def geometric_completion_s(self) -> float:
        """The geometric mean over all jobs."""
        return float(np.exp(np.log(self.completion_s).mean()))

    @property
    def gpu_utilization(self) -> float:
        """Share of all GPU-seconds until the last job ends in which GPUs were given to jobs."""
        return self.busy_gpu_s / (self.num_gpus * self.makespan_s)

    @property
    def fairness(self) -> Floats:
        """Finish-time fairness of each job: completion time / that on its own share of the cluster.

        The share is 1 while all present jobs fit at the same time; otherwise GPUs / GPUs that they ask for.
        """
        edges = np.concatenate([self.arrival_s, self.finish_s])
        gpus = np.array([job.gpus for job in self.jobs], dtype=np.float64)
        order = np.argsort(edges, kind="stable")
        times_s = edges[order]
        wanted = np.cumsum(np.concatenate([gpus, -gpus])[order])
        crowding = np.maximum(1.0, wanted / self.num_gpus)[:-1]
        area = np.concatenate([[0.0], np.cumsum(crowding * np.diff(times_s))])
        present = np.interp(self.finish_s, times_s, area) - np.interp(self.arrival_s, times_s, area)
        durations_s = np.array([job.duration_s for job in self.jobs])
        return self.completion_s / (durations_s * np.maximum(1.0, present / self.completion_s))

    @property
    def unfair_share(self) -> float:
        """Share of the jobs that are treated unfairly."""
        return float((self.fairness > UNFAIR).mean())

    @property
    def mean_link_load(self) -> Floats:
        """By link, over all rounds."""
        return self.link_load.mean(axis=0) if self.link_load.size else np.zeros(len(self.link_names))

    def strategy_seconds(self) -> dict[str, float]:
        """For how long jobs used each strategy that a policy chose for them."""
        found: dict[str, float] = {}
        for stay in self.stays:
            if stay.strategy:
                found[stay.strategy] = found.get(stay.strategy, 0.0) + stay.end_s - stay.begin_s
        return dict(sorted(found.items(), key=lambda item: -item[1]))
