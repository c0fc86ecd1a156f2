"""A worker that is far ahead of the slowest waits where there is a bound, and only there.

One worker stands still before its first step. Who goes on meanwhile, and how far, is judged by the order of events on
one clock, not by what servers say about it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass

from laconic.experiments.verification.outcome import Outcome, failed, not_applicable, passed
from laconic.experiments.verification.stage import Stage
from laconic.experiments.verification.trainee import Trainee
from laconic.strategy import Strategy

_PAUSES_S = (0.1, 0.5, 3.0, 15.0)
"""How long the slowest stands still: longer where the others have not come as far as they may."""
_MORE = 3
"""Steps beyond the bound."""
_FREE = 8
"""Steps where there is no bound."""
_MOST = 1000
"""A larger bound would take too long to reach."""


def check(stage: Stage, strategy: Strategy) -> Outcome:
    """See the module."""
    rule = strategy.synchronization
    if rule.barrier:
        return not_applicable(f"with {rule.name} everybody takes part in every round")
    if stage.world_size == 1:
        return not_applicable("one worker is never ahead of another")
    if rule.lead is not None and rule.lead > _MOST:
        return not_applicable(f"a bound of {rule.lead} steps is beyond the {_MOST} that are tried here")
    return _watch(stage, strategy, rule.lead)


def _watch(stage: Stage, strategy: Strategy, bound: int | None) -> Outcome:
    steps = _FREE if bound is None else bound + _MORE
    may_lead = steps if bound is None else bound
    told = ""
    for pause_s in _PAUSES_S:
        race = hold_race(stage, strategy, pause_s=pause_s, steps=steps)
        told = f"the fastest came {race.lead} steps ahead of one that stood still {pause_s:g} s"
        if race.lead > may_lead:
            return failed(f"{told}; the bound is {bound}")
        # Before the bound is reached the two may differ: a step can have begun and not yet have come to the servers.
        if bound is not None and (race.told_lead > bound or (race.lead == bound and race.told_lead < bound)):
            return failed(f"{told}; session.lead says {race.told_lead}, the bound is {bound}")
        if race.lead == may_lead:
            return passed(f"{told}, and waited there" if bound is not None else f"{told}: nobody waits")
    return failed(f"{told}, and could not go on; {may_lead} are allowed")


@dataclass(frozen=True)
class Race:
    """How far workers came while one stood still."""

    lead: int
    """The most steps one had finished beyond those the slowest had begun."""
    told_lead: int
    """The largest session.lead."""


def hold_race(stage: Stage, strategy: Strategy, *, pause_s: float, steps: int) -> Race:
    """Let all make `steps` steps, the last rank after a pause."""
    trainee = Trainee(stage, strategy)
    begun: list[float] = []
    ended: list[float] = []
    with trainee.attach() as session:
        stage.meet()
        if stage.rank == stage.world_size - 1:
            time.sleep(pause_s)
        for step in range(steps):
            trainee.backward(step)
            # One clock for all processes of a machine.
            begun.append(time.monotonic())
            trainee.optimizer.step()
            ended.append(time.monotonic())
        told = session.lead
        stage.meet()
    all_begun = stage.gather(begun)
    lead = max(
        count - min(bisect_right(other, at) for other in all_begun)
        for row in stage.gather(ended)
        for count, at in enumerate(row, start=1)
    )
    return Race(lead, max(stage.gather(told)))
