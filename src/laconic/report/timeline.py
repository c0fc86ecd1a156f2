"""One recorded step of each strategy on each link: the training thread and the exchanges.

Where exchanges of the step end in the next one, the picture goes on until the last of them has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from laconic.core.event import Event
from laconic.report.exposure import SLACK_S, Exchanges, end_of
from laconic.report.interval_packing import first_free_lanes
from laconic.report.typical_step import Chosen, Iteration, Key, choose, key_of

TRAINING_KINDS = ("forward", "backward", "wait", "optimizer")
COMMUNICATION_KINDS = ("encode", "exchange", "decode")
_DRAWN = frozenset(TRAINING_KINDS + COMMUNICATION_KINDS)
_SEEN_SHARE = 2e-4
"""Share of the step below which waits are not drawn."""
Age = Literal[-1, 0, 1]
"""Of a step: the one before, the one that is drawn, the next."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """An interval, in seconds since the first rank began the step."""

    kind: str
    start_s: float
    duration_s: float
    bucket: int | None = None
    """For a wait: the bucket that was waited for."""
    wire_bytes: int | None = None
    """Sent by this exchange."""
    lane: int = 0
    """Of an exchange, among those of its rank: no two in one lane overlap."""
    age: Age = 0
    """Of the step it belongs to; a wait belongs to the step that waits."""
    half: int | None = None
    """Of an exchange in two halves: which one."""

    @property
    def end_s(self) -> float:
        """Its end."""
        return self.start_s + self.duration_s


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step of one rank."""

    begin_s: float
    duration_s: float
    alone_s: float | None
    """The time of forward and backward without communication; None if not measured."""
    spans: tuple[Span, ...]
    """In the order of their starts. Spans of training do not overlap, because a waiting thread does not compute."""


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """One step of one strategy on one link."""

    strategy: str
    link: str
    step: int
    ranks: Mapping[int, RankStep]


def typical_steps(read: Callable[[], Iterable[Event]]) -> tuple[StepTimeline, ...]:
    """The typical step of every (link, strategy) with details; `read` is called twice, a log may exceed memory."""
    chosen = choose(read())
    found: dict[Key, dict[int, list[Event]]] = {key: defaultdict(list) for key in chosen}
    for event in read():
        step = chosen.get(key_of(event), {}).get(event.rank)
        if step is not None and event.kind in _DRAWN and step.holds(event):
            found[key_of(event)][event.rank].append(event)
    timelines: list[StepTimeline] = []
    for (link, strategy), steps in chosen.items():
        zero_s = min(step.here.begin_s for step in steps.values())
        ranks = {rank: _rank_step(found[link, strategy][rank], step, zero_s) for rank, step in steps.items()}
        number = next(iter(steps.values())).here.step
        timelines.append(StepTimeline(strategy=strategy, link=link, step=number, ranks=ranks))
    return tuple(timelines)


def _rank_step(events: Sequence[Event], step: Chosen, zero_s: float) -> RankStep:
    here = step.here
    in_order = sorted(events, key=lambda event: event.time_s)
    ages = _ages(in_order, here)
    own_ends = [end_of(event) for event in in_order if event.kind == "exchange" and ages[id(event)] == 0]
    until_s = max([here.end_s, *own_ends])
    waits = _waits(in_order, here, zero_s)
    spans = [*waits]
    for event in in_order:
        if event.kind in COMMUNICATION_KINDS:
            spans.append(_span(event, ages[id(event)], event.time_s, end_of(event), zero_s))
        elif event.kind != "wait":
            age: Age = 1 if event.time_s >= here.end_s - SLACK_S else 0
            computing = _without((event.time_s, end_of(event)), [(w.start_s + zero_s, w.end_s + zero_s) for w in waits])
            spans += [_span(event, age, *piece, zero_s) for piece in computing]
    # Of the next step only the training spans until then, not its exchanges.
    shown = [span for span in spans if span.start_s < until_s - zero_s - SLACK_S]
    shown = [span for span in shown if span.age < 1 or span.kind in TRAINING_KINDS]
    shown = [_cut(span, until_s - zero_s) if span.age == 1 else span for span in shown]
    return RankStep(
        begin_s=here.begin_s - zero_s,
        duration_s=here.end_s - here.begin_s,
        alone_s=step.alone_s,
        spans=_in_lanes(sorted(shown, key=lambda span: span.start_s)),
    )


def _ages(events: Sequence[Event], here: Iteration) -> dict[int, Age]:
    """By id of each event: which step's gradients it exchanges.

    The numbers of a session's steps may differ from those here; but of all exchanges that begin in a step, those of its
    own gradients have the highest number.
    """
    exchanged = [event for event in events if event.kind in COMMUNICATION_KINDS]
    number = max((event.step for event in exchanged if here.begin_s <= event.time_s < here.end_s), default=None)
    found: dict[int, Age] = {}
    for event in exchanged:
        is_before = event.time_s < here.begin_s if number is None else event.step < number
        is_after = event.time_s >= here.end_s if number is None else event.step > number
        found[id(event)] = -1 if is_before else 1 if is_after else 0
    return found


def _waits(events: Sequence[Event], here: Iteration, zero_s: float) -> list[Span]:
    exchanges = Exchanges(events)
    shortest_s = _SEEN_SHARE * (here.end_s - here.begin_s)
    found: list[Span] = []
    for wait in events:
        if wait.kind != "wait" or wait.duration_s < shortest_s:
            continue
        for part in exchanges.waited_for(wait, shortest_s):
            bucket = None if part.exchange is None else _count(part.exchange, "bucket")
            age: Age = 1 if part.begin_s >= here.end_s - SLACK_S else 0
            start_s = part.begin_s - zero_s
            found.append(Span(kind="wait", start_s=start_s, duration_s=part.seconds, bucket=bucket, age=age))
    return found


def _span(event: Event, age: Age, begin_s: float, end_s: float, zero_s: float) -> Span:
    return Span(
        kind=event.kind,
        start_s=begin_s - zero_s,
        duration_s=end_s - begin_s,
        bucket=_count(event, "bucket"),
        wire_bytes=_count(event, "wire_bytes"),
        age=age,
        half=_count(event, "half"),
    )


def _count(event: Event, name: str) -> int | None:
    value = event.data.get(name)
    return value if isinstance(value, int) else None


def _without(whole: tuple[float, float], gaps: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """An interval minus other intervals, given in order of their starts."""
    begin_s, end_s = whole
    pieces: list[tuple[float, float]] = []
    for gap_begin_s, gap_end_s in gaps:
        if gap_end_s <= begin_s or gap_begin_s >= end_s:
            continue
        if gap_begin_s > begin_s + SLACK_S:
            pieces.append((begin_s, gap_begin_s))
        begin_s = gap_end_s
    return [*pieces, (begin_s, end_s)] if end_s > begin_s + SLACK_S else pieces


def _cut(span: Span, until_s: float) -> Span:
    return replace(span, duration_s=min(span.end_s, until_s) - span.start_s)


def _in_lanes(spans: Sequence[Span]) -> tuple[Span, ...]:
    exchanges = [span for span in spans if span.kind == "exchange"]
    lanes = first_free_lanes((span.start_s, span.end_s) for span in exchanges)
    lane_of = {id(span): lane for span, lane in zip(exchanges, lanes, strict=True)}
    return tuple(replace(span, lane=lane_of.get(id(span), 0)) for span in spans)
