"""One strategy, one workload, one cluster: what a step costs, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from laconic.architecture import AllReduce
from laconic.cluster import Cluster
from laconic.collectives.choice import NATIVE
from laconic.core.hosts import Hosts
from laconic.core.moment import Moment
from laconic.core.plan import Plan
from laconic.errors import UsageError
from laconic.simulator.critical_path import because
from laconic.simulator.engine import Graph, Outcome
from laconic.simulator.interference import slowed
from laconic.simulator.lowering.drawing import Drawing, Inputs, RankClass
from laconic.simulator.lowering.gradients import GradientSteps
from laconic.simulator.lowering.rounds import LocalSteps, MixingSteps
from laconic.simulator.lowering.without_barrier import PairwiseSteps, PushPullSteps
from laconic.simulator.network import Network
from laconic.simulator.network.analytic import AnalyticNetwork
from laconic.simulator.noise import spread_of
from laconic.simulator.planning import settled, timing
from laconic.simulator.prediction import Prediction, Spread
from laconic.strategy import Strategy, as_strategy
from laconic.synchronization import Asynchronous, LocalUpdates
from laconic.workload import Workload

_STEPS = 6
_MOST_STEPS = 48
_STEADY = 1e-3
"""Two periods that differ by less are the same."""
_ROWS_UP_TO = 512
"""Ranks among which the rows of a collective are written down to count its bytes; beyond, all send as a ring does."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What makes workers differ from each other, and steps from steps."""

    slow: Mapping[int, float] | None = None
    """Ranks whose compute takes so many times as long."""
    noise_ratio: float = 0.0
    """Standard deviation of compute times from step to step and rank to rank, relative to their mean."""
    interference_ratio: float = 0.0
    """Share of its speed that compute loses while the network is busy."""
    optimizer_s: float = 0.0
    """What the optimizer's step takes; its work is not overlapped with communication."""
    seed: int = 0
    """Of the noise."""

    def __post_init__(self) -> None:
        for rank, factor in (self.slow or {}).items():
            if not 0 < factor < 1e6:
                raise UsageError(f"slow: rank {rank} must take between 0 and 1e6 times as long, got {factor:g}.")
        for name in ("noise_ratio", "interference_ratio"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 0 and below 1, got {getattr(self, name):g}.")
        if not 0 <= self.optimizer_s < 1e5:
            raise UsageError(f"optimizer_s must be at least 0 and below a day, got {self.optimizer_s:g}.")


@dataclass(frozen=True, eq=False)
class Simulation:
    """A prediction with everything it was read off from."""

    prediction: Prediction
    drawing: Drawing
    graph: Graph
    outcome: Outcome


def simulate(
    strategy: Strategy | str,
    workload: Workload,
    cluster: Cluster,
    *,
    workers: int | None = None,
    network: Network | None = None,
    conditions: Conditions | None = None,
) -> Prediction:
    """What a step of `strategy` costs on `workload` and `cluster`.

    workers: ranks, on the first devices of the cluster; all of them if left out.
    network: what moves cost; by formulas and the cluster's measured tables if left out.
    """
    return simulation(strategy, workload, cluster, workers=workers, network=network, conditions=conditions).prediction


def simulation(
    strategy: Strategy | str,
    workload: Workload,
    cluster: Cluster,
    *,
    workers: int | None = None,
    network: Network | None = None,
    conditions: Conditions | None = None,
) -> Simulation:
    """The same, with the tasks and times it was read off from."""
    conditions = conditions or Conditions()
    network = network or AnalyticNetwork(cluster)
    world_size = _world_size(cluster, workers)
    asked = as_strategy(strategy)
    inputs = Inputs(
        strategy=settled(asked, _hosts(cluster, world_size), network),
        workload=workload,
        world_size=world_size,
        network=network,
        classes=_classes(cluster, world_size, conditions.slow or {}),
        codec=next((codec for codec in workload.codecs if codec.compressor == str(asked.compression)), None),
        optimizer_s=conditions.optimizer_s,
        moment=Moment.steady(world_size),
    )
    candidates = [_steady(inputs, plans, conditions) for plans in _candidates(inputs)]
    best = min(candidates, key=lambda found: found.step_s)
    return _told(asked, inputs, cluster, conditions, best)


def _world_size(cluster: Cluster, workers: int | None) -> int:
    most = cluster.num_hosts * cluster.devices_per_host
    if workers is None:
        return most
    if not 1 <= workers <= most:
        raise UsageError(f"workers must be between 1 and {most}, the devices of the cluster, got {workers}.")
    return workers


def _hosts(cluster: Cluster, world_size: int) -> Hosts:
    each = cluster.devices_per_host
    return tuple(tuple(range(first, min(first + each, world_size))) for first in range(0, world_size, each))


def _classes(cluster: Cluster, world_size: int, slow: Mapping[int, float]) -> tuple[RankClass, ...]:
    for rank in slow:
        if not 0 <= rank < world_size:
            raise UsageError(f"slow: there is no rank {rank}; ranks are numbered 0 to {world_size - 1}.")
    speeds, each = cluster.speeds, cluster.devices_per_host
    found = Counter(slow.get(rank, 1.0) / (speeds[rank // each] if speeds else 1.0) for rank in range(world_size))
    return tuple(RankClass(size, slowdown) for slowdown, size in sorted(found.items()))


# -- plans -----------------------------------------------------------------------------------------------------


def first_plans(inputs: Inputs) -> list[Plan]:
    """The plan the runtime would make, or try first; one for each part that is exchanged at a time of its own."""
    return _candidates(inputs)[0]


def _candidates(inputs: Inputs) -> list[list[Plan]]:
    """The plans the runtime would try, or the one it would make."""
    strategy, workload = inputs.strategy, inputs.workload
    tensors = workload.tensors
    if not strategy.exchanges_gradients():
        return [strategy.plans(tensors, inputs.world_size)]
    schedule = strategy.scheduling
    times = timing(workload, tensors, inputs.network, inputs.world_size) if schedule.needs_timing else None
    return [
        [strategy.plan(tensors, inputs.world_size, timing=times, candidate=number)]
        for number in range(schedule.candidates)
    ]


# -- steps -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Steady:
    plans: list[Plan]
    drawing: Drawing
    graph: Graph
    outcome: Outcome
    period: int
    step_s: float
    """Of all classes together: the time in which as many samples are done as all ranks do in a step."""


def _steady(inputs: Inputs, plans: list[Plan], conditions: Conditions) -> _Steady:
    """Draw as many steps as it takes until they repeat."""
    period = period_of(inputs.strategy)
    num_periods = _STEPS if period == 1 else 3
    while True:
        drawing = Drawing(inputs)
        draw_steps(drawing, plans, num_periods * period)
        graph = drawing.builder.build()
        outcome = slowed(drawing, graph, conditions.interference_ratio)
        lengths = [_length(drawing, outcome, period, back) for back in (0, 1)]
        steady = abs(lengths[0] - lengths[1]) <= _STEADY * lengths[0]
        if steady or num_periods >= _MOST_STEPS:
            # Where steps do not repeat exactly, the mean over the second half is what they take.
            back = 0 if steady else num_periods // 2
            step_s = _mean(drawing, outcome, period * (back + 1))
            return _Steady(plans, drawing, graph, outcome, period, step_s)
        num_periods *= 2


def period_of(strategy: Strategy) -> int:
    """Steps after which everything repeats."""
    rule = strategy.synchronization
    return rule.period if isinstance(rule, LocalUpdates) else 1


def draw_steps(drawing: Drawing, plans: list[Plan], num_steps: int) -> None:
    """So many steps, as the seam of the runtime makes them that the strategy has."""
    strategy = drawing.inputs.strategy
    rule = strategy.synchronization
    first_step = 0
    if isinstance(rule, LocalUpdates):
        # A whole number of periods after the warm-up, so that the first step drawn is the first of a period.
        first_step = rule.period * (-(-rule.warmup // rule.period) + 1)
    if strategy.exchanges_gradients():
        steps = GradientSteps(drawing, plans[0])
    elif isinstance(rule, Asynchronous):
        servers = strategy.architecture.has_servers
        steps = PushPullSteps(drawing, plans[0], rule) if servers else PairwiseSteps(drawing, plans[0])
    elif strategy.architecture.scope == "neighbours":
        steps = MixingSteps(drawing, plans, first_step)
    else:
        assert isinstance(rule, LocalUpdates)
        steps = LocalSteps(drawing, plans, rule, first_step)
    for number in range(num_steps):
        steps.step(number)


def _length(drawing: Drawing, outcome: Outcome, period: int, back: int) -> float:
    """How long the last period took, or one before it, for the first class."""
    ends = drawing.step_ends
    last = len(ends) - 1 - back * period
    return float(outcome.end_s[ends[last][0]] - (outcome.end_s[ends[last - period][0]]))


def _mean(drawing: Drawing, outcome: Outcome, num_steps: int) -> float:
    """Per step, over the last ones; classes that go at their own speed together."""
    ends, inputs = drawing.step_ends, drawing.inputs
    last, before = np.array(ends[-1]), np.array(ends[-1 - num_steps])
    took_s = (outcome.end_s[last] - outcome.end_s[before]) / num_steps
    sizes = np.array([ranks.size for ranks in inputs.classes])
    return float(inputs.world_size / (sizes / took_s).sum()) if took_s.all() else 0.0


# -- telling ---------------------------------------------------------------------------------------------------


def _told(asked: Strategy, inputs: Inputs, cluster: Cluster, conditions: Conditions, found: _Steady) -> Simulation:
    drawing, outcome, workload = found.drawing, found.outcome, inputs.workload
    alone_s = sum(layer.forward_s + layer.backward_s for layer in workload.layers)
    slowest = max(ranks.slowdown for ranks in inputs.classes)
    end, first = drawing.step_ends[-1][0], drawing.step_ends[-1 - found.period][0]
    prediction = Prediction(
        strategy=str(asked),
        workload=workload.name,
        cluster=cluster.describe(),
        workers=inputs.world_size,
        step_s=found.step_s,
        compute_s=slowest * (alone_s + inputs.optimizer_s) if asked.synchronization.barrier else alone_s,
        samples_per_s=inputs.world_size * workload.batch / found.step_s if found.step_s else 0.0,
        wire_bytes=_wire_bytes(inputs, found.plans),
        busy={
            name: min(1.0, float(outcome.busy_s[resource]) / outcome.makespan_s if outcome.makespan_s else 0.0)
            for name, resource in drawing.parts.items()
        },
        because=because(drawing, outcome, float(outcome.end_s[first]), end),
        spread=_spread(found, conditions),
        plans=tuple(found.plans),
        warnings=tuple(_warnings(asked, inputs)),
    )
    return Simulation(prediction, drawing, found.graph, outcome)


def _spread(found: _Steady, conditions: Conditions) -> Spread | None:
    if not conditions.noise_ratio:
        return None
    return spread_of(
        found.drawing, found.graph, found.period, conditions.noise_ratio, np.random.default_rng(conditions.seed)
    )


def _wire_bytes(inputs: Inputs, plans: list[Plan]) -> int:
    strategy = inputs.strategy
    if isinstance(strategy.architecture, AllReduce) and inputs.world_size > _ROWS_UP_TO:
        strategy = replace(strategy, architecture=replace(strategy.architecture, algorithm=NATIVE, compress="all"))
    return sum(strategy.plan_bytes_per_step(plan, inputs.moment) for plan in plans)


def _warnings(asked: Strategy, inputs: Inputs) -> list[str]:
    found = inputs.network.warnings()
    if inputs.codec is None and not asked.compression.lossless:
        found.append(
            f'what it takes to encode and decode "{asked.compression}" is not known and counted as nothing. '
            f'Measure it: laconic profile SCRIPT:FUNCTION --compressor "{asked.compression}"'
        )
    return found
