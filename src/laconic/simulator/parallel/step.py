"""The time of one training step under a parallel plan.

    step = m * stage + (p - 1) * stage / v + exposed gradient exchange + optimizer          1F1B, v groups per stage

where m is the number of micro-batches, p that of stages, and stage the time of a micro-batch in the slowest stage,
forward and backward, including the part of its communication that compute does not hide. On a network that costs
nothing, stage is the roofline time of its kernels, and the second term is the known formula of the pipeline bubble.

All ranks of one stage do the same work, so one rank of each stage is computed: 16,384 GPUs take no longer than one.

References: Narayanan et al. 2021, arXiv:2104.04473 (interleaving); Korthikanti et al. 2022, arXiv:2205.05198 (sequence
parallelism, selective recomputation); Qi et al. 2023, arXiv:2401.10241 (zero bubble); Zhao et al. 2023,
arXiv:2304.11277 (FSDP).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from laconic.simulator.parallel.fabric import Members, Operation
from laconic.simulator.parallel.layer import Slice, backward_s, forward_s
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.shares import RankParameters, layer_parameters, stage_layers, stage_parameters
from laconic.simulator.parallel.software import Software
from laconic.simulator.parallel.system import Job, System
from laconic.simulator.parallel.traffic import Groups, LayerTraffic, exchanges, layer_traffic
from laconic.simulator.parallel.work import Item, Kernel, Product
from laconic.workload.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step, by what they are spent on; communication counts where compute does not hide it."""

    compute_s: float
    """Kernels of all micro-batches in the slowest stage, recomputation included."""
    launch_s: float
    """The GPU waits for the host to launch kernels."""
    tensor_s: float
    """Exchanges among tensor-parallel ranks."""
    context_s: float
    expert_s: float
    """The all-to-all of tokens."""
    shard_s: float
    """All-gathers of parameters and reduce-scatters of gradients of zero=3."""
    pipeline_s: float
    """Messages between stages."""
    bubble_s: float
    """Stages wait for their first micro-batch, and after their last."""
    exchange_s: float
    """The data-parallel exchange of gradients, and of parameters with zero=1 or 2."""
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """The time of the whole step."""
        return math.fsum(vars(self).values())


class Exchange(Protocol):
    """An exchange among data-parallel ranks: of gradients, or of parameters at intervals."""

    def exposed_s(self, job: Job, plan: Plan, system: System, *, before_s: float, backward_s: float) -> float:
        """Seconds that the exchange adds to a step.

        before_s: the time of a step without the exchange, except the last backward pass; backward_s: that pass.
        """
        ...

    def kept_bytes(self, job: Job, plan: Plan, system: System) -> float:
        """Bytes of state on one rank between steps: residuals, anchors, momenta."""
        ...


def step_time(job: Job, plan: Plan, system: System, *, exchange: Exchange | None = None) -> StepTime:
    """The time of one step; `exchange` replaces the framework's all-reduce or sharded exchange of gradients."""
    plan.check(job.model, sequence=job.sequence)
    micro_batches = plan.num_micro_batches(job.global_batch)
    stages = _stages(job, plan, system)
    slowest = max(stages, key=lambda stage: stage.total_s)
    # The first micro-batch passes every stage, the others wait for the slowest.
    others_s = math.fsum(stage.total_s for stage in stages) - slowest.total_s
    bubble_s = others_s / plan.interleave
    if plan.schedule == "zero_bubble":
        # The gradients of weights fill the bubble: (p - 1)(F + B - W) is left.
        bubble_s -= 2 * math.fsum(stage.weights_s for stage in stages) - 2 * slowest.weights_s
        bubble_s = max(0.0, bubble_s)
    largest = max(stages, key=lambda stage: stage.parameters.total)
    software = system.software
    if exchange is None:
        exposed_s = _exchange_s(largest.parameters, slowest, micro_batches, plan, system)
    else:
        alone_s = micro_batches * slowest.total_s + bubble_s
        before_s = alone_s - slowest.backward_s
        exposed_s = exchange.exposed_s(job, plan, system, before_s=before_s, backward_s=slowest.backward_s)
    owned = largest.parameters.sharded(plan) if plan.zero else largest.parameters.total
    optimizer_s = software.step_s + system.accelerator.memory_s(owned * software.optimizer_bytes)
    return StepTime(
        compute_s=micro_batches * slowest.compute_s,
        launch_s=micro_batches * slowest.launch_s,
        tensor_s=micro_batches * slowest.tensor_s,
        context_s=micro_batches * slowest.context_s,
        expert_s=micro_batches * slowest.expert_s,
        shard_s=micro_batches * slowest.shard_s + _edge_of_shards_s(job.model, plan, system),
        pipeline_s=micro_batches * slowest.pipeline_s,
        bubble_s=bubble_s,
        exchange_s=exposed_s,
        optimizer_s=optimizer_s,
    )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A micro-batch's forward and backward pass through one stage."""

    compute_s: float
    launch_s: float
    tensor_s: float
    context_s: float
    expert_s: float
    shard_s: float
    pipeline_s: float
    weights_s: float
    """The part of compute_s that only gradients of weights need."""
    backward_s: float
    """The part of the whole that is the backward pass."""
    parameters: RankParameters

    @property
    def total_s(self) -> float:
        """The total."""
        return (
            self.compute_s + self.launch_s + self.tensor_s + self.context_s + self.expert_s + self.shard_s
            + self.pipeline_s
        )  # fmt: skip


