"""Events as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each rank is a process with these threads:

    turns               which strategy on which link has its turn
    training            steps with forward, backward and optimizer, waits in them; alone
    encode and decode   local work on the communication thread
    exchanges           one bucket each; more threads where they overlap, as spans of one thread must nest; where
                        events say which part of the network they use, threads for each part

Reference: "Trace Event Format", Google 2016.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from laconic.core.event import Event, Scalar
from laconic.report.exposure import Exchanges
from laconic.report.interval_packing import first_free_lanes

_ROOMS = {
    "turn": "turns",
    "attach": "turns",
    "iteration": "training",
    "forward": "training",
    "backward": "training",
    "wait": "training",
    "optimizer": "training",
    "alone": "training",
    "encode": "encode and decode",
    "decode": "encode and decode",
    "exchange": "exchanges",
}
"""The group of threads of each kind; other kinds are left out."""
_NESTING = frozenset({"turns", "training"})
_THREADS_PER_RANK = 1000


def trace(events: Iterable[Event], names: Mapping[int, str] | None = None) -> dict[str, object]:
    """The trace as a JSON object; times in microseconds since the first event. names: of ranks, instead of "rank 0"."""
    by_room: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in _ROOMS:
            by_room[event.rank, _room(event)].append(event)
    zero_s = min((event.time_s for room in by_room.values() for event in room), default=0.0)
    records: list[dict[str, object]] = []
    rooms = list(dict.fromkeys([*_ROOMS.values(), *(room for _, room in by_room)]))
    for rank in sorted({rank for rank, _ in by_room}):
        exchanges = Exchanges(event for (of, _), room in by_room.items() if of == rank for event in room)
        # Perfetto takes process 0 for the kernel's idle task, and threads of equal number for one thread.
        process = rank + 1
        records += _named("process", process, 0, (names or {}).get(rank, f"rank {rank}"), rank)
        thread = process * _THREADS_PER_RANK
        for room in rooms:
            # Of spans that begin together, the longer one encloses the other.
            in_room = sorted(by_room.get((rank, room), []), key=lambda event: (event.time_s, -event.duration_s))
            spans = [_microseconds(event, zero_s) for event in in_room]
            lanes = [0] * len(spans) if room in _NESTING else first_free_lanes(spans)
            if room in _NESTING:
                spans = _nested(spans)
            for lane in range(max(lanes, default=-1) + 1):
                name = room if lane == 0 else f"{room} {lane + 1}"
                records += _named("thread", process, thread + lane, name, thread + lane)
            for event, (begin, end), lane in zip(in_room, spans, lanes, strict=True):
                about = _slice(event, begin, end, process, thread + lane)
                records.append({**about, "name": _name(event, exchanges)})
            thread += max(lanes, default=-1) + 1
    return {"displayTimeUnit": "ms", "traceEvents": records}


def _room(event: Event) -> str:
    where = event.data.get("where")
    return f"exchanges, {where}" if event.kind == "exchange" and where is not None else _ROOMS[event.kind]


def _microseconds(event: Event, zero_s: float) -> tuple[float, float]:
    """Begin and end, rounded to nanoseconds: further digits are noise of floating-point seconds."""
    begin = round((event.time_s - zero_s) * 1e6, 3)
    return begin, max(begin, round((event.time_s + event.duration_s - zero_s) * 1e6, 3))


def _nested(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The spans, cut so that none ends after a span that encloses it: rounding must not make them cross."""
    around: list[float] = []
    fitted: list[tuple[float, float]] = []
    for begin, end in spans:
        while around and around[-1] <= begin:
            around.pop()
        end = min([end, *around[-1:]])
        around.append(end)
        fitted.append((begin, end))
    return fitted


def _named(what: str, process: int, thread: int, name: str, place: int) -> list[dict[str, object]]:
    base: dict[str, object] = {"ph": "M", "pid": process, "tid": thread}
    return [
        {**base, "name": f"{what}_name", "args": {"name": name}},
        {**base, "name": f"{what}_sort_index", "args": {"sort_index": place}},
    ]


def _slice(event: Event, begin: float, end: float, process: int, thread: int) -> dict[str, object]:
    return {
        "ph": "X",
        "cat": event.kind,
        "pid": process,
        "tid": thread,
        "ts": begin,
        "dur": round(end - begin, 3),
        "args": {"step": event.step, **{name: _strict(value) for name, value in event.data.items()}},
    }


def _strict(value: Scalar) -> Scalar:
    """A loss may be NaN, which JSON does not have."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _name(event: Event, exchanges: Exchanges) -> str:
    """The text of the span in Perfetto."""
    if event.kind == "wait":
        last = exchanges.ended_by(event)
        return "wait" if last is None else f"wait, ended by bucket {last.data.get('bucket')}"
    if event.kind == "turn":
        return f"{event.data.get('strategy')} on {event.data.get('link')}"
    if event.kind == "iteration":
        return f"step {event.step}"
    if event.kind == "exchange":
        half = {1: ", first half", 2: ", second half"}.get(int(event.data.get("half") or 0), "")
        return f"exchange of bucket {event.data.get('bucket')}{half}"
    if event.kind in ("encode", "decode"):
        return f"{event.kind} bucket {event.data.get('bucket')}"
    return event.kind
