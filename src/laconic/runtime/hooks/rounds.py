"""Exchanges of parameters or their changes, which may last longer than a step."""

from __future__ import annotations

import torch

from laconic.core.plan import Plan
from laconic.core.stateful import ParameterState
from laconic.runtime.buckets import Buckets
from laconic.runtime.engine import Task
from laconic.runtime.job import Job
from laconic.runtime.shards import Pieces

PENDING = "rounds.pending"
"""The field of a saved state that holds results that had arrived but were not yet applied."""


class Rounds:
    """The buckets of every fragment of the model, and which fragments are in flight."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._plans = job.fixed_plans()
        kept = job.strategy.synchronization.moments
        moments = {f"{moment} of {name}": p for moment in kept for name, p in job.parameters.items()}
        # An optimizer's state of a parameter has the layout of the parameter.
        layouts = Pieces({**job.parameters, **moments})
        self.parts = [Buckets(plan, job.strategy, layouts, {}) for plan in self._plans]
        self._open: dict[int, list[Task]] = {}
        self.begin()

    def begin(self) -> None:
        """Initialise the architecture with the current parameters, which are the same on all ranks."""
        with torch.no_grad():
            for buckets in self.parts:
                for index, state in enumerate(buckets.states):
                    if state.bucket.moment:
                        continue
                    values = torch.empty_like(buckets.flats[index])
                    for name, view in buckets.views_of(index, values).items():
                        view.copy_(self._job.values[name])
                    self._job.strategy.architecture.begin(state, values)

    def is_open(self, part: int) -> bool:
        """Whether this fragment is in flight, or has arrived and is not applied yet."""
        return part in self._open

    def start(self, part: int, *, after: int) -> None:
        """Exchange the values in the views of this fragment, written when `after` steps were complete."""
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
        """Return when the exchange of this fragment is done; its views then hold the result."""
        job, tasks = self._job, self._open[part]
        device = self.parts[part].flats[0].device if self.parts[part].flats else torch.device("cpu")
        began = job.stopwatch.mark(device)
        job.together(f"the round of part {part}", lambda: self._wait_for(tasks), tasks)
        del self._open[part]
        job.stopwatch.note("wait", job.step, began, job.stopwatch.mark(device))

    def _wait_for(self, tasks: list[Task]) -> None:
        for task in tasks:
            self._job.engine.wait(task)

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
        """Return when nothing is in flight."""
        for tasks in self._open.values():
            self._wait_for(tasks)

    def plan(self) -> Plan:
        """The buckets of all fragments, one after the other."""
        return Plan(tuple(bucket for plan in self._plans for bucket in plan.buckets), self._plans[0].launch)

    def state(self) -> ParameterState:
        """All state, and results that have arrived and are not applied yet."""
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
