"""Hooks for gossip: replicas mix their parameters with those of neighbours while gradients are being computed.

    x_i <- sum_j W_ij x_j - eta g_i(x_i)

Parameters are sent after one optimizer step; the mixed parameters replace them before the next, which then applies the
gradient. A schedule that sends nothing during the backward pass sends them after it.
"""

from __future__ import annotations

import torch

from laconic.core.plan import Plan
from laconic.core.stateful import ParameterState
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.hooks.rounds import Rounds
from laconic.runtime.job import Job


class GossipHooks(TrainingHooks):
    """Starts mixing steps when they are due and replaces the parameters by the results."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._rounds = Rounds(job)
        self._overlapped = self._rounds.plan().launch == "ready"

    def before_step(self, *, closure: bool) -> None:
        with torch.no_grad():
            if not self._overlapped:
                self._start_due(self._job.step)
            self.settle()

    def after_step(self) -> None:
        with torch.no_grad():
            if self._job.strategy.architecture.follows_steps:
                self._rounds.follow_step()
            if self._overlapped:
                self._start_due(self._job.step + 1)

    def _start_due(self, num_steps: int) -> None:
        for part in self._job.strategy.synchronization.due(num_steps) if num_steps else ():
            for name, view in self._rounds.parts[part].views.items():
                view.copy_(self._job.values[name])
            self._rounds.start(part, after=num_steps)

    def wait(self) -> None:
        self._rounds.wait()

    def settle(self) -> None:
        """Wait for the exchange in flight and take its result as parameters."""
        with torch.no_grad():
            for part, buckets in enumerate(self._rounds.parts):
                if self._rounds.is_open(part):
                    self._rounds.finish(part)
                    for name, view in buckets.views.items():
                        self._job.values[name].copy_(view)

    def plan(self) -> Plan:
        return self._rounds.plan()

    def state(self) -> ParameterState:
        return self._rounds.state()

    def load(self, saved: ParameterState, order: list[str], step: int) -> None:
        self._rounds.load(saved)

    def adopt(self) -> None:
        """Reset the state kept about neighbours, because replicas are equal again."""
        self._rounds.begin()
