"""The traffic of a parallel plan: groups of ranks, and bytes per dimension and step.

Bytes are those that one rank sends, with n ranks in a group, m micro-batches, L layers per stage, and hidden = the
bytes of a micro-batch's activations between layers on one rank of the context dimension:

    tensor      m L * 4 all-reduces of hidden, 6 with full recomputation; each sends 2 (n-1)/n of it. With sequence
                parallelism all-gathers and reduce-scatters replace them, with two more all-gathers per layer.
    context     m L * 3 gathers of the sequence's keys and values, (n-1)/n each
    expert      m L * 4 all-to-alls of the tokens to their experts and back, 6 with full recomputation
    pipeline    m * 2 messages of hidden per boundary and group of layers
    data        2 (n-1)/n of the gradients; with zero=1, (n-1)/n of gradients and of 16-bit parameters; with zero=2, m
                times the gradients; with zero=3, m times (n-1)/n of two gathers and a scatter
"""

from __future__ import annotations

from typing import NamedTuple

from laconic.simulator.parallel.fabric import Fabric, Members, Operation
from laconic.simulator.parallel.layer import Slice
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.shares import expert_replicas, replicas, stage_layers, stage_parameters
from laconic.simulator.parallel.software import Software
from laconic.simulator.parallel.system import Job

_ELEMENT_BYTES = 2


class Groups(NamedTuple):
    """The groups that one rank belongs to."""

    tensor: Members
    context: Members
    data: Members
    """Ranks that hold the same parameters: those of the data and context dimensions."""
    expert: Members
    expert_data: Members
    """Ranks that hold the same experts."""
    pipeline: Members
    """Two neighbouring stages."""

    @classmethod
    def of(cls, plan: Plan, fabric: Fabric) -> Groups:
        """The groups of a plan."""
        return cls(
            tensor=fabric.members(plan.tp, 1),
            context=fabric.members(plan.cp, plan.tp),
            data=fabric.members(plan.dp * plan.cp, plan.tp),
            expert=fabric.members(plan.ep, 1),
            expert_data=fabric.members(plan.stage_gpus // plan.ep, plan.ep),
            pipeline=fabric.members(min(2, plan.pp), plan.stage_gpus),
        )


class LayerTraffic(NamedTuple):
    """The exchanges of a rank for one layer and one micro-batch."""

    tensor_forward: tuple[tuple[Operation, float], ...]
    """Each operation with the bytes of the whole tensor."""
    tensor_backward: tuple[tuple[Operation, float], ...]
    """Without recomputation; first those that can overlap with the product for the weights' gradient."""
    beside_weights: int
    context_bytes: float
    """Keys and values of the whole sequence."""
    expert_bytes: float
    """Tokens of one rank, counted once, that an all-to-all brings to their experts, or back."""
    expert_messages: int
    """All-to-alls of one pass: there and back."""


def layer_traffic(here: Slice, *, mixture: bool) -> LayerTraffic:
    """The traffic of one layer."""
    model, plan = here.model, here.plan
    hidden = here.tokens * model.hidden_size * _ELEMENT_BYTES
    # The experts of a mixture are not split over tensor-parallel ranks; only its attention is.
    blocks = 1 if mixture or here.software.parallel_blocks else 2
    forward: tuple[tuple[Operation, float], ...] = ()
    backward: tuple[tuple[Operation, float], ...] = ()
    beside = 0
    if plan.tp > 1 and plan.sequence_parallel:
        forward = (("all_gather", hidden), ("reduce_scatter", hidden)) * blocks
        # Overlapped with products: the input is gathered again, the gradient of the input is scattered.
        backward = (("all_gather", hidden), ("reduce_scatter", hidden)) * blocks + (("all_gather", hidden),) * blocks
        beside = 2 * blocks
    elif plan.tp > 1:
        forward = (("all_reduce", hidden),) * blocks
        backward = (("all_reduce", hidden),) * blocks
        beside = blocks
    context = 0.0
    if plan.cp > 1:
        kv = 2 * model.kv_heads * model.head_width / plan.tp
        context = plan.micro_batch * here.sequence * kv * _ELEMENT_BYTES
    tokens = 0.0
    if mixture and plan.ep > 1:
        # Sequence parallelism leaves each tensor-parallel rank its own share of the tokens.
        tokens = here.tokens / plan.tp * model.hidden_size * _ELEMENT_BYTES
    return LayerTraffic(forward, backward, beside, context, tokens, 2 if tokens else 0)


class StepTraffic(NamedTuple):
    """Bytes that the busiest rank sends per step, by dimension of the plan."""

    tensor: float
    context: float
    expert: float
    pipeline: float
    data: float


def step_traffic(job: Job, plan: Plan, software: Software) -> StepTraffic:
    """Bytes that one rank of the first stage sends; exchanges by a laconic strategy are counted by the strategy."""
    here = Slice(job.model, plan, job.sequence, software)
    micro_batches = plan.num_micro_batches(job.global_batch)
    tensor = context = expert = 0.0
    for mixture, count in zip((False, True), stage_layers(job.model, plan, 0), strict=True):
        if not count:
            continue
        layer = layer_traffic(here, mixture=mixture)
        again = layer.tensor_forward if plan.recompute == "full" else ()
        for operation, nbytes in (*layer.tensor_forward, *layer.tensor_backward, *again):
            tensor += count * micro_batches * (2 if operation == "all_reduce" else 1) * (plan.tp - 1) / plan.tp * nbytes
        context += count * micro_batches * 3 * (plan.cp - 1) / plan.cp * layer.context_bytes
        passes = 3 if plan.recompute == "full" else 2
        copies = job.model.num_experts_per_tok * (plan.ep - 1) / plan.ep
        expert += count * micro_batches * passes * layer.expert_messages * copies * layer.expert_bytes
    hidden = here.tokens * job.model.hidden_size * _ELEMENT_BYTES
    if plan.sequence_parallel or software.scatter_gather:
        hidden /= plan.tp
    # The first stage sends forward; with several groups of layers it also sends gradients back, of all but the first.
    messages = (2 * plan.interleave - 1) * micro_batches if plan.pp > 1 else 0
    return StepTraffic(tensor, context, expert, messages * hidden, _data_bytes(job, plan, software, micro_batches))


def _data_bytes(job: Job, plan: Plan, software: Software, micro_batches: int) -> float:
    found = stage_parameters(job.model, plan, 0)
    shared, routed = replicas(plan), expert_replicas(plan)
    sent = found.shared * (shared - 1) / shared + found.routed * (routed - 1) / routed
    scatters, gathers = exchanges(plan, software, micro_batches)
    if plan.zero == 0:
        return 2 * scatters * software.gradient_bytes * sent
    if plan.gathers_layers:
        return micro_batches * (2 * _ELEMENT_BYTES + software.gradient_bytes) * sent
    return (scatters * software.gradient_bytes + gathers * _ELEMENT_BYTES) * sent


def exchanges(plan: Plan, software: Software, micro_batches: int) -> tuple[int, int]:
    """How often a step exchanges gradients, and how often it gathers parameters; not for layers gathered one by one.

    A rank that keeps gradients of its shard alone (zero=2) cannot add up those of several micro-batches before it
    scatters them.
    """
    every = software.exchanges_every_micro_batch
    return micro_batches if every or plan.zero == 2 else 1, micro_batches if every and plan.zero == 2 else 1
