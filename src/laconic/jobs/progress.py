"""The progress of many jobs, as arrays with one entry per job."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from laconic.cluster.fabric import Floats, Indices
from laconic.jobs.job import Job

_DONE = 1 - 1e-9
"""Remaining work below this is rounding."""


class Progress:
    """Work done and current speed, phase by phase."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        most = max(len(job.phases) for job in jobs)
        self.done = np.zeros(len(jobs))
        """Share of each job's work."""
        self.phase = np.zeros(len(jobs), dtype=np.int64)
        """Which of its phases each job is in."""
        padded = [[*job.phases, *[job.phases[-1]] * (most - len(job.phases))] for job in jobs]
        self._until = np.array([[phase.until for phase in phases] for phases in padded])
        self._work_per_s = np.array([[phase.work_per_s for phase in phases] for phases in padded])
        self._steps_per_s = np.array([[phase.steps_per_s for phase in phases] for phases in padded])

    def work_per_s(self, jobs: Indices) -> Floats:
        """Share of the work done per second in the present phase."""
        return self._work_per_s[jobs, self.phase[jobs]]

    def steps_per_s(self, jobs: Indices) -> Floats:
        """Optimizer steps per second in the present phase."""
        return self._steps_per_s[jobs, self.phase[jobs]]

    def left_s(self, jobs: Indices) -> Floats:
        """The remaining time at the present speed."""
        return (1 - self.done[jobs]) / self.work_per_s(jobs)

    def is_done(self, jobs: Indices) -> np.ndarray:
        """Whether a job is done."""
        return self.done[jobs] >= _DONE

    def advance(self, jobs: Indices, seconds: Floats, speed: Floats, *, stops: bool = False) -> Floats:
        """Let jobs run for `seconds`, `speed` times as fast as undisturbed; returns how long each ran until done.

        stops: a job stops where its next phase begins.
        """
        left_s = np.array(seconds, dtype=np.float64)
        ran_s = np.zeros(len(jobs))
        for _ in range(self._until.shape[1]):
            rate = self._work_per_s[jobs, self.phase[jobs]] * speed
            until = self._until[jobs, self.phase[jobs]]
            needed_s = np.maximum(0.0, until - self.done[jobs]) / rate
            took_s = np.minimum(left_s, needed_s)
            ends = needed_s <= left_s
            self.done[jobs] = np.where(ends, until, self.done[jobs] + took_s * rate)
            left_s -= took_s
            ran_s += took_s
            more = ends & (self.phase[jobs] + 1 < self._until.shape[1]) & (until < _DONE)
            if not more.any():
                break
            self.phase[jobs[more]] += 1
            if stops:
                left_s[more] = 0.0
        return ran_s
