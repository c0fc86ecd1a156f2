"""Time: on an ideal network the roofline and the bubble exactly; a real one only adds; many GPUs cost no more."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import ConfigurationError
from laconic.simulator.parallel.accelerator import A100, Accelerator
from laconic.simulator.parallel.fabric import IDEAL, Fabric, Members, a100_nodes
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.software import MEGATRON_2022, MEGATRON_CORE, Software
from laconic.simulator.parallel.step import step_time
from laconic.simulator.parallel.system import Job, System
from laconic.simulator.parallel.work import Product
from laconic.workload.transformer import Transformer
from laconic.workload.transformer_presets import MODELS, gpt
from tests.simulator.parallel.test_plan import plans

# Whole tiles and waves, no prologue, full shares: a product takes its operations divided by the peak, or its bytes.
EXACT = Accelerator(
    name="exact",
    flops_per_s=1e14,
    memory_bytes_per_s=1e12,
    memory_bytes=1e15,
    multiprocessors=1,
    matmul_share=1.0,
    memory_share=1.0,
    attention_share=1.0,
    prologue=0,
)
PLAIN = Software(name="plain", optimizer_bytes=0.0)
MODEL = Transformer(
    hidden_size=1024, num_hidden_layers=8, num_attention_heads=8, vocab_size=1024, intermediate_size=2048, gated=False
)


def _ideal(plan: Plan, *, sequence: int = 1024, batch: int = 16, software: Software = PLAIN) -> float:
    job = Job(model=MODEL, sequence=sequence, global_batch=batch)
    return step_time(job, plan, System(accelerator=EXACT, fabric=IDEAL, software=software)).total_s


def _layer_by_hand(micro_batch: int, sequence: int, tp: int, shared: int) -> tuple[float, float]:
    """Forward and backward seconds of one layer, written out without the package's items."""
    tokens, hidden, inner = micro_batch * sequence, 1024, 2048
    forward = backward = 0.0
    for rows, columns in ((hidden, 3 * hidden / tp), (hidden / tp, hidden), (hidden, inner / tp), (inner / tp, hidden)):
        one = max(2 * tokens * rows * columns / 1e14, 2 * (tokens * rows + rows * columns + tokens * columns) / 1e12)
        forward, backward = forward + one, backward + 2 * one
    attention = 4 * tokens * sequence / 2 * hidden / tp / 1e14
    norms_and_additions = 2 * (4 + 6) * tokens * hidden / shared / 1e12
    activation = 4 * tokens * inner / tp / 1e12
    forward += attention + norms_and_additions + activation
    backward += 2.5 * attention + 2 * (6 + 6) * tokens * hidden / shared / 1e12 + 6 * tokens * inner / tp / 1e12
    return forward, backward


