"""Points in time of a training job: of the host, or, on a GPU, whose host runs ahead, of the device's stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from laconic.runtime.job import Job

Mark = Any
"""A time of the host's clock, or an event on a GPU's stream."""


class Marks:
    """Makes marks on the device of a job's parameters."""

    def __init__(self, job: Job) -> None:
        self._device = next(iter(job.parameters.values())).device
        self.on_device = self._device.type == "cuda"
        """Whether marks are events on a stream."""
        # In compiled code, the event that is recorded would not be the one that the caller keeps.
        self.now: Callable[[], Mark] = torch.compiler.disable(self._on_stream) if self.on_device else job.clock.now

    def times_s(self, marks: Sequence[Mark]) -> list[float]:
        """The times between marks that follow each other."""
        self.wait()
        return [between_s(begin, end) for begin, end in pairwise(marks)]

    def wait(self) -> None:
        """Until the device has passed all marks."""
        if self.on_device:
            torch.cuda.synchronize(self._device)

    def _on_stream(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def between_s(begin: Mark, end: Mark) -> float:
    """The time between two marks that the device has passed."""
    return max(0.0, begin.elapsed_time(end) / 1e3 if isinstance(begin, torch.cuda.Event) else end - begin)