def _stages(job: Job, plan: Plan, system: System) -> list[Stage]:
    """The stages from first to last; equal ones are computed once."""
    found: list[Stage] = []
    for index in range(plan.pp):
        dense, mixture = stage_layers(job.model, plan, index)
        ends = (index == 0, index == plan.pp - 1)
        found.append(_stage(job, plan, system, (dense, mixture), ends))
    return found


@lru_cache(maxsize=65_536)
def _stage(job: Job, plan: Plan, system: System, layers: tuple[int, int], ends: tuple[bool, bool]) -> Stage:
    """A stage with these numbers of dense and expert layers; `ends`: whether it is the first, and the last."""
    model = job.model
    first, last = ends
    here = Slice(model, plan, job.sequence, system.software)
    groups = Groups.of(plan, system.fabric)
    parts = [
        _layer(here, system, groups, mixture=kind).times(count)
        for kind, count in zip((False, True), layers, strict=True)
        if count
    ]
    if first or last:
        parts.append(_ends(here, system, groups, first=first, last=last))
    sends = 0.0
    if plan.pp > 1:
        nbytes = here.tokens * model.hidden_size * 2
        if plan.sequence_parallel or system.software.scatter_gather:
            nbytes /= plan.tp
        there_s = back_s = system.fabric.seconds("send", nbytes, groups.pipeline)
        if groups.pipeline.nodes == 1 and plan.gpus > system.fabric.gpus_per_node:
            # Several stages in a node: the first and the last of them, which set the pace, have a neighbour outside.
            there_s = system.fabric.seconds("send", nbytes, Members(2, 1))
        # A message forward and one back for each group of layers.
        sends = plan.interleave * (there_s + back_s)
        if system.software.overlaps_pipeline:
            # Messages of one micro-batch overlap with the work of another, as far as that lasts.
            sends = max(0.0, sends - math.fsum(part.total_s for part in parts))
    return Stage(
        compute_s=math.fsum(part.compute_s for part in parts),
        launch_s=math.fsum(part.launch_s for part in parts),
        tensor_s=math.fsum(part.tensor_s for part in parts),
        context_s=math.fsum(part.context_s for part in parts),
        expert_s=math.fsum(part.expert_s for part in parts),
        shard_s=math.fsum(part.shard_s for part in parts),
        pipeline_s=sends,
        weights_s=math.fsum(part.weights_s for part in parts),
        backward_s=math.fsum(part.backward_s for part in parts),
        parameters=stage_parameters(model, plan, 0 if first else plan.pp - 1 if last else 1),
    )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A layer, or an end of the model, of one micro-batch."""

    compute_s: float
    launch_s: float = 0.0
    tensor_s: float = 0.0
    context_s: float = 0.0
    expert_s: float = 0.0
    shard_s: float = 0.0
    weights_s: float = 0.0
    backward_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum of all sequential times."""
        return self.compute_s + self.launch_s + self.tensor_s + self.context_s + self.expert_s + self.shard_s

    def times(self, count: int) -> _Part:
        return _Part(**{name: count * value for name, value in vars(self).items()})


