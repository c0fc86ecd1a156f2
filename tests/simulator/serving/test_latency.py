"""Serving: an ideal network equals the roofline, the network's share is what it adds, and limits are said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.cluster.collective_costs import OPERATIONS, CollectiveCosts, SizeCurve, System
from laconic.errors import ConfigurationError
from laconic.simulator.serving import (
    Deployment,
    ForwardPass,
    Framework,
    Load,
    aggregated,
    disaggregated,
    serving_device,
)
from laconic.simulator.serving.models import served_model

BARE = Framework(name="bare", step_s=0.0, sequence_s=0.0, layer_s=0.0, one_shot=False)


def network(seconds: float) -> CollectiveCosts:
    """Every operation takes that long, whatever it moves."""
    flat = SizeCurve((1.0, 1e15), (seconds, seconds))
    return CollectiveCosts(System(name="flat", curves={name: {2: flat, 4: flat, 8: flat} for name in OPERATIONS}))


def forward(tp: int, seconds: float = 1e-12, framework: Framework = BARE, model: str = "llama3-70b") -> ForwardPass:
    deployment = Deployment(model=served_model(model), device=serving_device("h100_sxm"), precision="fp8", tp=tp)
    return ForwardPass(deployment, framework, network(seconds))


def test_one_token_on_an_ideal_network_reads_the_weights_once() -> None:
    for tp in (2, 4, 8):
        model, device = served_model("llama3-70b"), serving_device("h100_sxm")
        weights = sum(p.inputs * p.outputs for p in model.projections()) * model.num_hidden_layers
        weights += model.hidden_size * model.vocab_size
        cache = 1000 * 2 * model.num_hidden_layers * model.kv_heads * model.head_width * BARE.kv_bytes
        expected = (weights + cache) / tp / (device.memory_bytes_per_s * device.memory_share)
        assert forward(tp).decode(1, 1000).seconds == pytest.approx(expected, rel=1e-6)


def test_the_network_adds_two_all_reduces_per_layer() -> None:
    layers = served_model("llama3-70b").num_hidden_layers
    for pass_s in (lambda f: f.decode(16, 500), lambda f: f.prefill(512, 512)):
        ideal, slow = pass_s(forward(4)), pass_s(forward(4, 20e-6))
        assert slow.seconds - ideal.seconds == pytest.approx(2 * layers * 20e-6, rel=1e-6)
        assert slow.network_s == pytest.approx(2 * layers * 20e-6)
    assert forward(1, 1.0).decode(16, 500).network_s == 0


def test_kernels_between_products_are_not_divided_by_tensor_parallelism() -> None:
    model, device = served_model("llama3-70b"), serving_device("h100_sxm")
    moved = 2 * model.hidden_size * 4096 * device.moves * model.num_hidden_layers
    for tp in (2, 8):
        found = forward(tp).prefill(4096, 4096).layers_s
        assert found == pytest.approx(moved / (device.memory_bytes_per_s * device.memory_share))


@pytest.mark.parametrize("apart", [False, True])
def test_accepted_tokens_shorten_the_time_per_token_alone(*, apart: bool) -> None:
    load = Load(input_tokens=1024, output_tokens=256)
    frameworks = (replace(BARE, passes_before_first=10.0, accepted=accepted) for accepted in (1.0, 2.0))
    workers = (forward(8, framework=framework) for framework in frameworks)
    plain, speculative = (disaggregated(one, one, load) if apart else aggregated(one, load) for one in workers)
    assert speculative.token_s == pytest.approx(plain.token_s / 2)
    assert speculative.first_token_s == pytest.approx(plain.first_token_s)


def test_a_single_request_takes_its_passes() -> None:
    load = Load(input_tokens=4096, output_tokens=256)
    here = forward(8)
    found = aggregated(here, load)
    # Between the sizes at which passes are computed there are straight lines.
    assert found.first_token_s == pytest.approx(here.prefill(4096, 4096).seconds, rel=0.01)
    assert found.token_s == pytest.approx(here.decode(1, 4096 + 128).seconds, rel=0.01)


def test_aggregated_stalls_by_other_prompts_and_disaggregated_does_not() -> None:
    load = Load(input_tokens=4096, output_tokens=256, concurrency=16)
    here = forward(8)
    decode_s = here.decode(16, 4096 + 128).seconds
    prefill_s = here.prefill(4096, 4096).seconds
    together, apart = aggregated(here, load), disaggregated(here, here, load, transfer_bytes_per_s=1e9)
    # Of 16 requests each is passed by the prompts of 15 others, which give it a token each.
    assert together.token_s == pytest.approx(decode_s + 15 * (prefill_s - decode_s) / 256, rel=0.1)
    assert together.first_token_s > prefill_s
    assert apart.token_s == pytest.approx(decode_s)
    model = served_model("llama3-70b")
    cache = 4096 * 2 * model.num_hidden_layers * model.kv_heads / 8 * model.head_width * BARE.kv_bytes
    assert apart.cache_transfer_s == pytest.approx(cache / 1e9)
    assert apart.first_token_s >= prefill_s + apart.cache_transfer_s


def test_what_a_framework_lets_go_by_comes_before_the_first_token() -> None:
    load = Load(input_tokens=512, output_tokens=64, concurrency=4)
    bare = aggregated(forward(8), load)
    late = aggregated(forward(8, framework=replace(BARE, request_s=0.1, client_s=0.01, passes_before_first=20.0)), load)
    assert late.token_s == bare.token_s
    assert late.first_token_s - bare.first_token_s == pytest.approx(0.1 + 4 * 0.01 + 20 * bare.token_s)


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(
        ["llama3-8b", "deepseek-v3", "qwen3.5-397b-a17b", "gpt-oss-120b", "kimi-k2.5", "minimax-m2.5"]
    ),
    tp=st.sampled_from([1, 2, 4]),
    sequences=st.integers(1, 256),
    context=st.integers(1, 32_768),
)
def test_more_sequences_longer_contexts_and_slower_networks_never_take_less_time(
    model: str, tp: int, sequences: int, context: int
) -> None:
    here = forward(tp, 5e-6, model=model)
    least = here.decode(sequences, context).seconds
    assert least <= here.decode(sequences + 1, context).seconds
    assert least < here.decode(sequences, context + 1).seconds
    assert least <= forward(tp, 6e-6, model=model).decode(sequences, context).seconds
    assert here.prefill(sequences, context).seconds < here.prefill(sequences + 1, context + 1).seconds


def test_experts_are_read_as_often_as_tokens_need_them() -> None:
    one = forward(8, model="qwen3-235b-a22b").decode(1, 1).products_s
    many = forward(8, model="qwen3-235b-a22b").decode(64, 1).products_s
    model, device = served_model("qwen3-235b-a22b"), serving_device("h100_sxm")
    per_expert = sum(p.inputs * p.outputs for p in model.projections() if p.routed)
    used = 128 * (1 - (1 - 8 / 128) ** 64)
    read = model.num_hidden_layers * per_expert * (used - 8) / 8
    assert many - one == pytest.approx(read / (device.memory_bytes_per_s * device.memory_share), rel=0.02)


def test_a_cache_that_is_too_small_makes_requests_wait() -> None:
    load = Load(input_tokens=8192, output_tokens=1024, concurrency=8)
    tight = forward(1)
    room = replace(tight.deployment, device=replace(tight.deployment.device, memory_bytes=200e9))
    free = aggregated(ForwardPass(room, BARE, tight.costs), load)
    assert aggregated(tight, load).first_token_s > 5 * free.first_token_s


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tp": 0}, "tp must be at least 1"),
        ({"ep": 2}, "has no experts; use ep=1"),
        ({"dp": 2}, "use more workers"),
        ({"model": served_model("deepseek-v3"), "tp": 8, "ep": 3}, "the nearest is ep=2"),
        ({"model": served_model("deepseek-v3"), "tp": 20, "ep": 9}, "the nearest is ep=10"),
        ({"tp": 10**12}, "tp must be at most 1048576"),
    ],
)
def test_deployments_that_cannot_be_are_refused(change: dict[str, object], expected: str) -> None:
    base = {"model": served_model("llama3-8b"), "device": serving_device("h100_sxm")}
    with pytest.raises(ConfigurationError) as caught:
        Deployment(**(base | change))  # pyrefly: ignore
    assert expected in str(caught.value)
    with pytest.raises(ConfigurationError, match="concurrency must be at least 1"):
        Load(input_tokens=1, output_tokens=1, concurrency=0)
    with pytest.raises(ConfigurationError, match=r"concurrency must be at most 65536, got 1000000000. .* several"):
        Load(input_tokens=1, output_tokens=1, concurrency=10**9)
