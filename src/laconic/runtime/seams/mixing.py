"""Replicas that mix their parameters with those of neighbours, while gradients are being computed.

    x_i <- sum_j W_ij x_j - eta g_i(x_i)

Parameters leave after one optimizer step; what arrives takes their place before the next, which then applies the
gradient. A schedule that sends nothing before the backward pass has ended lets them leave only then.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from laconic.core.plan import Plan
from laconic.core.stateful import ParameterState
from laconic.runtime.job import Job
from laconic.runtime.seams.rounds import Rounds, nothing_to_accumulate


class MixingSeam:
    """Starts rounds when they are due and puts their outcome in the place of the parameters."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rounds = Rounds(job)
        self._overlapped = self._rounds.plan().launch == "ready"

    def before_step(self, *, closure: bool) -> None:
        """See Seam."""
        with torch.no_grad():
            if not self._overlapped:
                self._start_due(self._job.step)
            self.settle()

    def after_step(self) -> None:
        """See Seam."""
        with torch.no_grad():
            if self._job.strategy.architecture.follows_steps:
                self._rounds.follow_step()
            if self._overlapped:
                self._start_due(self._job.step + 1)

    def _start_due(self, num_steps: int) -> None:
        for part in self._job.strategy.synchronization.due(num_steps) if num_steps else ():
            for name, view in self._rounds.parts[part].views.items():
                view.copy_(self._job.parameters[name])
            self._rounds.start(part, after=num_steps)

    def wait(self) -> None:
        """See Seam."""
        self._rounds.wait()

    def settle(self) -> None:
        """See Seam; what is on its way takes the place of the parameters."""
        with torch.no_grad():
            for part, buckets in enumerate(self._rounds.parts):
                if self._rounds.is_open(part):
                    self._rounds.finish(part)
                    for name, view in buckets.views.items():
                        self._job.parameters[name].copy_(view)

    def accumulating(self) -> AbstractContextManager[object]:
        """See Seam."""
        return nothing_to_accumulate()

    def plan(self) -> Plan:
        """See Seam."""
        return self._rounds.plan()

    def state(self) -> ParameterState:
        """See Seam."""
        return self._rounds.state()

    def order(self) -> list[str]:
        """See Seam; there is no order to know."""
        return []

    def load(self, saved: ParameterState, order: list[str], step: int) -> None:
        """See Seam."""
        self._rounds.load(saved)

    def adopt(self) -> None:
        """See Seam; all replicas are equal again, so what was remembered of their differences is not true any more."""
        self._rounds.begin()

    def detach(self) -> None:
        """See Seam."""
