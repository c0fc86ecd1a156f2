"""Which step of a strategy to draw: of the later half of its steps, the one of median duration.

Schedules that hold updates back exchange the gradients of one step during the forward pass of the next. Of theirs a
step is taken that follows another one and is followed by one: a turn's first has nothing to wait for, and after its
last nobody watches the link.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from laconic.core.event import Event
from laconic.report.exposure import SLACK_S, end_of
from laconic.report.measures import strategy_of

Key = tuple[str, str]
"""Link and strategy."""


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
    """The median time of a forward and backward pass without communication; None if nobody measured."""

    def holds(self, event: Event) -> bool:
        """Whether the event happened in one of the two, at least in part."""
        until_s = self.here.end_s if self.following is None else self.following.end_s
        return event.time_s < until_s - SLACK_S and end_of(event) > self.here.begin_s + SLACK_S


def key_of(event: Event) -> Key:
    """Whose event it is."""
    return str(event.data.get("link")), str(event.data.get("strategy"))


def choose(events: Iterable[Event]) -> dict[Key, dict[int, Chosen]]:
    """The typical step of every link and strategy with details, by rank."""
    found: dict[Key, dict[int, _Steps]] = defaultdict(lambda: defaultdict(_Steps))
    for event in events:
        if event.kind in ("iteration", "forward", "backward", "alone"):
            found[key_of(event)][event.rank].take(event)
    chosen: dict[Key, dict[int, Chosen]] = {}
    for key, unsorted in found.items():
        ranks = {rank: steps for rank, steps in sorted(unsorted.items()) if steps.iterations}
        step = next(iter(ranks.values())).typical(amid=_goes_on(key[1])) if ranks else None
        if step is not None:
            chosen[key] = {rank: steps.chosen(step) for rank, steps in ranks.items() if step in steps.iterations}
    return chosen


def _goes_on(text: str) -> bool:
    """Whether exchanges of one step usually end in the next."""
    strategy = strategy_of(text)
    return strategy is not None and strategy.scheduling.defers


class _Steps:
    """The steps of one rank."""

    def __init__(self) -> None:
        self.iterations: dict[int, Iteration] = {}
        self._begins_s: Mapping[str, list[float]] = {"forward": [], "backward": []}
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

    def typical(self, *, amid: bool) -> int | None:
        """The number of the typical step; if `amid`, one with neighbours where there is one."""
        for times in self._begins_s.values():
            times.sort()
        in_order = sorted(self.iterations.values(), key=lambda iteration: iteration.begin_s)
        later = in_order[len(in_order) // 2 :]
        tests: Sequence[Callable[[Iteration], bool]] = [self._is_amid, self._is_detailed][not amid :]
        for test in tests:
            for among in (later, in_order):
                candidates = sorted(filter(test, among), key=lambda iteration: iteration.end_s - iteration.begin_s)
                if candidates:
                    return candidates[(len(candidates) - 1) // 2].step
        return None

    def _is_detailed(self, iteration: Iteration) -> bool:
        """Whether it is known when its passes began."""
        for times in self._begins_s.values():
            place = bisect_left(times, iteration.begin_s - SLACK_S)
            if place == len(times) or times[place] >= iteration.end_s:
                return False
        return True

    def _is_amid(self, iteration: Iteration) -> bool:
        before, after = self.iterations.get(iteration.step - 1), self.iterations.get(iteration.step + 1)
        if before is None or after is None or not (before.precedes(iteration) and iteration.precedes(after)):
            return False
        return all(map(self._is_detailed, (before, iteration, after)))