@lru_cache(maxsize=65_536)
def _layer(here: Slice, system: System, groups: Groups, *, mixture: bool) -> _Part:
    """One layer of a micro-batch, forward and backward."""
    software, device, plan = system.software, system.accelerator, here.plan
    items = list(here.items(mixture=mixture))
    ahead_s = forward_s(items, device, software)
    back = backward_s(items, device, software)
    again_s = {"none": 0.0, "full": ahead_s, "selective": 0.0}[plan.recompute]
    if plan.recompute == "selective":
        again_s = software.selective_s(ahead_s, forward_s(here.attention_items(), device, software))
    traffic = layer_traffic(here, mixture=mixture)
    tensor_ahead_s, tensor_back_s = _tensor_s(traffic, system, groups, back.weights_s)
    if plan.recompute == "full":
        tensor_back_s += tensor_ahead_s
    passes = 2 if plan.recompute != "full" else 3
    expert_s = passes * traffic.expert_messages * _tokens_s(traffic.expert_bytes, here, system, groups)
    expert_s *= 1 - software.expert_overlap
    context_ahead_s = system.fabric.seconds("all_gather", traffic.context_bytes, groups.context)
    # Keys and values circulate while the attention of earlier ones is computed; their gradients circulate back.
    attention_s = forward_s(here.attention_items(), device, software)
    context_s = max(0.0, context_ahead_s - attention_s) + max(0.0, 2 * context_ahead_s - 2.5 * attention_s)
    compute_ahead_s, compute_back_s = ahead_s, back.inputs_s + back.weights_s + again_s
    busy_ahead_s = compute_ahead_s + tensor_ahead_s
    busy_back_s = compute_back_s + tensor_back_s
    launches = 2 + (1 if plan.recompute == "full" else 0)
    launch_s = software.launch_wait_s(plan.tp, busy_ahead_s)
    launch_back_s = software.launch_wait_s(plan.tp, busy_back_s, launches)
    shard_s = 0.0
    if plan.gathers_layers:
        shard_s = _shard_s(layer_parameters(here.model, plan, mixture=mixture), busy_ahead_s + launch_s,
                           busy_back_s + launch_back_s, system, groups)  # fmt: skip
    return _Part(
        compute_s=compute_ahead_s + compute_back_s,
        launch_s=launch_s + launch_back_s,
        tensor_s=tensor_ahead_s + tensor_back_s,
        context_s=context_s,
        expert_s=expert_s,
        shard_s=shard_s,
        weights_s=back.weights_s,
        backward_s=busy_back_s + launch_back_s,
    )


def _tensor_s(traffic: LayerTraffic, system: System, groups: Groups, weights_s: float) -> tuple[float, float]:
    """The exposed time of a layer's exchanges among tensor-parallel ranks, forward and backward."""
    fabric, software = system.fabric, system.software
    ahead_s = math.fsum(fabric.seconds(op, n, groups.tensor) for op, n in traffic.tensor_forward)
    back_s = math.fsum(fabric.seconds(op, n, groups.tensor) for op, n in traffic.tensor_backward)
    hidden_s = 0.0
    if software.overlaps_tensor_backward:
        beside_s = math.fsum(
            fabric.seconds(op, n, groups.tensor) for op, n in traffic.tensor_backward[: traffic.beside_weights]
        )
        hidden_s = min(beside_s, weights_s)
    shown = 1 - software.tensor_overlap
    return ahead_s * shown, (back_s - hidden_s) * shown


def _tokens_s(nbytes: float, here: Slice, system: System, groups: Groups) -> float:
    """One all-to-all of tokens to their experts or back."""
    copies = here.model.num_experts_per_tok
    if system.software.tokens_once_per_node:
        return system.fabric.dispatch_s(nbytes, copies, groups.expert)
    return system.fabric.seconds("all_to_all", nbytes * copies, groups.expert)


