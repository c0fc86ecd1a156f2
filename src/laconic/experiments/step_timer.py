"""Times of the parts of a step, without waiting for a GPU inside the step.

On a GPU the host runs ahead. A wait for the device in the middle of a step would also wait for communication that is
meant to overlap with the next forward pass, and would hide the gain of a schedule. So times are CUDA events in the
training stream, and are read when a turn is over.
"""

from __future__ import annotations

import torch

from laconic.core.clock import WallClock
from laconic.core.event import EventSink, Scalar
from laconic.runtime.stopwatch import Mark, Stopwatch


class StepTimer:
    """Writes durations between two marks as events."""

    def __init__(self, device: torch.device, events: EventSink, rank: int) -> None:
        self._device = device
        self._stopwatch = Stopwatch(WallClock(), events, rank)
        self.runs_behind = device.type == "cuda"
        """Whether the device may still be busy with a step when the host has gone on to the next."""

    def mark(self) -> Mark:
        """A mark of the time at which everything issued so far on the current stream is done."""
        return self._stopwatch.mark(self._device)

    def note(self, kind: str, step: int, began: Mark, ended: Mark, **data: Scalar) -> None:
        """Write the duration between two marks, as soon as both times are known."""
        self._stopwatch.note(kind, step, began, ended, **data)

    def settle(self) -> None:
        """Wait until the device is idle and every note is written; only between turns."""
        if self.runs_behind:
            torch.cuda.synchronize(self._device)
        self._stopwatch.flush()