def _ends_by_hand(micro_batch: int, sequence: int, tp: int) -> tuple[float, float]:
    """Seconds of the embedding, and of the output layer with the loss, forward and backward together."""
    tokens, hidden, words = micro_batch * sequence, 1024, 1024 / tp
    embedding = 2 * 8 * tokens * hidden / 1e12
    one = max(2 * tokens * hidden * words / 1e14, 2 * (tokens * hidden + hidden * words + tokens * words) / 1e12)
    return embedding, 3 * one + (18 + 10) * tokens * words / 1e12


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("pp", "interleave"), [(1, 1), (2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_an_ideal_network_gives_the_roofline_and_the_bubble_exactly(
    pp: int, interleave: int, tp: int, sequence_parallel: bool, recompute: str
) -> None:
    plan = Plan(
        dp=2,
        tp=tp,
        pp=pp,
        micro_batch=2,
        schedule="interleaved" if interleave > 1 else "1f1b",
        interleave=interleave,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
    )
    forward, backward = _layer_by_hand(2, 1024, tp, tp if sequence_parallel else 1)
    layer = forward + backward + (forward if recompute == "full" else 0.0)
    embedding, head = _ends_by_hand(2, 1024, tp)
    stages = [layer * 8 / pp for _ in range(pp)]
    stages[0] += embedding
    stages[-1] += head
    micro_batches = 16 // (2 * 2)
    expected = micro_batches * max(stages) + (sum(stages) - max(stages)) / interleave
    assert _ideal(plan) == pytest.approx(expected, rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(
    plans(), st.sampled_from((MODELS["llama3-70b"], MODELS["mixtral-8x7b"], gpt("g", hidden=3072, layers=48, heads=24)))
)
def test_a_network_only_adds_and_a_faster_one_adds_less(plan: Plan, model: Transformer) -> None:
    if model.num_attention_heads % plan.tp or (plan.ep > 1 and (not model.is_mixture or model.num_experts % plan.ep)):
        return
    job = Job(model=model, sequence=6144, global_batch=plan.dp * plan.micro_batch * 4)
    times = []
    for fabric in (IDEAL, a100_nodes(100e9), a100_nodes(12.5e9), a100_nodes(1e9)):
        found = step_time(job, plan, System(accelerator=A100, fabric=fabric, software=MEGATRON_CORE))
        assert all(part >= 0 for part in vars(found).values()), found
        times.append(found.total_s)
    assert times == sorted(times)


def test_zero_bubble_lies_between_no_bubble_and_1f1b() -> None:
    plan = Plan(pp=4, micro_batch=1)
    filled = replace(plan, schedule="zero_bubble")
    assert _ideal(Plan(pp=4, micro_batch=1), batch=16) > _ideal(filled, batch=16) > _ideal(plan, batch=16) * 16 / 19


def test_recomputation_costs_what_it_repeats() -> None:
    none, selective, full = (_ideal(Plan(recompute=kind)) for kind in ("none", "selective", "full"))
    forward, _ = _layer_by_hand(1, 1024, 1, 1)
    attention = 4 * 1024 * 512 * 1024 / 1e14
    assert full - none == pytest.approx(16 * 8 * forward)
    assert selective - none == pytest.approx(16 * 8 * attention)


def test_waves_are_whole() -> None:
    """One row more than fits into the last wave costs a whole wave."""
    device = replace(EXACT, multiprocessors=108, memory_bytes_per_s=1e15)
    full = device.matmul_s(Product(256 * 108, 128, 4096))
    more = device.matmul_s(Product(256 * 108 + 1, 128, 4096))
    assert full == pytest.approx(2 * 256 * 108 * 128 * 4096 / 1e14)
    assert 1.0 < more / full <= 2.0
    assert more > 1.3 * full


def test_collectives_equal_their_formulas() -> None:
    fabric = Fabric(
        inside_bytes_per_s=200e9, between_bytes_per_s=20e9, launch_s=1e-5, inside_hop_s=1e-6, between_hop_s=1e-5
    )
    assert fabric.seconds("all_reduce", 8e9, Members(8, 8)) == pytest.approx(1e-5 + 14e-6 + 2 * 7 / 8 * 8e9 / 200e9)
    # Two nodes of 8: 16 NICs' worth of 20 GB/s is less than the links inside give, a tree has fewer hops than a ring.
    ring = 1e-5 + 2 * (7e-6 + 1e-5) + 2 * 15 / 16 * 8e9 / 160e9
    assert fabric.seconds("all_reduce", 8e9, Members(16, 8)) == pytest.approx(ring)
    assert fabric.seconds("all_gather", 8e9, Members(4, 1)) == pytest.approx(1e-5 + 3e-5 + 3 / 4 * 8e9 / 20e9)
    # Several, but not all, GPUs of a node: each NIC carries one direction.
    assert fabric.seconds("all_gather", 8e9, Members(8, 4)) == pytest.approx(1e-5 + 6e-6 + 1e-5 + 7 / 8 * 8e9 / 40e9)
    assert fabric.seconds("all_to_all", 8e9, Members(16, 8)) == pytest.approx(1e-5 + 1e-5 + 8e9 * 8 / 16 / 20e9)
    assert fabric.seconds("send", 1e9, Members(2, 1)) == pytest.approx(1e-5 + 1e-5 + 1e9 / 20e9)
    assert fabric.seconds("all_reduce", 8e9, Members(1, 1)) == 0.0
    # A token with 2 experts on 2 nodes reaches 1.5 nodes on average, half of them not its own.
    dispatched = fabric.dispatch_s(1e9, 2, Members(16, 8))
    assert dispatched == pytest.approx(1e-5 + 1.1e-5 + 1e9 * 1.5 / 2 / 20e9)


def test_16384_gpus_cost_what_one_costs() -> None:
    job = Job(model=MODELS["llama3-405b"], sequence=8192, global_batch=4096)
    plan = Plan(dp=128, tp=8, pp=16, zero=1, recompute="full", sequence_parallel=True)
    assert plan.gpus == 16_384
    began = time.perf_counter()
    found = step_time(job, plan, System(accelerator=A100, fabric=a100_nodes(25e9), software=MEGATRON_2022))
    assert time.perf_counter() - began < 1.0
    assert found.total_s > 0


def test_messages_between_stages_hide_behind_work_and_no_further() -> None:
    """Overlapped messages cost nothing on a fast network; on a slow one each micro-batch waits for what is left."""
    job = Job(model=MODELS["llama3-8b"], sequence=4096, global_batch=16)
    plan = Plan(pp=8, schedule="interleaved", interleave=2)

    def at(bytes_per_s: float, software: Software) -> float:
        fabric = replace(IDEAL, between_bytes_per_s=bytes_per_s, gpus_per_node=1)
        return step_time(job, plan, System(accelerator=A100, fabric=fabric, software=software)).pipeline_s

    apart = replace(MEGATRON_CORE, overlaps_pipeline=False)
    message = 4096 * job.model.hidden_size * 2
    assert at(1e8, apart) == pytest.approx(16 * 2 * 2 * message / 1e8)
    assert at(100e9, MEGATRON_CORE) == 0
    assert 0 < at(1e8, MEGATRON_CORE) < at(1e8, apart)
    # Twice the bytes on the wire: all that they add is exposed, once nothing more is hidden.
    assert at(1e7, MEGATRON_CORE) - at(2e7, MEGATRON_CORE) == pytest.approx(16 * 4 * message * (1e-7 - 0.5e-7))


def test_of_several_stages_in_a_node_some_send_over_the_network() -> None:
    job = Job(model=MODELS["llama3-8b"], sequence=4096, global_batch=16)
    fabric = replace(IDEAL, between_bytes_per_s=1e8, gpus_per_node=4)
    system = System(accelerator=A100, fabric=fabric, software=replace(MEGATRON_CORE, overlaps_pipeline=False))
    message = 4096 * job.model.hidden_size * 2
    assert step_time(job, Plan(pp=4), system).pipeline_s == 0
    assert step_time(job, Plan(pp=8), system).pipeline_s == pytest.approx(16 * message / 1e8)
    assert step_time(job, Plan(pp=2, dp=4), system).pipeline_s == pytest.approx(4 * 2 * message / 1e8)


def _exchanged(plan: Plan, software: Software, micro_batches: int) -> float:
    job = Job(model=MODEL, sequence=1024, global_batch=8 * micro_batches)
    return step_time(job, plan, System(accelerator=EXACT, fabric=a100_nodes(25e9), software=software)).exchange_s


def test_shards_of_gradients_are_scattered_in_every_micro_batch() -> None:
    once, twice = (_exchanged(Plan(dp=8, zero=2), PLAIN, number) for number in (1, 2))
    sharded_state = _exchanged(Plan(dp=8, zero=1), PLAIN, 1)
    assert once == pytest.approx(sharded_state)
    assert once < twice < 2 * once, "parameters are gathered once"
    fsdp = replace(PLAIN, exchanges_every_micro_batch=True)
    for zero in (0, 2):
        plan = Plan(dp=8, zero=zero)
        assert _exchanged(plan, fsdp, 3) == pytest.approx(3 * _exchanged(plan, fsdp, 1))
    assert _exchanged(Plan(dp=8, zero=1), PLAIN, 3) == pytest.approx(sharded_state)


def test_hidden_exchanges_slow_down_compute() -> None:
    overlapped = replace(PLAIN, overlaps_gradients=True, overlaps_parameters=True)
    plan = Plan(dp=8, zero=2)
    hidden = _exchanged(plan, overlapped, 1)
    assert hidden < _exchanged(plan, replace(overlapped, interference=0.5), 1) < _exchanged(plan, PLAIN, 1)


@pytest.mark.parametrize("change", [{"sequence": 0}, {"global_batch": 10**30}])
def test_jobs_have_sizes_that_can_be(change: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"(sequence|global_batch) must be at (least 1|most 1000000000), got"):
        Job(**{"model": MODEL, "sequence": 1024, "global_batch": 8, **change})  # pyrefly: ignore
