"""One strategy, one workload, one cluster: the cost of a step, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from laconic.cluster import Cluster
from laconic.core.hosts import Hosts
from laconic.core.moment import Moment
from laconic.errors import UsageError
from laconic.simulator.critical_path import because
from laconic.simulator.engine import Graph, Outcome
from laconic.simulator.interference import slowed
from laconic.simulator.lowering.task_graph import Inputs, RankClass, TaskGraph
from laconic.simulator.network import Network
from laconic.simulator.network.analytic import AnalyticNetwork
from laconic.simulator.network.pair_rates import pair_rates
from laconic.simulator.noise import spread_of
from laconic.simulator.planning import candidates, settled
from laconic.simulator.prediction import Prediction, Spread
from laconic.simulator.steps import Run, Steady, on_other_links, until_they_repeat
from laconic.simulator.traffic import sent_bytes
from laconic.strategy import Strategy, as_strategy
from laconic.workload import CodecCost, Workload

_ROWS_UP_TO = 512
"""Ranks up to which the bytes of a collective are counted from its rows; beyond, formulas count them."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Differences between workers and between steps."""

    slow: Mapping[int, float] | None = None
    """Slow ranks, each with the factor on its compute time."""
    noise_ratio: float = 0.0
    """Standard deviation of compute times from step to step and rank to rank, relative to their mean."""
    interference_ratio: float = 0.0
    """Share of its speed that compute loses while the network is busy."""
    optimizer_s: float = 0.0
    """The time of the optimizer's step, which is not overlapped with communication."""
    seed: int = 0
    """The seed of the noise."""

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
    """A prediction with the tasks and times behind it."""

    prediction: Prediction
    task_graph: TaskGraph
    graph: Graph
    outcome: Outcome
    tried: tuple[Steady, ...] = ()
    """The steps under each plan that the runtime would try."""


def simulate(
    strategy: Strategy | str,
    workload: Workload,
    cluster: Cluster,
    *,
    workers: int | None = None,
    network: Network | None = None,
    conditions: Conditions | None = None,
    like: Simulation | None = None,
) -> Simulation:
    """The cost of a step of `strategy` on `workload` and `cluster`, with the tasks and times behind it.

    workers: ranks, on the first devices of the cluster; all of them if left out.
    network: the cost of moves; formulas and the cluster's measured tables if left out.
    like: a simulation that differs only in the speed of links; where its tasks are the same, they are reused.
    """
    conditions = conditions or Conditions()
    network = network or AnalyticNetwork(cluster)
    world_size, slow = _world_size(cluster, workers), conditions.slow or {}
    asked = as_strategy(strategy)
    if asked.synchronization.deadline_s is not None:
        raise UsageError(
            f'simulate: rounds of "{asked}" end by time, after different numbers of steps on different ranks. Simulate '
            "it with the period that you expect instead."
        )
    slowdowns, hosts = _slowdowns(cluster, world_size, slow), hosts_of(range(world_size), cluster)
    inputs = Inputs(
        strategy=settled(asked, hosts, network, lambda: pair_rates(cluster, range(world_size))),
        workload=workload,
        world_size=world_size,
        network=network,
        classes=tuple(RankClass(size, slowdown) for slowdown, size in sorted(Counter(slowdowns).items())),
        codec=codec_of(workload, asked),
        hosts=hosts,
        optimizer_s=conditions.optimizer_s,
        moment=Moment.steady(world_size),
        first_slowdown=slowdowns[0],
    )

    def run(task_graph: TaskGraph, graph: Graph) -> Outcome:
        return slowed(task_graph, graph, conditions.interference_ratio)

    # Where bytes slow compute down, tasks depend on the speed of links.
    found = None if like is None or conditions.interference_ratio else _on_other_links(like, inputs, run)
    if found is None:
        found = [until_they_repeat(inputs, plans, run) for plans in candidates(inputs)]
    return _told(asked, cluster, conditions, found, like)


def _on_other_links(like: Simulation, inputs: Inputs, run: Run) -> list[Steady] | None:
    """The steps of another simulation at the speed of these links; None if the tasks differ."""
    before, strategy = like.task_graph.inputs, inputs.strategy
    same = replace(before, network=inputs.network, workload=inputs.workload) == inputs
    if not same or before.workload.layers != inputs.workload.layers:
        return None
    if strategy.architecture.holds_shards and before.workload.codecs != inputs.workload.codecs:
        return None
    if strategy.exchanges_gradients() and strategy.scheduling.needs_timing:
        plans = candidates(inputs)
        if plans != [list(steady.plans) for steady in like.tried]:
            return None
    found = [on_other_links(steady, inputs, run) for steady in like.tried]
    return None if None in found else [steady for steady in found if steady is not None]


def _world_size(cluster: Cluster, workers: int | None) -> int:
    most = cluster.num_devices
    if workers is None:
        return most
    if not 1 <= workers <= most:
        raise UsageError(f"workers must be between 1 and {most}, the devices of the cluster, got {workers}.")
    return workers


