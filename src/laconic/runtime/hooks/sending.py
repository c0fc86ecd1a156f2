"""The buckets of one backward pass: filled with gradients, submitted in planned order when complete, awaited."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from laconic.runtime.buckets import Buckets
from laconic.runtime.engine import Task
from laconic.runtime.hooks.gradient_views import GradientViews
from laconic.runtime.job import Job


class Sending:
    """The progress of the buckets of a pass."""

    def __init__(self, job: Job, views: GradientViews) -> None:
        self._job = job
        self._views = views
        self._buckets: Buckets | None = None
        self.taken: dict[str, int] = {}
        """The parameters whose gradients are in their buckets, and where in memory each gradient lay."""
        self._missing: list[int] = []
        self._next = 0
        self.tasks: list[Task] = []

    def begin(self, buckets: Buckets) -> None:
        """Nothing has been taken yet."""
        self._buckets = buckets
        self.taken = {}
        self._missing = [len(bucket.tensors) for bucket in buckets.plan.buckets]
        self._next = 0
        self.tasks = []

    def release(self) -> None:
        """Release the buckets, which are about to be made again."""
        self._buckets = None
        self.tasks = []

    @property
    def begun(self) -> bool:
        """Whether any bucket has been submitted."""
        return self._next > 0

    def has_left(self, name: str) -> bool:
        """Whether a bucket with this gradient has been submitted."""
        return min(self._current().buckets_of[name]) < self._next

    def fill(self, name: str, gradient: torch.Tensor | None, lay_at: int) -> None:
        """Put a gradient into its buckets; None: zeros."""
        self._views.fill(name, gradient)
        if name not in self.taken:
            self.taken[name] = lay_at
            for bucket in self._current().buckets_of[name]:
                self._missing[bucket] -= 1

    def launch(self, used: Mapping[str, bool], *, ended: bool) -> None:
        """Submit the complete buckets; in them, the gradients of parameters that were used become views."""
        plan = self._current().plan
        if (plan.launch == "after_backward" or self._job.after_backward) and not ended:
            return
        while self._next < len(plan.buckets) and self._missing[self._next] == 0:
            owners = [tensor.owner for tensor in plan.buckets[self._next].tensors]
            self._views.flush(owners)
            for owner in owners:
                if used[owner]:
                    self._views.hand_out(owner)
            last = self._next == len(plan.buckets) - 1 and not plan.decoupled
            self.tasks.append(self._job.engine.submit(self._job.bucket_task(self._current(), self._next, last=last)))
            self._next += 1
            if self._next == len(plan.buckets) and plan.decoupled:
                self._submit_second_halves()

    def _submit_second_halves(self) -> None:
        """Launch the second halves, those of the first layers first."""
        for task in reversed(self.tasks):
            self._job.engine.submit_second_half(task, last=task is self.tasks[0])

    def wait(self) -> None:
        """Return when all submitted exchanges have arrived."""
        job = self._job
        device = self.tasks[-1].device if self.tasks else torch.device("cpu")
        began = job.stopwatch.mark(device)
        for task in self.tasks:  # check each: a later one may be done before an earlier one
            job.engine.wait(task)
        job.stopwatch.note("wait", job.step, began, job.stopwatch.mark(device))

    def ended(self) -> None:
        """Forget the submitted tasks: they are done, or another object waits for them."""
        self.tasks = []

    def _current(self) -> Buckets:
        assert self._buckets is not None, "no pass has begun"
        return self._buckets
