"""The settings with which InferenceMAX starts the frameworks."""

from __future__ import annotations

import pytest

from laconic.simulator.reference.inferencemax import recipe
from laconic.simulator.serving.deployment import Deployment
from laconic.simulator.serving.devices import serving_device
from laconic.simulator.serving.frameworks import FRAMEWORKS
from laconic.simulator.serving.load import Load
from laconic.simulator.serving.models import served_model


def deployment(model: str, device: str, tp: int = 8) -> Deployment:
    return Deployment(model=served_model(model), device=serving_device(device), precision="fp8", tp=tp)


def load(clients: int = 8, output_tokens: int = 1024) -> Load:
    return Load(input_tokens=1024, output_tokens=output_tokens, concurrency=clients)


@pytest.mark.parametrize(
    ("model", "device", "clients", "interval"),
    [
        ("deepseek-ai/DeepSeek-R1", "b200_sxm", 8, 10),
        ("deepseek-ai/DeepSeek-R1", "b200_sxm", 16, 30),
        ("Qwen/Qwen3.5-397B-A17B", "b200_sxm", 64, 30),
        ("Qwen/Qwen3.5-397B-A17B", "b300_sxm", 64, 30),
        ("Qwen/Qwen3.5-397B-A17B", "h200_sxm", 64, 1),
        ("zhipuai/GLM-5", "b200_sxm", 64, 1),
    ],
)
def test_sglang_looks_for_requests_at_intervals(model: str, device: str, clients: int, interval: int) -> None:
    found = recipe(FRAMEWORKS["sglang"], deployment(model, device), load(clients), version="")
    assert found.poll_passes == interval


@pytest.mark.parametrize(
    ("framework", "version", "passes"),
    [
        ("trtllm", "1.2.0rc6.post3", 10.0),
        ("trtllm", "1.3.0rc1", 10.0),
        ("trtllm", "1.1.0rc2", 20.0),
        ("trtllm", "", 20.0),
        ("sglang", "0.5.9", 8.0),
    ],
)
def test_the_version_decides_the_passes_before_a_first_token(framework: str, version: str, passes: float) -> None:
    found = recipe(FRAMEWORKS[framework], deployment("deepseek-v3", "b200_sxm"), load(), version=version)
    assert found.passes_before_first == passes


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_model_without_settings_of_its_own_has_a_small_cache_and_nothing_else(name: str) -> None:
    framework = FRAMEWORKS[name]
    found = recipe(framework, deployment("zhipuai/GLM-5", "b200_sxm"), load(), version="")
    assert found.kv_bytes == 1.0
    assert (found.passes_before_first, found.request_s) == (framework.passes_before_first, framework.request_s)


@pytest.mark.parametrize(("tp", "output_tokens", "passes"), [(1, 1024, 20), (4, 1024, 20), (8, 1024, 0), (4, 8192, 0)])
def test_prompts_of_llama_gather_in_tensorrt_llm(tp: int, output_tokens: int, passes: int) -> None:
    found = recipe(FRAMEWORKS["trtllm"], deployment("llama3-70b", "b200_sxm", tp), load(8, output_tokens), version="")
    assert found.batch_wait_passes == passes
    assert found.tokens_per_pass == 1024 + output_tokens + 200


@pytest.mark.parametrize(
    ("version", "accepted", "tokens"),
    [("1.2.0rc6.post3", 1.6, 8192), ("1.2.0rc6.post2", 1.0, 8192), ("1.1.0rc2.post2", 1.0, 1024 + 8 + 64)],
)
def test_deepseek_in_tensorrt_llm_speculates_and_budgets_by_version(version: str, accepted: float, tokens: int) -> None:
    found = recipe(FRAMEWORKS["trtllm"], deployment("deepseek-v3", "b200_sxm"), load(), version=version)
    assert (found.accepted, found.tokens_per_pass) == (accepted, tokens)
