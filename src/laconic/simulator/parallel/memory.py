"""Memory of one rank: parameters, gradients, optimizer state, activations, logits, gathered shards.

Activations that a layer keeps for its backward pass, in bytes for 16-bit numbers:

    none        tokens * (8 h / t' + 2 (qkv + attention) / t + 2 inner * (2 or 3) / t + masks) + scores
    selective   the same without the scores; or the activations that the framework's own rule keeps
    full        tokens * 2 h, and once the whole of one layer

with t tensor-parallel ranks, and t' = t with sequence parallelism, else 1. The first of p stages keeps p micro-batches
with 1F1B, and p + (p - 1) / v with interleaving, or as many as there are. For a GPT with dropout and without fused
attention this is s b h (34 + 5 a s / h), as Korthikanti et al. count.

Reference: Korthikanti et al. 2022, arXiv:2205.05198; Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from laconic.simulator.parallel.layer import Slice
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.shares import layer_parameters, stage_layers, stage_parameters
from laconic.simulator.parallel.software import Software
from laconic.simulator.parallel.system import Job, System

_GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest rank."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    """Logits of the loss on the last stage, in 16 and 32 bits, with their gradients."""
    gathered: float
    """Parameters of layers that zero=3 has gathered and not yet released."""
    residuals: float
    """State of the strategy of the data-parallel exchange, such as residuals."""

    @property
    def total(self) -> float:
        """All of it, in bytes."""
        return math.fsum(getattr(self, field.name) for field in fields(self))

    @property
    def total_gib(self) -> float:
        """All of it, in GiB."""
        return self.total / _GIB


def memory(job: Job, plan: Plan, software: Software, *, residual_bytes: float = 0.0) -> Memory:
    """The memory of the fullest rank; `residual_bytes` of it are kept by a strategy of the data-parallel exchange."""
    # The first stage keeps the most micro-batches, the last has the logits; those between have less of both.
    return max(
        (_stage_memory(job, plan, software, stage, residual_bytes) for stage in {0, plan.pp - 1}),
        key=lambda found: found.total,
    )


def fits(found: Memory, system: System) -> bool:
    """Whether it fits into the rank's memory, less the share of the runtime and the allocator."""
    return found.total * system.software.allocator_factor <= system.accelerator.memory_bytes


def _stage_memory(job: Job, plan: Plan, software: Software, stage: int, residual_bytes: float) -> Memory:
    model = job.model
    parameters = stage_parameters(model, plan, stage)
    whole, sharded = parameters.total, parameters.sharded(plan)
    dense, mixture = stage_layers(model, plan, stage)
    here = Slice(model, plan, job.sequence, software)
    in_flight = _in_flight(job, plan, stage)
    layers = [(False, dense), (True, mixture)]
    kept = in_flight * sum(count * kept_bytes(here, mixture=kind) for kind, count in layers if count)
    working = 0.0
    if plan.recompute == "full":
        # One layer at a time has its activations recomputed, and gradients of the same size.
        working = 1.5 * max(all_kept_bytes(here, mixture=kind) for kind, count in layers if count)
    last = stage == plan.pp - 1
    logits = software.logit_bytes * here.tokens * model.vocab_size / plan.tp if last else 0.0
    # The logits are freed before the first layer is recomputed.
    working, logits = (working, 0.0) if working > logits else (0.0, logits)
    gathered = 0.0
    if plan.zero == 3 and not plan.gathers_layers:
        # The stage's parameters, and the sum of their gradients over micro-batches.
        gathered = (2 + software.gradient_bytes) * whole
    elif plan.gathers_layers:
        layer = max(layer_parameters(model, plan, mixture=kind).total for kind, count in layers if count)
        edge = model.embedding_parameters() / plan.tp if last or stage == 0 else 0.0
        gathered = software.gathered_layers * 2 * layer + 2 * edge
    return Memory(
        parameters=software.parameter_bytes * (sharded if plan.zero == 3 else whole),
        gradients=software.stored_gradient_bytes * (sharded if plan.zero >= 2 else whole),
        optimizer=software.state_bytes * (sharded if plan.zero >= 1 else whole),
        activations=kept + working,
        logits=logits,
        gathered=gathered,
        residuals=residual_bytes,
    )


def _in_flight(job: Job, plan: Plan, stage: int) -> float:
    """Micro-batches whose activations a stage keeps at once."""
    if plan.pp == 1:
        return 1.0
    behind = plan.pp - stage
    if plan.interleave > 1:
        return min(plan.num_micro_batches(job.global_batch), plan.pp + (plan.pp - 1) / plan.interleave) * (
            behind / plan.pp if stage else 1.0
        )
    return min(plan.num_micro_batches(job.global_batch), behind)


def kept_bytes(here: Slice, *, mixture: bool) -> float:
    """Activations that one layer keeps of one micro-batch under the plan's recomputation."""
    plan, model = here.plan, here.model
    if plan.recompute == "full":
        return 2.0 * here.tokens * model.hidden_size / (plan.tp if plan.sequence_parallel else 1)
    if plan.recompute == "selective" and here.software.selective_share:
        return _every_other_product(here, mixture=mixture)
    return all_kept_bytes(here, mixture=mixture, scores=plan.recompute == "none")


def all_kept_bytes(here: Slice, *, mixture: bool, scores: bool = True) -> float:
    """Activations that one layer keeps of one micro-batch without recomputation, with or without the scores."""
    plan, model, software = here.plan, here.model, here.software
    shared = plan.tp if plan.sequence_parallel else 1
    mask = 1 if software.dropout else 0
    attention = model.attention_width + 2 * model.kv_heads * model.head_width
    mixed = model.num_attention_heads * model.value_width
    per_token = (8 + 2 * mask) * model.hidden_size / shared + 2 * (attention + mixed) / plan.tp
    for projection in model.projections(mixture=mixture):
        if projection.name.endswith(".down"):
            per_token += 2 * projection.inputs * projection.active * (3 if model.gated else 2) / plan.tp
    if mixture:
        # Permuted inputs and outputs of the experts.
        per_token += 4 * model.num_experts_per_tok * model.hidden_size / plan.tp
    found = here.tokens * per_token
    if scores and not software.fused_attention:
        heads = plan.micro_batch * model.num_attention_heads / plan.tp
        found += (2 + (3 if software.dropout else 0)) * heads * here.sequence / plan.cp * here.sequence
    return found


def _every_other_product(here: Slice, *, mixture: bool) -> float:
    """The rule of torchtitan: every other product's result, the result of the attention, and the layer's input."""
    plan, model = here.plan, here.model
    kv = model.kv_heads * model.head_width
    mixed = model.num_attention_heads * model.value_width
    inner = sum(
        projection.inputs * projection.active
        for projection in model.projections(mixture=mixture)
        if projection.name.endswith(".down")
    )
    shared = plan.tp if plan.sequence_parallel else 1
    per_token = 2 * model.hidden_size / shared + (model.attention_width + kv + mixed + inner) / plan.tp
    return 2.0 * here.tokens * per_token
