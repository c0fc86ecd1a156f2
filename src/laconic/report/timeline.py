"""One step of each strategy on each link, as it went: what the training thread did and what was on the wire.

The step is a typical one: of the later half of the steps, the one of median duration.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from laconic.core.event import Event
from laconic.report.lanes import first_free_lanes

TRAINING_KINDS = ("forward", "backward", "wait", "optimizer")
COMMUNICATION_KINDS = ("encode", "exchange", "decode")
_DRAWN = frozenset(TRAINING_KINDS + COMMUNICATION_KINDS)
# Begin and end are differences of floating-point seconds since boot: the last bits of two equal times may differ.
_SLACK_S = 1e-6


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that lasted, in seconds since the first rank began the step."""

    kind: str
    start_s: float
    duration_s: float
    bucket: int | None = None
    wire_bytes: int | None = None
    lane: int = 0
    """Of an exchange, among those of its rank: no two in one lane overlap."""


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """One step of one strategy on one link."""

    strategy: str
    link: str
    step: int
    duration_s: float
    """On the lowest rank."""
    ranks: Mapping[int, tuple[Span, ...]]
    """By rank, each in the order of beginning."""


@dataclass(frozen=True)
class _Iteration:
    rank: int
    step: int
    begin_s: float
    end_s: float

    def holds(self, event: Event) -> bool:
        """Whether the event happened in it, at least in part."""
        begins_before_end = event.time_s < self.end_s - _SLACK_S
        return begins_before_end and event.time_s + event.duration_s > self.begin_s + _SLACK_S


def typical_steps(read: Callable[[], Iterable[Event]]) -> tuple[StepTimeline, ...]:
    """The typical step of every (link, strategy) with details; `read` is called twice, a log may exceed memory."""
    chosen = _choose(read())
    found: dict[tuple[str, str], dict[int, list[Event]]] = {key: defaultdict(list) for key in chosen}
    for event in read():
        iteration = chosen.get(_key(event), {}).get(event.rank)
        if iteration is not None and event.kind in _DRAWN and iteration.holds(event):
            found[_key(event)][event.rank].append(event)
    timelines: list[StepTimeline] = []
    for (link, strategy), iterations in chosen.items():
        lowest = iterations[min(iterations)]
        zero_s = min(iteration.begin_s for iteration in iterations.values())
        ranks = {rank: _spans(events, zero_s) for rank, events in sorted(found[link, strategy].items())}
        duration_s = lowest.end_s - lowest.begin_s
        timelines.append(
            StepTimeline(strategy=strategy, link=link, step=lowest.step, duration_s=duration_s, ranks=ranks)
        )
    return tuple(timelines)


def _key(event: Event) -> tuple[str, str]:
    return str(event.data.get("link")), str(event.data.get("strategy"))


def _choose(events: Iterable[Event]) -> dict[tuple[str, str], dict[int, _Iteration]]:
    """For every (link, strategy) the iterations of all ranks in its typical step."""
    iterations: dict[tuple[str, str], dict[int, dict[int, _Iteration]]] = defaultdict(lambda: defaultdict(dict))
    detailed: dict[tuple[str, str, int, str], list[float]] = defaultdict(list)
    for event in events:
        if event.kind == "iteration":
            iteration = _Iteration(event.rank, event.step, event.time_s, event.time_s + event.duration_s)
            iterations[_key(event)][event.rank][event.step] = iteration
        elif event.kind in ("forward", "backward"):
            detailed[(*_key(event), event.rank, event.kind)].append(event.time_s)
    for times in detailed.values():
        times.sort()
    chosen: dict[tuple[str, str], dict[int, _Iteration]] = {}
    for key, by_rank in iterations.items():
        rank = min(by_rank)

        def has_details(iteration: _Iteration, key: tuple[str, str] = key, rank: int = rank) -> bool:
            return all(_any_between(detailed[(*key, rank, kind)], iteration) for kind in ("forward", "backward"))

        in_order = sorted(by_rank[rank].values(), key=lambda iteration: iteration.begin_s)
        later = [iteration for iteration in in_order[len(in_order) // 2 :] if has_details(iteration)]
        candidates = later or [iteration for iteration in in_order if has_details(iteration)]
        if candidates:
            candidates.sort(key=lambda iteration: iteration.end_s - iteration.begin_s)
            step = candidates[(len(candidates) - 1) // 2].step
            chosen[key] = {rank: steps[step] for rank, steps in by_rank.items() if step in steps}
    return chosen


def _any_between(times: list[float], iteration: _Iteration) -> bool:
    place = bisect_left(times, iteration.begin_s - _SLACK_S)
    return place < len(times) and times[place] < iteration.end_s


def _spans(events: Iterable[Event], zero_s: float) -> tuple[Span, ...]:
    in_order = sorted(events, key=lambda event: event.time_s)
    exchanges = [event for event in in_order if event.kind == "exchange"]
    lanes = first_free_lanes((event.time_s, event.time_s + event.duration_s) for event in exchanges)
    lane_of = {id(event): lane for event, lane in zip(exchanges, lanes, strict=True)}
    return tuple(
        Span(
            kind=event.kind,
            start_s=event.time_s - zero_s,
            duration_s=event.duration_s,
            bucket=_count(event, "bucket"),
            wire_bytes=_count(event, "wire_bytes"),
            lane=lane_of.get(id(event), 0),
        )
        for event in in_order
    )


def _count(event: Event, name: str) -> int | None:
    value = event.data.get(name)
    return value if isinstance(value, int) else None
