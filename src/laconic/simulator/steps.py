"""Steps of a strategy, one after the other, until they repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from laconic.core.plan import Plan
from laconic.errors import UsageError
from laconic.simulator.engine import Graph, Outcome
from laconic.simulator.lowering.gradients import GradientSteps
from laconic.simulator.lowering.rounds import GossipSteps, LocalSteps
from laconic.simulator.lowering.sharded import ShardedSteps
from laconic.simulator.lowering.task_graph import Inputs, TaskGraph
from laconic.simulator.lowering.without_barrier import AsyncPairSteps, AsyncServerSteps
from laconic.strategy import Strategy

_STEPS = 6
_MOST_PERIODS = 48
_STEADY = 1e-3
"""Two periods that differ by less are the same."""
_LONGEST_PERIOD = 10_000


@dataclass(frozen=True, eq=False)
class Steady:
    """Steps that have come to repeat, and the stretch of time that stands for all that follow."""

    plans: Sequence[Plan]
    drawing: TaskGraph
    graph: Graph
    outcome: Outcome
    period: int
    first_s: float
    last_s: float
    step_s: float
    """The time in which as many samples are done as all ranks do in a step."""


def period_of(strategy: Strategy) -> int:
    """Steps after which everything repeats."""
    rule = strategy.synchronization
    if rule.interval > _LONGEST_PERIOD:
        raise UsageError(
            f"{rule.name}: periods of up to {_LONGEST_PERIOD} steps are simulated, got {rule.interval}. In longer ones "
            "communication takes next to nothing."
        )
    return rule.interval


def draw_steps(drawing: TaskGraph, plans: Sequence[Plan], num_steps: int) -> None:
    """So many steps, as the hooks of the runtime makes them that the strategy has."""
    strategy = drawing.inputs.strategy
    rule, plans = strategy.synchronization, list(plans)
    # A whole number of periods after the warm-up, so that the first step drawn is the first of a period.
    first_step = rule.interval * (-(-rule.warmup // rule.interval) + 1)
    if strategy.architecture.holds_shards:
        steps = ShardedSteps(drawing, plans[0])
    elif strategy.exchanges_gradients():
        steps = GradientSteps(drawing, plans[0])
    elif not rule.barrier:
        servers = strategy.architecture.has_servers
        steps = AsyncServerSteps(drawing, plans[0], rule) if servers else AsyncPairSteps(drawing, plans[0])
    elif strategy.architecture.scope == "neighbours":
        steps = GossipSteps(drawing, plans, first_step)
    else:
        steps = LocalSteps(drawing, plans, rule, first_step)
    for number in range(num_steps):
        steps.step(number)


def until_they_repeat(inputs: Inputs, plans: Sequence[Plan], run: Callable[[TaskGraph, Graph], Outcome]) -> Steady:
    """Draw and run as many steps as it takes until a period is like the one before, or a good many."""
    period = period_of(inputs.strategy)
    # Classes that go at paces of their own meet on the network in ever new ways.
    own_pace = len(inputs.classes) > 1 and not inputs.strategy.synchronization.barrier
    num_periods = _MOST_PERIODS if own_pace else _STEPS if period == 1 else 3
    while True:
        drawing = TaskGraph(inputs)
        draw_steps(drawing, plans, num_periods * period)
        graph = drawing.builder.build()
        outcome = run(drawing, graph)
        ended_s = np.array([outcome.end_s[ends] for ends in drawing.step_ends])[period - 1 :: period]
        lengths_s = np.diff(ended_s, axis=0)
        steady = not own_pace and np.allclose(lengths_s[-1], lengths_s[-2], rtol=_STEADY, atol=0.0)
        if steady or num_periods >= _MOST_PERIODS:
            # Where steps do not repeat exactly, the mean over the second half is what they take.
            last_s = float(ended_s[-1].min())
            first_s = float(ended_s[-2].min()) if steady else last_s / 2
            rate = period * _together(pace(ended_s, first_s, last_s), inputs)
            return Steady(plans, drawing, graph, outcome, period, first_s, last_s, 1 / rate if rate else 0.0)
        num_periods *= 2


def _together(paces: npt.NDArray[np.float64], inputs: Inputs) -> float:
    """That of all ranks: the slowest, for which the others wait sooner or later; or the mean of all, if nobody does."""
    if inputs.strategy.synchronization.barrier:
        return float(paces.min())
    return float(paces @ [ranks.size for ranks in inputs.classes]) / inputs.world_size


def pace(ended_s: npt.NDArray[np.float64], first_s: float, last_s: float) -> npt.NDArray[np.float64]:
    """Per second between two moments, how often each column's periods end; `ended_s` has a line for each period."""
    if last_s <= first_s:
        return np.zeros(ended_s.shape[1])
    numbers = np.arange(len(ended_s) + 1)
    within = [np.diff(np.interp([first_s, last_s], [0.0, *column], numbers))[0] for column in ended_s.T]
    return np.array(within) / (last_s - first_s)