def hosts_of(devices: Sequence[int], cluster: Cluster) -> Hosts:
    """The ranks that share a host, from the device of each."""
    found: dict[int, list[int]] = {}
    for rank, device in enumerate(devices):
        found.setdefault(device // cluster.devices_per_host, []).append(rank)
    return tuple(map(tuple, found.values()))


def _slowdowns(cluster: Cluster, world_size: int, slow: Mapping[int, float]) -> list[float]:
    """The factor on the compute times of each rank."""
    for rank in slow:
        if not 0 <= rank < world_size:
            raise UsageError(f"slow: there is no rank {rank}; ranks are numbered 0 to {world_size - 1}.")
    each = cluster.devices_per_host
    return [slow.get(rank, 1.0) / cluster.speeds[rank // each] for rank in range(world_size)]


def codec_of(workload: Workload, strategy: Strategy) -> CodecCost | None:
    """The cost of the strategy's compressor, if the workload has it."""
    return next((codec for codec in workload.codecs if codec.compressor == str(strategy.compression)), None)


# -- results ---------------------------------------------------------------------------------------------------


def _told(
    asked: Strategy, cluster: Cluster, conditions: Conditions, tried: Sequence[Steady], like: Simulation | None
) -> Simulation:
    found = min(tried, key=lambda steady: steady.step_s)
    task_graph, outcome, inputs = found.task_graph, found.outcome, found.task_graph.inputs
    end, first = task_graph.step_ends[-1][0], task_graph.step_ends[-1 - found.period][0]
    prediction = Prediction(
        strategy=str(asked),
        workload=inputs.workload.name,
        cluster=cluster.describe(),
        workers=inputs.world_size,
        step_s=found.step_s,
        compute_s=_compute_s(inputs),
        samples_per_s=inputs.world_size * inputs.workload.batch / found.step_s if found.step_s else 0.0,
        wire_bytes=_wire_bytes(found, like),
        busy=dict(_busy(found)),
        because=because(task_graph, outcome, float(outcome.end_s[first]), end),
        spread=_spread(found, conditions),
        plans=tuple(found.plans),
        warnings=tuple(_warnings(asked, inputs)),
    )
    return Simulation(prediction, task_graph, found.graph, outcome, tuple(tried))


def _compute_s(inputs: Inputs) -> float:
    """The compute time of the slowest rank that others wait for; without a barrier, the same mean as for the step."""
    strategy = inputs.strategy
    elsewhere = strategy.architecture.has_servers and strategy.synchronization.optimizer_on_servers
    alone_s = inputs.workload.compute_s + (0.0 if elsewhere else inputs.optimizer_s)
    if strategy.synchronization.barrier:
        return max(ranks.slowdown for ranks in inputs.classes) * alone_s
    slowdowns = [ranks.slowdown for ranks in inputs.classes]
    if strategy.synchronization.takes_first:
        pace = max(slowdown for slowdown, count in zip(slowdowns, inputs.counted, strict=True) if count)
        slowdowns = [pace] * len(slowdowns)
    return alone_s * inputs.world_size / sum(n / slow for n, slow in zip(inputs.counted, slowdowns, strict=True))


def _busy(found: Steady) -> Iterator[tuple[str, float]]:
    """For each part of the network, the share of the steps' time in which it is busy."""
    took_s = found.last_s - found.first_s
    start_s = np.clip(found.outcome.start_s, found.first_s, found.last_s)
    held_s = np.clip(found.outcome.end_s, found.first_s, found.last_s) - start_s
    for name, resource in found.task_graph.parts.items():
        whole_s = float(held_s[found.graph.resource == resource].sum())
        yield name, min(1.0, whole_s / took_s) if took_s else 0.0


def _spread(found: Steady, conditions: Conditions) -> Spread | None:
    if not conditions.noise_ratio:
        return None
    return spread_of(found, conditions.noise_ratio, np.random.default_rng(conditions.seed))


def _wire_bytes(found: Steady, like: Simulation | None) -> int:
    if like is not None and list(map(id, found.plans)) == list(map(id, like.prediction.plans)):
        return like.prediction.wire_bytes  # the same steps, which links do not change
    inputs = found.task_graph.inputs
    strategy = inputs.strategy
    if strategy.architecture.forms_sums() and inputs.world_size > _ROWS_UP_TO:
        rate, by_name, known = strategy.synchronization.rounds_per_step, strategy.codec.traits.by_name, {}
        total = 0.0
        for plan in found.plans:
            for bucket in plan.buckets:
                key = (plan.decoupled, bucket if by_name else bucket.layout)
                if key not in known:
                    known[key] = sent_bytes(inputs, bucket, decoupled=plan.decoupled) * rate(bucket.moment)
                total += known[key]
        return round(total)
    return sum(strategy.plan_bytes_per_step(plan, inputs.moment) for plan in found.plans)


def _warnings(asked: Strategy, inputs: Inputs) -> list[str]:
    found = inputs.network.warnings()
    measured = {codec.compressor for codec in inputs.workload.codecs}
    unknown = [one for one in asked.codecs() if str(one) not in measured]
    for text in dict.fromkeys(str(one) for one in unknown if not one.traits.lossless):
        found.append(
            f'the time to encode and decode "{text}" is not known and counted as zero. '
            f'Measure it: laconic profile SCRIPT:FUNCTION --compressor "{text}"'
        )
    return found
