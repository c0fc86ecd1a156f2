"""Servers that make outer steps: a worker trains alone, sends its change of parameters, and gets parameters back."""

from __future__ import annotations

import torch

from laconic.runtime.hooks.server_pushes import PushingHooks
from laconic.runtime.job import Job
from laconic.runtime.servers.server_pool import ServerPool


class AsyncOuterHooks(PushingHooks):
    """Sends the change since this worker last got parameters, when it is due by the worker's own count of steps."""

    def __init__(self, job: Job, pool: ServerPool) -> None:
        super().__init__(job, pool)
        self._rule = job.strategy.synchronization
        self._anchors = self._pushes.views_of([state.flat[self._rule.anchor] for state in self._pushes.buckets.states])
        with torch.no_grad():
            for name, anchor in self._anchors.items():
                anchor.copy_(job.parameters[name])
        pool.take = self._take

    def after_step(self) -> None:
        """Exchange with the servers if that is due."""
        job, pushes = self._job, self._pushes
        if not self._rule.due(job.step + 1):
            return
        with torch.no_grad():
            for name, anchor in self._anchors.items():
                torch.sub(anchor, job.parameters[name], out=pushes.views[name])
            pushes.exchange([], lambda name: False)
            for name, anchor in self._anchors.items():
                if pushes.brings_differences:
                    anchor.add_(pushes.views[name])
                else:
                    anchor.copy_(pushes.views[name])
                job.parameters[name].copy_(anchor)

    def _take(self, name: str, values: torch.Tensor) -> None:
        """Continue from the servers' current parameters, with the change that was not sent yet."""
        anchor, parameter = self._anchors[name], self._job.parameters[name]
        newest = values.to(anchor.device)
        parameter.add_(newest - anchor)
        anchor.copy_(newest)
