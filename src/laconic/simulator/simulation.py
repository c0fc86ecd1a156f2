"""One strategy, one workload, one cluster: what a step costs, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from laconic.simulator.noise import spread_of
from laconic.simulator.planning import candidates, settled
from laconic.simulator.prediction import Prediction, Spread
from laconic.simulator.steps import Steady, until_they_repeat
from laconic.simulator.traffic import sent_bytes
from laconic.strategy import Strategy, as_strategy
from laconic.workload import CodecCost, Workload

_ROWS_UP_TO = 512
"""Ranks among which the rows of a collective are written down to count its bytes; beyond, formulas count them."""


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
    drawing: TaskGraph
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
) -> Simulation:
    """What a step of `strategy` costs on `workload` and `cluster`, with the tasks and times it was read off from.

    workers: ranks, on the first devices of the cluster; all of them if left out.
    network: what moves cost; by formulas and the cluster's measured tables if left out.
    """
    conditions = conditions or Conditions()
    network = network or AnalyticNetwork(cluster)
    world_size, slow = _world_size(cluster, workers), conditions.slow or {}
    asked = as_strategy(strategy)
    slowdowns, hosts = _slowdowns(cluster, world_size, slow), hosts_of(range(world_size), cluster)
    inputs = Inputs(
        strategy=settled(asked, hosts, network),
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

    def run(drawing: TaskGraph, graph: Graph) -> Outcome:
        return slowed(drawing, graph, conditions.interference_ratio)

    found = [until_they_repeat(inputs, plans, run) for plans in candidates(inputs)]
    return _told(asked, cluster, conditions, min(found, key=lambda steady: steady.step_s))


def _world_size(cluster: Cluster, workers: int | None) -> int:
    most = cluster.num_devices
    if workers is None:
        return most
    if not 1 <= workers <= most:
        raise UsageError(f"workers must be between 1 and {most}, the devices of the cluster, got {workers}.")
    return workers


def hosts_of(devices: Sequence[int], cluster: Cluster) -> Hosts:
    """Which ranks share a host, from the device of each."""
    found: dict[int, list[int]] = {}
    for rank, device in enumerate(devices):
        found.setdefault(device // cluster.devices_per_host, []).append(rank)
    return tuple(map(tuple, found.values()))


def _slowdowns(cluster: Cluster, world_size: int, slow: Mapping[int, float]) -> list[float]:
    """By what the compute times of each rank are multiplied."""
    for rank in slow:
        if not 0 <= rank < world_size:
            raise UsageError(f"slow: there is no rank {rank}; ranks are numbered 0 to {world_size - 1}.")
    each = cluster.devices_per_host
    return [slow.get(rank, 1.0) / cluster.speeds[rank // each] for rank in range(world_size)]


def codec_of(workload: Workload, strategy: Strategy) -> CodecCost | None:
    """What the strategy's compressor costs, if the workload knows."""
    return next((codec for codec in workload.codecs if codec.compressor == str(strategy.compression)), None)


# -- telling ---------------------------------------------------------------------------------------------------


def _told(asked: Strategy, cluster: Cluster, conditions: Conditions, found: Steady) -> Simulation:
    drawing, outcome, inputs = found.drawing, found.outcome, found.drawing.inputs
    end, first = drawing.step_ends[-1][0], drawing.step_ends[-1 - found.period][0]
    prediction = Prediction(
        strategy=str(asked),
        workload=inputs.workload.name,
        cluster=cluster.describe(),
        workers=inputs.world_size,
        step_s=found.step_s,
        compute_s=_compute_s(inputs),
        samples_per_s=inputs.world_size * inputs.workload.batch / found.step_s if found.step_s else 0.0,
        wire_bytes=_wire_bytes(found),
        busy=dict(_busy(found)),
        because=because(drawing, outcome, float(outcome.end_s[first]), end),
        spread=_spread(found, conditions),
        plans=tuple(found.plans),
        warnings=tuple(_warnings(asked, inputs)),
    )
    return Simulation(prediction, drawing, found.graph, outcome)


def _compute_s(inputs: Inputs) -> float:
    """Of the slowest where all wait for all; else the mean that the step's time is, too."""
    strategy = inputs.strategy
    held_elsewhere = strategy.architecture.has_servers and not strategy.synchronization.barrier
    alone_s = inputs.workload.compute_s + (0.0 if held_elsewhere else inputs.optimizer_s)
    if strategy.synchronization.barrier:
        return max(ranks.slowdown for ranks in inputs.classes) * alone_s
    return alone_s * inputs.world_size / sum(ranks.size / ranks.slowdown for ranks in inputs.classes)


def _busy(found: Steady) -> Iterator[tuple[str, float]]:
    """For each part of the network, the share of the steps' time in which it is held."""
    took_s = found.last_s - found.first_s
    start_s = np.clip(found.outcome.start_s, found.first_s, found.last_s)
    held_s = np.clip(found.outcome.end_s, found.first_s, found.last_s) - start_s
    for name, resource in found.drawing.parts.items():
        whole_s = float(held_s[found.graph.resource == resource].sum())
        yield name, min(1.0, whole_s / took_s) if took_s else 0.0


def _spread(found: Steady, conditions: Conditions) -> Spread | None:
    if not conditions.noise_ratio:
        return None
    return spread_of(found, conditions.noise_ratio, np.random.default_rng(conditions.seed))


def _wire_bytes(found: Steady) -> int:
    inputs = found.drawing.inputs
    strategy = inputs.strategy
    if strategy.architecture.forms_sums() and inputs.world_size > _ROWS_UP_TO:
        whole = sum(sent_bytes(inputs, bucket, halves=plan.halves) for plan in found.plans for bucket in plan.buckets)
        return round(whole * strategy.synchronization.rounds_per_step())
    return sum(strategy.plan_bytes_per_step(plan, inputs.moment) for plan in found.plans)


def _warnings(asked: Strategy, inputs: Inputs) -> list[str]:
    found = inputs.network.warnings()
    unknown = [] if inputs.codec is not None else [asked.compression]
    if asked.architecture.holds_shards:
        measured = {codec.compressor for codec in inputs.workload.codecs}
        unknown += [] if str(asked.weights_codec) in measured else [asked.weights_codec]
    for text in dict.fromkeys(str(one) for one in unknown if not one.traits.lossless):
        found.append(
            f'what it takes to encode and decode "{text}" is not known and counted as nothing. '
            f'Measure it: laconic profile SCRIPT:FUNCTION --compressor "{text}"'
        )
    return found
