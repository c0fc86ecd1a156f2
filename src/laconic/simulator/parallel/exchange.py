"""Data-parallel gradients exchanged by a laconic strategy, inside a cluster or between islands of it.

A rank's gradients, layer by layer and in the shapes that tensor parallelism leaves, become a workload of the simulator,
and its replicas a cluster; the additional time of a step is the cost of the strategy. Everything before the last
backward pass counts as compute that comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from laconic.cluster import Cluster, Link
from laconic.errors import ConfigurationError
from laconic.simulator.parallel.fabric import Fabric
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.shares import stage_layers, stage_parameters
from laconic.simulator.parallel.step import Exchange, step_time
from laconic.simulator.parallel.system import Job, System
from laconic.simulator.parallel.traffic import Groups
from laconic.simulator.prediction import Prediction
from laconic.simulator.simulation import simulate
from laconic.strategy import Strategy, as_strategy
from laconic.workload import Workload
from laconic.workload.transformer import Transformer
from laconic.workload.workload import Layer, TensorShape

_SITE_PARTS = 16
_DTYPES = {2: torch.bfloat16, 4: torch.float32}


class StrategyExchange:
    """Gradients of all data-parallel ranks, exchanged by a strategy."""

    def __init__(self, strategy: Strategy | str) -> None:
        self.strategy = as_strategy(strategy)

    def exposed_s(self, job: Job, plan: Plan, system: System, *, before_s: float, backward_s: float) -> float:
        found = self.prediction(job, plan, system, before_s=before_s, backward_s=backward_s)
        return 0.0 if found is None else found.exposed_s

    def kept_bytes(self, job: Job, plan: Plan, system: System) -> float:
        return _kept_bytes(self.strategy, job, plan, system) if plan.dp * plan.cp > 1 else 0.0

    def prediction(
        self, job: Job, plan: Plan, system: System, *, before_s: float, backward_s: float
    ) -> Prediction | None:
        """The prediction of the exchange; None with a single replica."""
        if plan.zero:
            raise ConfigurationError(
                f"plan: zero={plan.zero} shards the tensors that {self.strategy} exchanges whole. Give zero=0, "
                f"or leave the strategy out."
            )
        if plan.ep > 1:
            raise ConfigurationError(
                f"plan: ep={plan.ep} with the strategy {self.strategy} is not modelled. Give ep=1."
            )
        members = Groups.of(plan, system.fabric).data
        if members.size == 1:
            return None
        work = _workload(job.model, plan, system.software.gradient_bytes, before_s, backward_s)
        return simulate(self.strategy, work, _replicas(system.fabric, members.nodes, members.per_node)).prediction


@dataclass(frozen=True)
class Islands:
    """Several sites that each run the whole plan, and exchange by a strategy over the uplink of each."""

    strategy: Strategy
    sites: int
    uplink: Link
    inside: Exchange | None = None
    """The exchange among the replicas of one site; default: the framework's."""

    def exposed_s(self, job: Job, plan: Plan, system: System, *, before_s: float, backward_s: float) -> float:
        inner = step_time(job, plan, system, exchange=self.inside).exchange_s
        if self.sites == 1:
            return inner
        # All ranks of a site share its uplink, and together they send the whole model.
        part = _part_of_a_site(job.model)
        link = Link(bandwidth_bps=self.uplink.bandwidth_bps / part.tp, delay_s=self.uplink.delay_s)
        work = _workload(job.model, part, system.software.gradient_bytes, before_s + inner, backward_s)
        between = simulate(self.strategy, work, Cluster(links=(link,) * self.sites)).prediction
        return inner + between.exposed_s

    def kept_bytes(self, job: Job, plan: Plan, system: System) -> float:
        inside = 0.0 if self.inside is None else self.inside.kept_bytes(job, plan, system)
        if self.sites == 1:
            return inside
        # A rank keeps the state of its own parameters.
        parameters = stage_parameters(job.model, plan, 0)
        here = parameters.sharded(plan) if plan.zero == 3 else parameters.total
        part = _part_of_a_site(job.model)
        kept = part.tp * _kept_bytes(self.strategy, job, part, system)
        return inside + kept * here / job.model.num_parameters


def _part_of_a_site(model: Transformer) -> Plan:
    """The simulated part of a site: one of several equal parts that share its uplink, to save simulation time.

    Experts are not split over tensor-parallel ranks, so a model with experts is simulated whole.
    """
    return Plan() if model.is_mixture else Plan(tp=_SITE_PARTS)


def _kept_bytes(strategy: Strategy, job: Job, plan: Plan, system: System) -> float:
    work = _workload(job.model, plan, system.software.gradient_bytes, 0.0, 0.0)
    return float(strategy.state_bytes(work.tensors))


def _replicas(fabric: Fabric, nodes: int, per_node: int) -> Cluster:
    """The ranks that exchange with each other, as a cluster."""
    if math.isinf(fabric.between_bytes_per_s):
        raise ConfigurationError("a strategy needs links of finite bandwidth.")
    nic = Link(bandwidth_bps=8 * fabric.between_bytes_per_s, delay_s=fabric.between_hop_s / 2)
    if per_node == 1:
        return Cluster(links=(nic,) * nodes)
    inside = Link(bandwidth_bps=8 * fabric.inside_bytes_per_s, delay_s=fabric.inside_hop_s / 2)
    return Cluster(links=(nic,) * nodes, devices_per_host=per_node, inside=inside, nics=per_node)


def _workload(model: Transformer, plan: Plan, gradient_bytes: int, before_s: float, backward_s: float) -> Workload:
    """One step of a rank of the first stage; the last backward pass is divided equally among layers."""
    dense, mixture = stage_layers(model, plan, 0)
    layers = [list(_tensors(model, plan, index, index >= dense)) for index in range(dense + mixture)]
    layers[0].append(TensorShape(name="embedding", shape=(math.ceil(model.vocab_size / plan.tp), model.hidden_size)))
    if plan.pp == 1:
        layers[-1].append(TensorShape(name="norm", shape=(model.hidden_size * (2 if model.bias else 1),)))
    if plan.pp == 1 and not model.tie_word_embeddings:
        layers[-1].append(TensorShape(name="output", shape=(math.ceil(model.vocab_size / plan.tp), model.hidden_size)))
    each_s = backward_s / len(layers)
    return Workload(
        name=f"{model.name or 'model'}, stage 0",
        batch=plan.micro_batch,
        dtype=_DTYPES[gradient_bytes],
        source="The shapes of one rank of a parallel plan; times predicted from rooflines.",
        layers=tuple(
            Layer(
                name=f"layers.{index}",
                forward_s=before_s if index == 0 else 0.0,
                backward_s=each_s,
                tensors=tuple(tensors),
            )
            for index, tensors in enumerate(layers)
        ),
    )


def _tensors(model: Transformer, plan: Plan, index: int, mixture: bool) -> Iterator[TensorShape]:
    for projection in model.projections(mixture=mixture):
        outputs, inputs = projection.outputs, projection.inputs
        if not projection.routed and projection.split == "column":
            outputs = math.ceil(outputs / plan.tp)
        elif not projection.routed and projection.split == "row":
            inputs = math.ceil(inputs / plan.tp)
        rows = outputs * projection.experts
        yield TensorShape(name=f"layers.{index}.{projection.name}", shape=(rows, inputs))
    yield TensorShape(name=f"layers.{index}.norms", shape=(model.norm_parameters(),))
