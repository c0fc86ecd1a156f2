"""Times of events, on the host or on a device.

On a CPU a mark is the current time. On a GPU the host runs ahead of the device, so a mark is a CUDA event in the
current stream, and its time is known once the device has reached it. Notes are written as events in the order in which
they were made, each as soon as both of its marks are known.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import torch

from laconic.core.clock import Clock
from laconic.core.event import DiscardEvents, Event, EventSink, Scalar
from laconic.errors import CommunicationError

_FLUSH_S = 60.0
"""How long detaching waits for a device that still has exchanges to finish."""


@dataclass(frozen=True)
class DeviceMark:
    """A position in a stream of one GPU."""

    event: torch.cuda.Event
    index: int


Mark = float | DeviceMark


@dataclass(frozen=True)
class _Note:
    kind: str
    rank: int
    step: int
    began: Mark
    ended: Mark
    data: dict[str, Scalar | torch.Tensor] = field(default_factory=dict)


class Stopwatch:
    """Turns pairs of marks into events; may be used from several threads."""

    def __init__(self, clock: Clock, events: EventSink, rank: int) -> None:
        self._clock = clock
        self._events = events
        self.rank = rank
        self._idle = isinstance(events, DiscardEvents)
        self._lock = threading.Lock()
        self._pending: deque[_Note] = deque()
        self._origins: dict[int, tuple[torch.cuda.Event, float]] = {}

    def now(self) -> float:
        """The time on the host."""
        return self._clock.now()

    def mark(self, device: torch.device) -> Mark:
        """The moment at which everything issued so far on the device's current stream is done."""
        if device.type != "cuda" or self._idle:
            return self._clock.now()
        index = device.index if device.index is not None else torch.cuda.current_device()
        with self._lock:
            if index not in self._origins:
                origin = torch.cuda.Event(enable_timing=True)
                origin.record(torch.cuda.Stream(index))
                origin.synchronize()
                self._origins[index] = (origin, self._clock.now())
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(index))
        return DeviceMark(event, index)

    def note(self, kind: str, step: int, began: Mark, ended: Mark, **data: Scalar | torch.Tensor) -> None:
        """Record a duration between two marks; scalars on a device are read once it has reached the second."""
        if self._idle:
            return
        with self._lock:
            self._pending.append(_Note(kind, self.rank, step, began, ended, data))
            self._write()

    def flush(self) -> None:
        """Write all pending events; on a GPU, wait for them."""
        until_s = time.monotonic() + _FLUSH_S
        with self._lock:
            self._write()
            while self._pending and time.monotonic() < until_s:
                time.sleep(0.001)
                self._write()
            if self._pending:
                note = self._pending[0]
                raise CommunicationError(
                    f"rank {self.rank}: the device has not finished the {note.kind} of step {note.step} in "
                    f"{_FLUSH_S:g} s; its time and those after it are not in the event log."
                )

    def _write(self) -> None:
        while self._pending:
            note = self._pending[0]
            if isinstance(note.ended, DeviceMark) and not note.ended.event.query():
                return
            self._pending.popleft()
            began_s, ended_s = self._seconds(note.began), self._seconds(note.ended)
            data = {key: _scalar(value) for key, value in note.data.items()}
            self._events.write(Event(note.kind, began_s, note.rank, note.step, ended_s - began_s, data))

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        origin, origin_s = self._origins[mark.index]
        return origin_s + origin.elapsed_time(mark.event) / 1e3


def _scalar(value: Scalar | torch.Tensor) -> Scalar:
    if not isinstance(value, torch.Tensor):
        return value
    number = float(value)
    # JSON has no infinity.
    return number if math.isfinite(number) else None
