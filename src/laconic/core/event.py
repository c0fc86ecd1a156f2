"""One record format for everything that happens: runtime, lab and simulator write it, reports read it.

A record is one JSON object on one line. It always has kind, time_s (of the clock in use), rank and step, and duration_s
if the event lasts; each kind adds its own keys.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import IOBase
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from laconic.errors import LaconicError, one_line

EVENTS_VARIABLE = "LACONIC_EVENTS"
"""The environment variable with a file to which every session appends its events, besides the script's own sinks."""
Scalar = str | int | float | bool | None
_FIXED = ("kind", "time_s", "rank", "step", "duration_s")
_LARGEST_WHOLE = 2**64
"""The largest count; a larger one may not fit into a float."""


@dataclass(frozen=True)
class Event:
    """One event at one time on one rank."""

    kind: str
    time_s: float
    rank: int
    step: int
    duration_s: float = 0.0
    data: dict[str, Scalar] = field(default_factory=dict)

    def to_json(self) -> str:
        """This event as one line."""
        fixed = {key: getattr(self, key) for key in _FIXED}
        taken = fixed.keys() & self.data.keys()
        if taken:
            raise LaconicError(
                f'event "{one_line(self.kind, 40)}": data cannot hold {min(taken)}, which every record has already.'
            )
        for key, value in self.data.items():
            if not isinstance(value, Scalar):
                raise LaconicError(
                    f'event "{one_line(self.kind, 40)}": {key} must be a text, a number, True, False or None, got '
                    f"{type(value).__name__}. Write a number as float({key})."
                )
        return json.dumps({**fixed, **self.data}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Event:
        """Read one line back."""
        try:
            record = json.loads(line)
            fixed = {key: record.pop(key) for key in _FIXED}
            _check_types(fixed, record)
            return cls(**fixed, data=record)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as exc:
            raise LaconicError(f"not an event record: {one_line(line, 80)} ({one_line(exc, 80)}).") from exc


def _check_types(fixed: dict[str, object], data: dict[str, object]) -> None:
    """Raise TypeError for an invalid value, so that readers of events need not check again."""
    for key, value in (*fixed.items(), *data.items()):
        wanted: tuple[type, ...] = (str, int, float, bool, type(None))
        if key in fixed:
            wanted = {"kind": (str,), "rank": (int,), "step": (int,)}.get(key, (int, float))
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise TypeError(f"{key} cannot be {json.dumps(value)}")
        if isinstance(value, int) and abs(value) > _LARGEST_WHOLE:
            raise TypeError(f"{key} is too large")
        if isinstance(value, float) and key in fixed and not math.isfinite(value):
            raise TypeError(f"{key} is not finite")
        if isinstance(value, str):
            value.encode()  # half a pair of surrogates can stand in JSON, but in no file


class EventSink(Protocol):
    """Takes events; may be called from several threads."""

    def write(self, event: Event) -> None:
        """Take one event."""
        ...


def check_sink(sink: object) -> None:
    """Raise unless events can be written to it."""
    if isinstance(sink, str | Path | IOBase):
        raise LaconicError(
            f"events must be a sink, got {one_line(repr(sink), 80)}. For a file, write "
            'laconic.EventLog("events.jsonl").'
        )
    if isinstance(sink, type) or not callable(getattr(sink, "write", None)):
        shown = f"the class {sink.__name__}" if isinstance(sink, type) else one_line(repr(sink), 80)
        raise LaconicError(
            f"events must be a sink, an object with a method write(event), got {shown}. laconic has EventLog, "
            "EventList, EventTee and sinks for trackers."
        )


class DiscardEvents:
    """Discards all events."""

    def write(self, event: Event) -> None:
        """Forget the event."""


class EventList:
    """Keeps events in memory."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        """Append; list.append is atomic."""
        self.events.append(event)


class EventTee:
    """Passes every event to several sinks, in the order given; if one raises, those after it miss the event."""

    def __init__(self, *sinks: EventSink) -> None:
        for sink in sinks:
            check_sink(sink)
        self._sinks = sinks

    def write(self, event: Event) -> None:
        """Pass the event on."""
        for sink in self._sinks:
            sink.write(event)


class TaggedEvents:
    """Adds the same data to every event and passes it to another sink."""

    def __init__(self, sink: EventSink, **data: Scalar) -> None:
        self._sink = sink
        self._data = data

    def write(self, event: Event) -> None:
        """Pass the event on, with the data added."""
        self._sink.write(replace(event, data={**event.data, **self._data}))


class EventLog:
    """Appends events to a JSONL file, one whole line at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        with self._explained():
            # Line by line: the lines of a killed rank survive, and two writers never mix within a line.
            self._file = self.path.open("a", encoding="utf-8", buffering=1)

    def write(self, event: Event) -> None:
        """Append one line."""
        line = event.to_json() + "\n"
        with self._lock:
            if self._file.closed:
                raise LaconicError(f"the event log {self.path} is closed.")
            with self._explained():
                self._file.write(line)

    def close(self) -> None:
        """Flush and close; closing twice is fine."""
        with self._lock, self._explained():
            self._file.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise LaconicError(f"cannot write events to {self.path}: {exc.strerror}.") from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def log_of_environment(environment: Mapping[str, str]) -> EventLog | None:
    """The log that the environment names, opened; None: it names none."""
    path = environment.get(EVENTS_VARIABLE)
    return EventLog(path) if path else None


def read_events(lines: Iterable[str]) -> Iterator[Event]:
    """Every event of an open log, blank lines skipped; an error names the line."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield Event.from_json(line)
            except LaconicError as exc:
                raise LaconicError(f"line {number} is {exc}") from exc
