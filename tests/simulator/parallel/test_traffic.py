"""Bytes per dimension equal closed formulas."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.simulator.parallel.plan import Plan
from laconic.simulator.parallel.software import MEGATRON_2021, MEGATRON_2022, MEGATRON_CORE
from laconic.simulator.parallel.system import Job
from laconic.simulator.parallel.traffic import step_traffic
from laconic.workload.transformer_presets import MODELS, gpt

GPT = gpt("g", hidden=1024, layers=16, heads=16)


@settings(deadline=None)
@given(
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 4)),
    st.integers(1, 4),
    st.tuples(st.booleans(), st.booleans()),
)
def test_tensor_pipeline_and_data(tp: int, pp: int, dp: int, micro_batch: int, options: tuple[bool, bool]) -> None:
    shares, repeats = options[0] and tp > 1, options[1]
    recompute = "full" if repeats else "none"
    plan = Plan(dp=dp, tp=tp, pp=pp, micro_batch=micro_batch, recompute=recompute, sequence_parallel=shares)
    sequence, micro_batches = 2048, 3
    job = Job(model=GPT, sequence=sequence, global_batch=dp * micro_batch * micro_batches)
    found = step_traffic(job, plan, MEGATRON_2021)
    hidden = micro_batch * sequence * 1024 * 2
    layers = 16 // pp
    if shares:
        # All-gather and reduce-scatter, twice per pass and layer; two gathers more in the backward pass.
        count = (4 + 6 + (4 if repeats else 0)) * (tp - 1) / tp
    else:
        count = (2 + 2 + (2 if repeats else 0)) * 2 * (tp - 1) / tp
    assert found.tensor == pytest.approx(micro_batches * layers * count * hidden)
    # Each tensor-parallel rank sends its share to the next stage.
    assert found.pipeline == pytest.approx(micro_batches * hidden / tp if pp > 1 else 0.0)
    per_layer = (12 * 1024**2 + 7 * 1024) / tp + 0.0
    assert found.context == found.expert == 0.0
    words = (51_200 + 2048) * 1024 / tp
    norms_and_row_biases = 6 * 1024 * (1 - 1 / tp)
    rough = 2 * 2 * (dp - 1) / dp * (layers * (per_layer + 6 * 1024 / tp + norms_and_row_biases) + words)
    assert found.data == pytest.approx(rough, rel=2e-3)


@pytest.mark.parametrize(("zero", "times"), [(0, 2 * 4), (1, 4 + 2), (2, 5 * 4 + 2), (3, 5 * (2 + 2 + 4))])
def test_sharding_sends_what_zero_says(zero: int, times: int) -> None:
    model = MODELS["llama3-8b"]
    job = Job(model=model, sequence=1024, global_batch=8 * 5)
    found = step_traffic(job, Plan(dp=8, zero=zero), MEGATRON_2022)
    assert found.data == pytest.approx(times * 7 / 8 * model.num_parameters)


def test_experts_and_context() -> None:
    model = MODELS["mixtral-8x7b"]
    job = Job(model=model, sequence=4096, global_batch=8)
    found = step_traffic(job, Plan(dp=4, ep=4, cp=2), MEGATRON_CORE)
    tokens = 4096 / 2
    # Two micro-batches, 32 layers, to the experts and back in both passes; 2 experts per token, 3 of 4 elsewhere.
    assert found.expert == pytest.approx(2 * 32 * 4 * tokens * 4096 * 2 * 2 * 3 / 4)
    # Keys and values of the sequence, once forward and twice backward, half of them from the other rank.
    assert found.context == pytest.approx(2 * 32 * 3 * 4096 * (2 * 1024) * 2 / 2)
