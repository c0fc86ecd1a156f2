"""Times in a pass: on the host, or on a GPU, which runs behind the host."""

from __future__ import annotations

import platform

import torch

from laconic.core.clock import Clock, WallClock
from laconic.errors import UsageError

Mark = float | torch.cuda.Event


class DeviceTime:
    """Marks points in time and computes the time between two marks afterwards.

    device: cpu, or cuda where there is a GPU.
    """

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        self._device = device
        self._clock = clock or WallClock()
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UsageError('there is no CUDA device here that torch can use. Measure on the CPU with "--device cpu".')

    def mark(self) -> Mark:
        """A mark of the time at which all work issued so far on the current stream is done."""
        if self._device.type != "cuda":
            return self._clock.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait until all marks are in the past."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def between_s(self, began: Mark, ended: Mark) -> float:
        """Seconds from one mark to another, both in the past."""
        if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
            return began.elapsed_time(ended) / 1e3
        assert not isinstance(began, torch.cuda.Event), "marks of two devices"
        assert not isinstance(ended, torch.cuda.Event), "marks of two devices"
        return ended - began

    @property
    def in_words(self) -> str:
        """The device, for a sentence."""
        if self._device.type == "cuda":
            return torch.cuda.get_device_name(self._device)
        threads = torch.get_num_threads()
        return f"a CPU ({platform.machine()}, {threads} {'thread' if threads == 1 else 'threads'})"
