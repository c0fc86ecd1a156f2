"""Simulates steps of a strategy until they repeat."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from laconic.core.moment import Moment
from laconic.core.plan import Plan
from laconic.errors import UsageError
from laconic.simulator.engine import Graph, Outcome
from laconic.simulator.lowering.gradients import GradientSteps
from laconic.simulator.lowering.rounds import GossipSteps, LocalSteps
from laconic.simulator.lowering.sharded import ShardedSteps
from laconic.simulator.lowering.task_graph import Inputs, TaskGraph
from laconic.simulator.lowering.without_barrier import AsyncPairSteps, AsyncServerSteps
from laconic.strategy import Strategy

Run = Callable[[TaskGraph, Graph], Outcome]
_STEPS = 6
_MOST_PERIODS = 48
_STEADY = 1e-3
"""Two periods that differ by less count as equal."""
_LONGEST_PERIOD = 10_000


@dataclass(frozen=True, eq=False)
class Steady:
    """Steps that repeat, and the interval that represents all that follow."""

    plans: Sequence[Plan]
    task_graph: TaskGraph
    graph: Graph
    outcome: Outcome
    period: int
    first_s: float
    last_s: float
    step_s: float
    """The time in which all ranks together process the samples of one step."""


def period_of(strategy: Strategy) -> int:
    """Steps after which everything repeats."""
    rule = strategy.synchronization
    if rule.cycle > _LONGEST_PERIOD:
        raise UsageError(
            f"{rule.name}: periods of up to {_LONGEST_PERIOD} steps are simulated, got {rule.cycle}. In longer ones "
            "communication takes next to nothing."
        )
    return rule.cycle


def draw_steps(task_graph: TaskGraph, plans: Sequence[Plan], num_steps: int) -> None:
    """Add this many steps, as the runtime's hooks for the strategy make them."""
    strategy = task_graph.inputs.strategy
    rule, plans = strategy.synchronization, list(plans)
    # A whole number of periods after the warm-up, so that the first step drawn is the first of a period.
    first_step = rule.cycle * (-(-rule.warmup // rule.cycle) + 1)
    if strategy.architecture.holds_shards:
        steps = ShardedSteps(task_graph, plans[0])
    elif strategy.exchanges_gradients():
        late = Moment.steady(task_graph.inputs.world_size).step
        steps = GradientSteps(task_graph, plans[0], late - late % rule.cycle)
    elif not rule.barrier:
        servers = strategy.architecture.has_servers
        steps = (
            AsyncServerSteps(task_graph, plans[0], rule, first_step)
            if servers
            else AsyncPairSteps(task_graph, plans[0])
        )
    elif strategy.mixes_parameters():
        steps = GossipSteps(task_graph, plans, first_step)
    else:
        steps = LocalSteps(task_graph, plans, rule, first_step)
    for number in range(num_steps):
        steps.step(number)


def _own_pace(inputs: Inputs) -> bool:
    """Whether classes of ranks run at different paces, so that their exchanges never repeat exactly."""
    return len(inputs.classes) > 1 and not inputs.strategy.synchronization.barrier


def _first_periods(inputs: Inputs) -> int:
    """The number of steps simulated at first."""
    return _MOST_PERIODS if _own_pace(inputs) else _STEPS if period_of(inputs.strategy) == 1 else 3


def until_they_repeat(inputs: Inputs, plans: Sequence[Plan], run: Run) -> Steady:
    """Simulate steps until a period equals the previous one, or up to a limit."""
    period, own_pace, num_periods = period_of(inputs.strategy), _own_pace(inputs), _first_periods(inputs)
    while True:
        task_graph = TaskGraph(inputs)
        draw_steps(task_graph, plans, num_periods * period)
        graph = task_graph.builder.build()
        outcome = run(task_graph, graph)
        found = _steady(plans, task_graph, graph, outcome, own_pace=own_pace, last=num_periods >= _MOST_PERIODS)
        if found is not None:
            return found
        num_periods *= 2


def on_other_links(found: Steady, inputs: Inputs, run: Run) -> Steady | None:
    """The same steps on faster or slower links; None if their tasks would differ."""
    before = found.task_graph
    if len(before.step_ends) != _first_periods(inputs) * found.period:
        return None  # with more than the first steps, results could differ slightly
    durations_s = before.prices.durations_s(
        found.graph.duration_s, inputs.network, inputs.world_size, inputs.num_servers
    )
    if durations_s is None or any(label.launch_s for label in before.labels):
        return None
    task_graph, graph = copy.copy(before), replace(found.graph, duration_s=durations_s)
    task_graph.inputs = inputs
    return _steady(found.plans, task_graph, graph, run(task_graph, graph), own_pace=_own_pace(inputs), last=False)


def _steady(
    plans: Sequence[Plan], task_graph: TaskGraph, graph: Graph, outcome: Outcome, *, own_pace: bool, last: bool
) -> Steady | None:
    """The steady steps; None if they do not repeat yet and more can be simulated."""
    inputs = task_graph.inputs
    period = period_of(inputs.strategy)
    ended_s = np.array([outcome.end_s[ends] for ends in task_graph.step_ends])[period - 1 :: period]
    lengths_s = np.diff(ended_s, axis=0)
    steady = not own_pace and np.allclose(lengths_s[-1], lengths_s[-2], rtol=_STEADY, atol=0.0)
    if not steady and not last:
        return None
    # Where steps do not repeat exactly, the mean over the second half counts.
    last_s = float(ended_s[-1].min())
    first_s = float(ended_s[-2].min()) if steady else last_s / 2
    rate = period * _together(pace(ended_s, first_s, last_s), inputs)
    return Steady(plans, task_graph, graph, outcome, period, first_s, last_s, 1 / rate if rate else 0.0)


def _together(paces: npt.NDArray[np.float64], inputs: Inputs) -> float:
    """The pace of all ranks: the slowest, for which the others wait; or, without a barrier, the mean.

    Ranks whose gradients are dropped count as standing still.
    """
    if inputs.strategy.synchronization.barrier:
        return float(paces.min())
    return float(paces @ inputs.counted) / inputs.world_size


def pace(ended_s: npt.NDArray[np.float64], first_s: float, last_s: float) -> npt.NDArray[np.float64]:
    """The rate at which each column's periods end between two times; `ended_s` has a row per period."""
    if last_s <= first_s:
        return np.zeros(ended_s.shape[1])
    numbers = np.arange(len(ended_s) + 1)
    within = [np.diff(np.interp([first_s, last_s], [0.0, *column], numbers))[0] for column in ended_s.T]
    return np.array(within) / (last_s - first_s)