def _shard_s(parameters: RankParameters, ahead_s: float, back_s: float, system: System, groups: Groups) -> float:
    """The exposed time of a layer's all-gathers and reduce-scatter."""
    software = system.software
    pieces = software.shard_messages
    gather_s = pieces * _over_replicas_s("all_gather", parameters, 2 / pieces, system, groups)
    scatter_s = pieces * _over_replicas_s(
        "reduce_scatter", parameters, software.gradient_bytes / pieces, system, groups
    )
    if not software.overlaps_parameters:
        return 2 * gather_s + scatter_s
    shown_s = max(0.0, gather_s - ahead_s) + max(0.0, gather_s + scatter_s - back_s)
    hidden_s = 2 * gather_s + scatter_s - shown_s
    return shown_s + software.interference * hidden_s


def _over_replicas_s(
    operation: Operation, parameters: RankParameters, element_bytes: float, system: System, groups: Groups
) -> float:
    """One operation on all parameters of a rank, each among the ranks with the same parameters."""
    fabric = system.fabric
    shared_s = fabric.seconds(operation, element_bytes * parameters.shared, groups.data)
    return shared_s + fabric.seconds(operation, element_bytes * parameters.routed, groups.expert_data)


def _edge_of_shards_s(model: Transformer, plan: Plan, system: System) -> float:
    """The first all-gather and the last reduce-scatter of a step, which nothing hides."""
    if not plan.gathers_layers:
        return 0.0
    groups = Groups.of(plan, system.fabric)
    parameters = model.embedding_parameters() / plan.tp
    return system.fabric.seconds("all_gather", 2 * parameters, groups.data) + system.fabric.seconds(
        "reduce_scatter", system.software.gradient_bytes * parameters, groups.data
    )


def _ends(here: Slice, system: System, groups: Groups, *, first: bool, last: bool) -> _Part:
    """The embedding before the first layer, and the output layer and the loss after the last."""
    model, plan, software = here.model, here.plan, system.software
    items: list[Item] = []
    tensor_s = 0.0
    hidden = here.tokens * model.hidden_size
    if first:
        items.append(Kernel(8 * hidden, 8 * hidden))
        tensor_s += system.fabric.seconds("all_reduce", 2 * hidden, groups.tensor)
    if last:
        items.append(Product(here.tokens, model.vocab_size / plan.tp, model.hidden_size, narrow=False))
        items.append(software.loss(here.tokens * model.vocab_size / plan.tp))
        tensor_s += system.fabric.seconds("all_reduce", 2 * hidden, groups.tensor)
    back = backward_s(items, system.accelerator, software)
    return _Part(
        compute_s=forward_s(items, system.accelerator, software) + back.inputs_s + back.weights_s,
        tensor_s=tensor_s,
        weights_s=back.weights_s,
        backward_s=back.inputs_s + back.weights_s,
    )


def _exchange_s(parameters: RankParameters, stage: Stage, micro_batches: int, plan: Plan, system: System) -> float:
    """The exposed part of the exchanges of gradients and parameters among replicas in one step."""
    software = system.software
    if plan.gathers_layers:
        return 0.0
    groups = Groups.of(plan, system.fabric)
    scatters, gathers = exchanges(plan, software, micro_batches)
    if plan.zero == 0:
        whole_s = _over_replicas_s("all_reduce", parameters, software.gradient_bytes, system, groups)
        return scatters * _with_interference_s(whole_s, stage.backward_s, software.overlaps_gradients, software)
    scatter_s = _over_replicas_s("reduce_scatter", parameters, software.gradient_bytes, system, groups)
    gather_s = _over_replicas_s("all_gather", parameters, 2, system, groups)
    scatter_s = _with_interference_s(scatter_s, stage.backward_s, software.overlaps_gradients, software)
    ahead_s = stage.total_s - stage.backward_s
    return scatters * scatter_s + gathers * _with_interference_s(
        gather_s, ahead_s, software.overlaps_parameters, software
    )


def _with_interference_s(whole_s: float, beside_s: float, overlaps: bool, software: Software) -> float:
    """What an exchange adds: its exposed part, and what the compute beside it loses to the hidden part."""
    if not overlaps:
        return whole_s
    shown_s = software.exposed_s(whole_s, beside_s)
    return shown_s + software.interference * (whole_s - shown_s)
