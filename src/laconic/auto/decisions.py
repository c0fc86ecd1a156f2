"""The decisions of rank 0: when to watch, when to plan, which strategy to use, and when to leave it again.

The first steps only warm up. Then DDP's steps are timed, then the layers, and a search starts. Its best strategy is
tried, after a window that does not count; if another one is predicted to be faster, by GAIN, than the tried one was
measured to be, that one is tried too. The fastest as measured is used, or left if it is not faster than DDP by GAIN. If
steps later become longer or shorter by DRIFT, everything begins again with timing the layers. Where that does not make
steps longer, they are watched from the first sign of drift.

Steps are judged by the median of a window. Where replicas exchange something only after some steps, most steps are
short and a few are long, so there the mean over whole cycles counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from laconic.auto.planning import Decision, Findings, Option, Planner, Search
from laconic.runtime.change import owes_gradients
from laconic.strategy import Strategy
from laconic.units import human_seconds

WINDOW_STEPS = 10
"""Steps of a window, where they take less than WINDOW_S together."""
FEWEST_STEPS, WINDOW_S = 4, 5.0
"""Where steps take longer, a window has as many as fit into this time, but no fewer than these."""
GAIN = 0.02
DRIFT = 0.25
DRIFTED = 2
"""Consecutive looks in which drift must be seen: one may be chance."""
REST_STEPS = 50
"""Steps after a decision in which nothing is decided again unless steps take CLEAR longer or shorter."""
CLEAR = 0.5
TRIED = 2
"""Looks after which a strategy is judged."""


@dataclass
class Order:
    """What all ranks do after a meeting."""

    do: str = ""
    strategy: str = ""
    reason: str = ""
    steps: int = WINDOW_STEPS
    """Steps until they meet again."""


def window_steps(step_s: float) -> int:
    """Steps of a window, where one takes this long."""
    return max(FEWEST_STEPS, min(WINDOW_STEPS, int(WINDOW_S / max(step_s, WINDOW_S / WINDOW_STEPS))))


def look_steps(strategy: Strategy, window: int = WINDOW_STEPS) -> int:
    """Steps that are judged together: a window, or, where steps differ within a cycle, whole cycles of that length."""
    cycle = strategy.synchronization.cycle
    return cycle * math.ceil(window / cycle) if cycle > 1 else window


def typical_s(times_s: Sequence[float], strategy: Strategy) -> float:
    """The typical time of these steps under this strategy."""
    return statistics.median(times_s) if strategy.synchronization.cycle == 1 else statistics.fmean(times_s)


class Lead:
    """Rank 0's side: its observations, and the decisions that follow from them."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self.watches_freely = True
        """Whether steps take no longer while layers are watched."""
        self._next: Callable[[float, Strategy], Order] = self._warm
        self._times_s: list[float] = []
        """Times of the steps since the last look."""
        self._window = FEWEST_STEPS
        """Steps between two meetings at present."""
        self._looks = 1
        """How many looks the last one counts for: two where a cycle is as long as two windows of short steps."""
        self._meanwhile_s: list[float] = []
        """Times of the steps since the last search began."""
        self._ddp_s = 0.0
        self._usual_s = 0.0
        """The time of a step when the last decision was made, or when the steps were found to have changed."""
        self._at_work = str(Strategy())
        """The strategy under which the steps were found to have changed."""
        self._search: Search | None = None
        self._decision: Decision | None = None
        self._given_up: list[str] = []
        self._problem = ""
        self._rested = 0
        self._drifted = 0
        """Consecutive looks at which steps took longer or shorter than usual."""
        self._suspects = False
        """Whether layers are watched because the last steps have drifted."""
        self._tried_s: list[float] = []
        """Step times of the strategy that is being tried."""
        self._option = Option(str(Strategy()), 0.0)
        """The strategy that is being tried, as predicted."""
        self._others: list[Option] = []
        """Strategies that may be tried after it, as predicted."""
        self._tried: list[Option] = []
        """Strategies that were tried after the last search, as measured."""

    def next(self, times_s: Sequence[float], strategy: Strategy) -> Order:
        """What all ranks do now; `times_s`: the time of each step since the last meeting."""
        self._times_s += times_s
        self._rested += len(times_s)
        judges = self._next not in (self._warm, self._watched, self._searching)
        look = look_steps(strategy, self._window)
        if judges and len(self._times_s) < look:
            return Order(steps=self._window)
        step_s, self._times_s = typical_s(self._times_s[-look:], strategy), []
        self._looks, warms = max(1, min(2, look // WINDOW_STEPS)), self._next == self._warm
        if self._next == self._searching:
            self._meanwhile_s += times_s
        order = self._next(step_s, strategy)
        self._window = window_steps(step_s)
        if warms:
            # As many steps as a window are to warm up, of which the last of the next window are not.
            return replace(order, steps=2 * self._window - FEWEST_STEPS)
        return replace(order, steps=FEWEST_STEPS if self._next == self._searching else self._window)

    def close(self) -> None:
        """Nothing more will be asked."""
        self._stop()
        self._planner.stop()

    def _stop(self) -> None:
        if self._search is not None:
            self._search.stop()
            self._search = None

    def gave_up(self, problem: str) -> None:
        """No plan can be made from the measurements."""
        self._problem = problem

    def refused(self, strategy: str) -> None:
        """The strategy of the last order cannot work on this model: plan again without it."""
        self._given_up.append(strategy)
        self._next = self._again

    def search(self, findings: Findings) -> None:
        """Start a search for a strategy."""
        self._search = self._planner.start(findings)

    @property
    def seen(self) -> tuple[str, float] | None:
        """DDP's strategy and its step time; if not measured since the last drift, those of the strategy at work."""
        if self._ddp_s:
            return str(Strategy()), self._ddp_s
        return (self._at_work, self._usual_s) if self._usual_s else None

    @property
    def given_up(self) -> tuple[str, ...]:
        """Strategies that were tried here and not faster, or that could not be used."""
        return tuple(self._given_up)

    # -- one after the other -----------------------------------------------------------------------------------

    def _warm(self, step_s: float, strategy: Strategy) -> Order:
        self._next = self._ddp
        return Order()

    def _ddp(self, step_s: float, strategy: Strategy) -> Order:
        self._ddp_s = self._usual_s = step_s
        return self._again(step_s, strategy)

    def _again(self, step_s: float, strategy: Strategy) -> Order:
        self._drifted, self._next = 0, self._watched
        return self._watch()

    def _watch(self) -> Order:
        self._planner.prepare()
        return Order("watch")

    def _watched(self, step_s: float, strategy: Strategy) -> Order:
        self._next, self._meanwhile_s = self._searching, []
        return Order("measure")

    def _searching(self, step_s: float, strategy: Strategy) -> Order:
        if self._search is None:
            return self._stay(strategy, f"Nothing was planned: {self._problem}.")
        found = self._search.decision()
        if found is None:
            return Order()
        self._stop()
        last_s = [self._meanwhile_s[-self._window :], self._meanwhile_s[-2 * self._window : -self._window]]
        if strategy == Strategy() and all(
            len(times_s) == self._window and _differ(statistics.median(times_s), self._ddp_s) for times_s in last_s
        ):
            # Links are no longer what they were when they were probed.
            return self._anew(statistics.median(last_s[0]), strategy)
        if isinstance(found, str):
            return self._stay(strategy, f"Nothing was planned: {found}.")
        self._decision, self._ddp_s = found, self._ddp_s or found.ddp_step_s
        best, self._others, self._tried = found.best, list(found.others), []
        if best.strategy == str(strategy):
            return self._stay(strategy, found.reason)
        if best.strategy == str(Strategy()):
            return self._leave(found.reason)
        if owes_gradients(strategy) and not Strategy.parse(best.strategy).exchanges_gradients():
            self._next = self._on_the_way
            reason = f'On the way to "{best.strategy}": first, gradients that are still owed are sent.'
            return Order("use", str(Strategy()), reason)
        return self._try(best, found.reason)

    def _on_the_way(self, step_s: float, strategy: Strategy) -> Order:
        assert self._decision is not None
        self._ddp_s = step_s
        return self._try(self._decision.best, self._decision.reason)

    def _try(self, option: Option, reason: str) -> Order:
        self._option, self._tried_s, self._next = option, [], self._settling
        return Order("use", option.strategy, reason)

    def _settling(self, step_s: float, strategy: Strategy) -> Order:
        self._next = self._trying  # the first steps after a change also pay for it
        return Order()

    def _trying(self, step_s: float, strategy: Strategy) -> Order:
        self._tried_s.append(step_s)
        if len(self._tried_s) * self._looks < TRIED:
            return Order()
        self._tried.append(self._option._replace(strategy=str(strategy), step_s=min(self._tried_s)))
        best = min(self._tried, key=lambda one: one.cost_s)
        while self._others:
            other = self._others.pop(0)
            if other.cost_s < (1 - GAIN) * best.cost_s:
                took, due = human_seconds(self._tried[-1].cost_s), human_seconds(other.cost_s)
                told = f"The last one takes {took} for the progress of one step of DDP"
                return self._try(other, f"{told}; this one is predicted to take {due}.")
        self._usual_s = best.step_s
        self._decided()
        if best.cost_s > (1 - GAIN) * self._ddp_s:
            self._given_up += [one.strategy for one in self._tried]
            told = f"{human_seconds(best.step_s)} a step, not {GAIN:.0%} less than DDP's {human_seconds(self._ddp_s)}"
            if best.steps_ratio > 1:
                told += f", and {best.steps_ratio:.3g} times the steps for DDP's loss"
            return self._leave(f"As measured it gains nothing clear: {told}.")
        if best.strategy == str(strategy):
            return Order()
        return Order("use", best.strategy, f"Of those tried it takes least: {human_seconds(best.step_s)} a step.")

    def _leave(self, reason: str) -> Order:
        """Back to DDP's strategy; its step is looked at once it has warmed up."""
        self._next = self._back
        return Order("use", str(Strategy()), reason)

    def _back(self, step_s: float, strategy: Strategy) -> Order:
        self._next = self._noted
        return Order()

    def _noted(self, step_s: float, strategy: Strategy) -> Order:
        if _differ(step_s, self._ddp_s):
            return self._anew(step_s, strategy)  # the strategy was judged by steps that DDP no longer makes
        self._usual_s = self._ddp_s = step_s
        self._decided()
        return Order()

    def _stay(self, strategy: Strategy, reason: str) -> Order:
        self._problem = ""
        self._decided()
        return Order("use", str(strategy), reason)

    def _decided(self) -> None:
        self._rested, self._drifted, self._next = 0, 0, self._steady

    def _steady(self, step_s: float, strategy: Strategy) -> Order:
        differs = _differ(step_s, self._usual_s)
        self._drifted = self._drifted + self._looks if differs else 0
        if self._rested < REST_STEPS and not _differ(step_s, self._usual_s, CLEAR):
            return Order()
        if self._drifted >= DRIFTED:
            watched, self._suspects = self._suspects, False
            order = self._anew(step_s, strategy)
            return self._watched(step_s, strategy) if watched else order
        if differs == self._suspects or not self.watches_freely:
            return Order()
        self._suspects = differs
        return self._watch() if differs else Order("unwatch")

    def _anew(self, step_s: float, strategy: Strategy) -> Order:
        """No earlier finding holds any more: begin again."""
        # DDP's own step is not seen now, unless it is the one at work: as predicted, it will do.
        self._at_work = str(strategy)
        self._ddp_s = step_s if strategy == Strategy() else 0.0
        self._given_up, self._usual_s = [], step_s
        return self._again(step_s, strategy)


def _differ(step_s: float, other_s: float, by: float = DRIFT) -> bool:
    """Whether one time is longer than the other by the share `by`; no time differs from an unknown one (0)."""
    return other_s > 0 and max(step_s, other_s) > (1 + by) * min(step_s, other_s)
