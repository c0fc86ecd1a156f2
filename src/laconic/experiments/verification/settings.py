"""Every chosen setting has an effect: without it, an observation differs.

Parameters, bytes, buckets, slots and how far workers get ahead are observed. A setting may have an effect only with
more workers, with a larger model or in a later step: these are tried before it counts as having no effect. A setting
that acts on measurements of the network is not checked: all links between workers are alike here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from laconic.errors import AttachError
from laconic.experiments.verification.changes import Change, changes, comparisons
from laconic.experiments.verification.course import course
from laconic.experiments.verification.observation import Conditions, Observation, difference, noise, observe
from laconic.experiments.verification.outcome import Outcome, failed, not_applicable, passed
from laconic.experiments.verification.stage import Stage, on_threads
from laconic.experiments.verification.staleness import hold_race
from laconic.experiments.verification.trainee import Size, fitting_size, model_specs
from laconic.strategy import Strategy

_WIDER = (4, 5)
"""Numbers of workers with which every topology differs from every other."""
_RACE_STEPS = 16
_PAUSES_S = (0.3, 3.0)
_SLOW_S = 0.1
"""The delay of a slow worker's steps."""

_STEPS = 8
_TURNS = 4
"""Steps where ranks take turns."""
_LONG = 256
"""Steps of the longest cycle of rounds that is observed as a whole, where nothing shorter shows a difference."""
_LATEST = 2**30
"""The highest step number used here."""


def check(stage: Stage, strategy: Strategy) -> Outcome:
    """Compare training under each chosen setting with training under its default."""
    chosen = changes(strategy)
    if not chosen:
        return not_applicable("all settings have their defaults")
    eye = _Eye(stage)
    seen: list[str] = []
    silent: list[str] = []
    for change in chosen:
        if change.key in change.method(strategy).shows_on_links:
            seen.append(f"{change.text(strategy)}: not looked at, as it acts where links differ")
            continue
        effect = _effect(eye, strategy, change)
        text = change.text(strategy)
        if effect is None:
            silent.append(text)
        else:
            seen.append(f"{text}: {effect}")
    if silent:
        return failed(f"{', '.join(silent)}: without it everything is the same")
    return passed("; ".join(seen))


def _effect(eye: _Eye, strategy: Strategy, change: Change) -> str | None:
    """The effect of the setting, in words; None if there is none."""
    pairs = list(comparisons(_repeatable(strategy, change), change))
    if not pairs:
        return "without it the strategy is refused"
    for world_size in dict.fromkeys((eye.stage.world_size, *_WIDER)):
        for one, other in pairs:
            for look in eye.looks(one, other, change, world_size):
                told = look()
                if told is not None:
                    return told if world_size == eye.stage.world_size else f"{told} with {world_size} workers"
    return None


def _repeatable(strategy: Strategy, change: Change) -> Strategy:
    """The strategy without a bound of zero on the lead of workers, under which they cannot take turns."""
    if _lead(strategy) != 0:
        return strategy
    without = [other.undone(strategy) for other in changes(strategy) if other != change]
    return next((found for found in without if found is not None and _lead(found) != 0), strategy)


class _Eye:
    """Compares pairs of strategies in several ways, and caches its observations."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._seen: dict[tuple[Strategy, Conditions, bool], Observation] = {}

    def looks(
        self, one: Strategy, other: Strategy, change: Change, world_size: int
    ) -> Iterator[Callable[[], str | None]]:
        """Ways to distinguish two strategies, the cheapest first."""
        try:
            sizes: list[Size] = [fitting_size(one), fitting_size(other)]
        except AttachError:
            return  # one of them has no effect on any model here, and would be refused
        first, *later = _conditions(one, other, change, world_size, "large" if "large" in sizes else "small")
        yield lambda: self._runs(one, other, first)
        if world_size == self.stage.world_size and _lead(one) is not None and _lead(other) is not None:
            yield lambda: self._races(one, other)
        for under in later:
            yield lambda under=under: self._runs(one, other, under)
        if first.size == "small" and world_size == self.stage.world_size:
            yield lambda: self._runs(one, other, dataclasses.replace(first, size="large"))

    def _runs(self, one: Strategy, other: Strategy, under: Conditions) -> str | None:
        here = self._observe(one, under)
        floor = 0.0
        if not one.synchronization.barrier:
            floor = noise(here, self._observe(one, under, again=True))
        return difference(here, self._observe(other, under), floor)

    def _observe(self, strategy: Strategy, under: Conditions, *, again: bool = False) -> Observation:
        key = (strategy, under, again)
        if key not in self._seen:
            here = under.world_size == self.stage.world_size
            self._seen[key] = observe(self.stage, strategy, under) if here else self._elsewhere(strategy, under)
        return self._seen[key]

    def _elsewhere(self, strategy: Strategy, under: Conditions) -> Observation:
        """Observe with another number of workers: threads that rank 0 starts, while the others wait for the result."""
        mine: dict[str, object] = {}
        if self.stage.rank == 0:
            mine = on_threads(under.world_size, lambda stage: observe(stage, strategy, under))[0].as_fact()
        return Observation(**self.stage.gather(mine)[0])  # pyrefly: ignore[bad-argument-type] - as_fact made it

    def _races(self, one: Strategy, other: Strategy) -> str | None:
        """The difference in the lead of the fastest while one worker is stopped, in words; None if there is none."""
        for pause_s in _PAUSES_S:
            leads = [
                hold_race(self.stage, strategy, pause_s=pause_s, steps=_RACE_STEPS).lead for strategy in (one, other)
            ]
            if leads[0] != leads[1]:
                return f"{leads[0]} steps ahead instead of {leads[1]}"
        if all(strategy.synchronization.lead == _lead(strategy) for strategy in (one, other)):
            return None
        # Where the lead depends on the pace of workers, one has to be slow all the time.
        leads = [
            hold_race(self.stage, strategy, pause_s=_SLOW_S, steps=_RACE_STEPS, again=True).lead
            for strategy in (one, other)
        ]
        return f"{leads[0]} steps ahead of a slow worker instead of {leads[1]}" if leads[0] != leads[1] else None


def _lead(strategy: Strategy) -> int | None:
    """The lead that a worker may always have, if there is a bound."""
    rule = strategy.synchronization
    return None if rule.barrier else rule.sure_lead


def _conditions(one: Strategy, other: Strategy, change: Change, world_size: int, size: Size) -> list[Conditions]:
    """The steps to observe: ends of rounds and warm-ups, the beginning, and ends of chosen numbers of steps."""
    watched = [course(strategy, model_specs(size), world_size) for strategy in (one, other)]
    starts = [each.start for each in watched] + [0]
    if change.setting(one).kind == "count":
        values = [value for strategy in (one, other) if isinstance(value := change.value(strategy), int)]
        starts += [value - 2 for value in values if _STEPS - 2 < value < _LATEST]
    in_turns = not one.synchronization.barrier and _lead(one) != 0 and _lead(other) != 0
    steps = _TURNS if not one.synchronization.barrier else max(_STEPS, *(each.count for each in watched))
    found = [Conditions(world_size, size, start, steps, in_turns) for start in dict.fromkeys(starts)]
    cycle = max(strategy.synchronization.cycle for strategy in (one, other))
    if 1 < cycle <= _LONG:
        # The state of a rule after one round has its effect in the next.
        found.append(Conditions(world_size, size, starts[0], steps + cycle, in_turns))
    return found
