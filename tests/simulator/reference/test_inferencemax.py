"""The settings with which InferenceMAX starts the frameworks."""

from __future__ import annotations

import pytest

from laconic.simulator.reference.inferencemax import recipe
from laconic.simulator.serving.deployment import Deployment
from laconic.simulator.serving.devices import serving_device
from laconic.simulator.serving.frameworks import FRAMEWORKS
from laconic.simulator.serving.models import served_model


def deployment(model: str, device: str) -> Deployment:
    return Deployment(model=served_model(model), device=serving_device(device), precision="fp8", tp=8)


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
    found = recipe(FRAMEWORKS["sglang"], deployment(model, device), version="", clients=clients)
    assert found.poll_passes == interval


@pytest.mark.parametrize(
    ("framework", "version", "passes"),
    [
        ("trtllm", "1.2.0rc6.post3", 16.0),
        ("trtllm", "1.3.0rc1", 16.0),
        ("trtllm", "1.1.0rc2", 23.0),
        ("trtllm", "", 23.0),
        ("sglang", "0.5.9", 8.0),
    ],
)
def test_the_version_decides_the_passes_before_a_first_token(framework: str, version: str, passes: float) -> None:
    found = recipe(FRAMEWORKS[framework], deployment("deepseek-v3", "b200_sxm"), version=version, clients=8)
    assert found.passes_before_first == passes


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_model_without_settings_of_its_own_has_a_small_cache_and_nothing_else(name: str) -> None:
    framework = FRAMEWORKS[name]
    found = recipe(framework, deployment("zhipuai/GLM-5", "b200_sxm"), version="", clients=8)
    assert found.kv_bytes == 1.0
    assert (found.passes_before_first, found.request_s) == (framework.passes_before_first, framework.request_s)
