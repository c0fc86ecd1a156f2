"""A worker that is far ahead of the slowest waits where there is a bound, and only there.

One worker is stopped before its first step. Which others continue meanwhile, and how far, is judged by the order of
events on one clock, not by reports of servers.
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
"""How long the slowest is stopped: longer if the others have not reached their bound."""
_MORE = 3
"""Steps beyond the bound."""
_FREE = 8
"""Steps where there is no bound."""
_MOST = 1000
"""A larger bound would take too long to reach."""


def check(stage: Stage, strategy: Strategy) -> Outcome:
    """Stop one worker and compare how far the others get with the bound of the strategy."""
    rule = strategy.synchronization
    if rule.barrier:
        return not_applicable(f"with {rule.name} every worker takes part in every exchange")
    if stage.world_size == 1:
        return not_applicable("one worker is never ahead of another")
    if rule.lead is not None and rule.lead > _MOST:
        return not_applicable(f"a bound of {rule.lead} steps is beyond the {_MOST} that are tried here")
    return _watch(stage, strategy, rule.lead, rule.sure_lead)


def _watch(stage: Stage, strategy: Strategy, bound: int | None, sure: int | None) -> Outcome:
    """sure: how far ahead a worker must get; bound: the most it may; None: no worker waits for a single slow one."""
    steps = _FREE if bound is None else bound + _MORE
    may_lead = steps if bound is None else bound
    must_lead = steps if sure is None or bound is None else sure
    told = ""
    for pause_s in _PAUSES_S:
        race = hold_race(stage, strategy, pause_s=pause_s, steps=steps)
        told = f"the fastest came {race.lead} steps ahead of one that was stopped for {pause_s:g} s"
        if race.lead > may_lead:
            return failed(f"{told}; the bound is {bound}")
        # Before the bound is reached the two may differ: a step may have begun and not yet have reached the servers.
        if bound is not None and (race.told_lead > bound or (race.lead >= must_lead and race.told_lead < must_lead)):
            return failed(f"{told}; session.lead says {race.told_lead}, the bound is {bound}")
        if race.lead >= must_lead:
            return passed(f"{told}, and waited there" if bound is not None else f"{told}: no worker waits")
    return failed(f"{told}, and could not continue; {must_lead} are allowed")


@dataclass(frozen=True)
class Race:
    """The progress of workers while one was stopped."""

    lead: int
    """The most steps that one worker had finished beyond those that the slowest had begun."""
    told_lead: int
    """The largest session.lead."""


def hold_race(stage: Stage, strategy: Strategy, *, pause_s: float, steps: int, again: bool = False) -> Race:
    """Make `steps` steps on all ranks, the last rank after a pause; again: with a pause before every step."""
    trainee = Trainee(stage, strategy)
    begun: list[float] = []
    ended: list[float] = []
    with trainee.attach() as session:
        stage.meet()
        for step in range(steps):
            if stage.rank == stage.world_size - 1 and (again or not step):
                time.sleep(pause_s)
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
