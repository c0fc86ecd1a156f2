"""Which step of a strategy to draw: of the later half of its steps, the one of median duration.

Where most steps exchange nothing (local SGD and the like), only steps that exchange something are considered.

Schedules that hold updates back exchange the gradients of one step during the forward pass of the next. For these
schedules, a step is taken that directly follows another and is directly followed by one: the first step of a turn has
nothing to wait for, and after the last one the link is not observed.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from laconic.core.event import Event
from laconic.report.exposure import SLACK_S, end_of
from laconic.report.measures import strategy_of
from laconic.strategy import Strategy

Key = tuple[str, str]
"""Link and strategy."""
_TELLING = frozenset({"iteration", "forward", "backward", "exchange", "alone"})


@dataclass(frozen=True)
class Iteration:
    """When a rank made a step."""

    step: int
    begin_s: float
    end_s: float

    def precedes(self, other: Iteration | None) -> bool:
        """Whether the other one began where this one ended."""
        return other is not None and abs(other.begin_s - self.end_s) < SLACK_S


@dataclass(frozen=True)
class Chosen:
    """The step of one rank to draw, and the one after it if that followed at once."""

    here: Iteration
    following: Iteration | None
    alone_s: float | None
    """The median time of a forward and backward pass without communication; None if not measured."""

    def holds(self, event: Event) -> bool:
        """Whether the event happened in one of the two, at least in part."""
        until_s = self.here.end_s if self.following is None else self.following.end_s
        return event.time_s < until_s - SLACK_S and end_of(event) > self.here.begin_s + SLACK_S


def key_of(event: Event) -> Key:
    """The link and the strategy of an event."""
    return str(event.data.get("link")), str(event.data.get("strategy"))


def choose(events: Iterable[Event]) -> dict[Key, dict[int, Chosen]]:
    """The typical step of every link and strategy with details, by rank."""
    found: dict[Key, dict[int, _Steps]] = defaultdict(lambda: defaultdict(_Steps))
    for event in events:
        if event.kind in _TELLING:
            found[key_of(event)][event.rank].take(event)
    chosen: dict[Key, dict[int, Chosen]] = {}
    for key, unsorted in found.items():
        ranks = {rank: steps for rank, steps in sorted(unsorted.items()) if steps.iterations}
        strategy = strategy_of(key[1])
        step = next(iter(ranks.values())).typical(strategy) if ranks else None
        if step is not None:
            chosen[key] = {rank: steps.chosen(step) for rank, steps in ranks.items() if step in steps.iterations}
    return chosen


class _Steps:
    """The steps of one rank."""

    def __init__(self) -> None:
        self.iterations: dict[int, Iteration] = {}
        self._begins_s: Mapping[str, list[float]] = {"forward": [], "backward": [], "exchange": []}
        self._alone_s: list[float] = []

    def take(self, event: Event) -> None:
        if event.kind == "iteration":
            self.iterations[event.step] = Iteration(event.step, event.time_s, end_of(event))
        elif event.kind == "alone":
            self._alone_s.append(event.duration_s)
        else:
            self._begins_s[event.kind].append(event.time_s)

    def chosen(self, step: int) -> Chosen:
        here, following = self.iterations[step], self.iterations.get(step + 1)
        alone_s = statistics.median(self._alone_s) if self._alone_s else None
        return Chosen(here, following if here.precedes(following) else None, alone_s)

    def typical(self, strategy: Strategy | None) -> int | None:
        """The number of the typical step; None if no step has details."""
        for times in self._begins_s.values():
            times.sort()
        in_order = sorted(self.iterations.values(), key=lambda iteration: iteration.begin_s)
        later = in_order[len(in_order) // 2 :]
        tests: list[Callable[[Iteration], bool]] = [self._is_detailed]
        if strategy is not None and strategy.scheduling.defers:
            tests.insert(0, self._is_amid)
        if strategy is not None and strategy.synchronization.rounds_per_step() < 1:
            tests.insert(0, self._exchanges)
        for test in tests:
            for among in (later, in_order):
                candidates = sorted(filter(test, among), key=lambda iteration: iteration.end_s - iteration.begin_s)
                if candidates:
                    return candidates[(len(candidates) - 1) // 2].step
        return None

    def _begins(self, kind: str, iteration: Iteration) -> bool:
        """Whether an event of this kind began in it."""
        times = self._begins_s[kind]
        place = bisect_left(times, iteration.begin_s - SLACK_S)
        return place < len(times) and times[place] < iteration.end_s

    def _is_detailed(self, iteration: Iteration) -> bool:
        return self._begins("forward", iteration) and self._begins("backward", iteration)

    def _exchanges(self, iteration: Iteration) -> bool:
        return self._is_detailed(iteration) and self._begins("exchange", iteration)

    def _is_amid(self, iteration: Iteration) -> bool:
        before, after = self.iterations.get(iteration.step - 1), self.iterations.get(iteration.step + 1)
        if before is None or after is None or not (before.precedes(iteration) and iteration.precedes(after)):
            return False
        return all(map(self._is_detailed, (before, iteration, after)))
