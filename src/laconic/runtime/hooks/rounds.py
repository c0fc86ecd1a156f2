"""Rounds that exchange something of the parameters, and may last longer than a step."""

from __future__ import annotations

import torch

from laconic.core.plan import Plan
from laconic.core.stateful import ParameterState
from laconic.runtime.buckets import Buckets
from laconic.runtime.engine import Task
from laconic.runtime.job import Job

PENDING = "rounds.pending"
"""The field of a saved state that holds what had arrived but was not yet applied."""


class Rounds:
    """The buckets of every part of the model, and which parts are on their way."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._plans = job.fixed_plans()
        self.parts = [Buckets(plan, job.strategy, job.values, {}) for plan in self._plans]
        self._open: dict[int, list[Task]] = {}
        self.begin()

    def begin(self) -> None:
        """Let the architecture start from the parameters as they are, the same on all ranks."""
        with torch.no_grad():
            for buckets in self.parts:
                for index, state in enumerate(buckets.states):
                    values = torch.empty_like(buckets.flats[index])
                    for name, view in buckets.views_of(index, values).items():
                        view.copy_(self._job.values[name])
                    self._job.strategy.architecture.begin(state, values)

    def is_open(self, part: int) -> bool:
        """Whether this part is on its way, or has arrived and was not taken in."""
        return part in self._open

    def start(self, part: int, *, after: int) -> None:
        """Exchange what has been written into the views of this part when `after` steps were complete."""
        buckets, job = self.parts[part], self._job
        first = sum(len(other.flats) for other in self.parts[:part])
        count = len(buckets.flats)
        self._open[part] = [
            job.engine.submit(
                job.bucket_task(buckets, index, last=index == count - 1, first_bucket=first, step=after - 1)
            )
            for index in range(count)
        ]

    def finish(self, part: int) -> None:
        """Return when the exchange of this part is done; its views then hold the outcome."""
        job, tasks = self._job, self._open.pop(part)
        device = self.parts[part].flats[0].device if self.parts[part].flats else torch.device("cpu")
        began = job.stopwatch.mark(device)
        for task in tasks:
            job.engine.wait(task)
        job.stopwatch.note("wait", job.step, began, job.stopwatch.mark(device))

    def follow_step(self) -> None:
        """Let the architecture correct what the optimizer has done to the parameters."""
        job = self._job
        for buckets in self.parts:
            for index, state in enumerate(buckets.states):
                values = torch.empty_like(buckets.flats[index])
                views = buckets.views_of(index, values)
                for name, view in views.items():
                    view.copy_(job.values[name])
                job.strategy.architecture.follow_step(state, values)
                for name, view in views.items():
                    job.values[name].copy_(view)

    def wait(self) -> None:
        """Return when nothing is on its way."""
        for tasks in self._open.values():
            for task in tasks:
                self._job.engine.wait(task)

    def plan(self) -> Plan:
        """The buckets of all parts, one after the other."""
        return Plan(tuple(bucket for plan in self._plans for bucket in plan.buckets), self._plans[0].launch)

    def state(self) -> ParameterState:
        """What is remembered, and what has arrived and was not taken in."""
        merged: ParameterState = {}
        self.wait()
        for number, buckets in enumerate(self.parts):
            merged |= buckets.state_by_parameter()
            if number in self._open:
                for name, view in buckets.views.items():
                    merged.setdefault(name, {})[PENDING] = view
        return merged

    def load(self, saved: ParameterState) -> None:
        """Continue with saved state."""
        self._open.clear()
        for number, buckets in enumerate(self.parts):
            for state in buckets.states:
                state.restore(saved)
            for name, view in buckets.views.items():
                arrived = saved.get(name, {}).get(PENDING)
                if arrived is not None:
                    view.copy_(arrived)
                    self._open[number] = []
