"""Memory: the formula of Korthikanti et al., real tensors on real processes, and what does not fit."""

from __future__ import annotations

import pytest

from laconic.simulator.parallel.accelerator import A100
from laconic.simulator.parallel.fabric import a100_nodes
from laconic.simulator.parallel.layer import Slice
from laconic.simulator.parallel.memory import all_kept_bytes, fits, kept_bytes, memory
from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.software import MEGATRON_2022, MEGATRON_CORE, Software
from laconic.simulator.parallel.system import Job, System
from laconic.workload.transformer_presets import MODELS, gpt
from tests.processes import run_processes
from tests.simulator.parallel.sharded_ranks import TINY

EAGER = Software(name="32-bit parameters", parameter_bytes=4, stored_gradient_bytes=4, state_bytes=8)


@pytest.mark.parametrize("tp", [1, 8])
def test_activations_are_those_of_the_paper(tp: int) -> None:
    """arXiv:2205.05198, Table 2: s b h (34 + 5 a s / h), its parts divided by t as there."""
    s, b, h, a = 2048, 4, 6144, 64
    model = gpt("g", hidden=h, layers=48, heads=a)

    def kept(recompute: str, *, shared: bool = False) -> float:
        plan = Plan(tp=tp, micro_batch=b, recompute=recompute, sequence_parallel=shared)  # pyrefly: ignore
        return kept_bytes(Slice(model, plan, s, MEGATRON_2022), mixture=False)

    assert kept("none") == pytest.approx(s * b * h * (10 + 24 / tp + 5 * a * s / (h * tp)))
    assert kept("selective") == pytest.approx(s * b * h * (10 + 24 / tp))
    assert kept("full") == pytest.approx(2 * s * b * h)
    if tp > 1:
        assert kept("none", shared=True) == pytest.approx(s * b * h / tp * (34 + 5 * a * s / h))
        assert kept("selective", shared=True) == pytest.approx(34 * s * b * h / tp)


def test_states_are_sharded_as_zero_says() -> None:
    model = MODELS["llama3-8b"]
    job = Job(model=model, sequence=128, global_batch=8)
    found = [memory(job, Plan(dp=8, zero=zero), EAGER) for zero in range(4)]
    n = model.num_parameters
    assert [round(one.optimizer / n, 9) for one in found] == [8, 1, 1, 1]
    assert [round(one.gradients / n, 9) for one in found] == [4, 4, 0.5, 0.5]
    assert [round(one.parameters / n, 9) for one in found] == [4, 4, 4, 0.5]


def test_experts_are_sharded_among_those_that_have_them() -> None:
    model = MODELS["mixtral-8x7b"]
    job = Job(model=model, sequence=128, global_batch=16)
    alone = memory(job, Plan(dp=16), EAGER)
    spread = memory(job, Plan(dp=16, ep=8), EAGER)
    experts = 32 * 8 * 3 * 4096 * 14_336
    assert alone.parameters - spread.parameters == pytest.approx(4 * experts * 7 / 8)
    # Two ranks have the same experts, so their optimizer's state is halved; all 16 have the rest.
    sharded = memory(job, Plan(dp=16, ep=8, zero=1), EAGER)
    assert sharded.optimizer == pytest.approx(8 * (experts / 8 / 2 + (model.num_parameters - experts) / 16))


def test_what_does_not_fit_is_said() -> None:
    system = System(accelerator=A100, fabric=a100_nodes(25e9), software=MEGATRON_CORE)
    job = Job(model=MODELS["llama3-70b"], sequence=4096, global_batch=64)
    assert not fits(memory(job, Plan(dp=8, recompute="full"), MEGATRON_CORE), system)
    assert fits(
        memory(job, Plan(dp=8, tp=8, pp=2, zero=1, recompute="full", sequence_parallel=True), MEGATRON_CORE), system
    )
    assert memory(job, Plan(dp=8), MEGATRON_CORE, residual_bytes=4e9).residuals == 4e9


def test_more_micro_batches_in_flight_keep_more() -> None:
    job = Job(model=MODELS["llama3-8b"], sequence=4096, global_batch=64)
    few, many = (memory(job, Plan(pp=pp, recompute="none"), MEGATRON_CORE).activations for pp in (1, 4))
    assert many == pytest.approx(few), "the first of 4 stages keeps 4 micro-batches of a quarter of the layers"
    interleaved = memory(job, Plan(pp=4, schedule="interleaved", interleave=2), MEGATRON_CORE).activations
    assert interleaved == pytest.approx(few * (1 + 3 / (4 * 2)))
    here = Slice(job.model, Plan(), 4096, MEGATRON_CORE)
    assert few == pytest.approx(32 * all_kept_bytes(here, mixture=False))


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_states_equal_the_real_tensors_of_fsdp2_and_tensor_parallelism() -> None:
    tp, fsdp = 2, 2
    plan = Plan(dp=fsdp, tp=tp, zero=3)
    expected = memory(Job(model=TINY, sequence=8, global_batch=fsdp), plan, EAGER)
    for result in run_processes(
        "tests.simulator.parallel.sharded_ranks:state_bytes",
        world_size=tp * fsdp,
        arguments={"tp": tp, "fsdp": fsdp},
        timeout_s=100,
    ):
        assert result.value == {
            "parameters": expected.parameters,
            "gradients": expected.gradients,
            "optimizer": expected.optimizer,
        }
