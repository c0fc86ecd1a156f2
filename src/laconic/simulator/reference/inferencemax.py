"""How InferenceMAX runs its benchmark: the lengths of requests and the settings with which it starts the frameworks.

Most rows of the published table of serving are from InferenceMAX, and no column says so. Its rows are recognized by
their lengths, which hardly any other row has. The settings are those of most of its public start scripts, except the
passes and the time per request of TensorRT-LLM, which were estimated from rows (reference/serving.py).

Reference: github.com/SemiAnalysisAI/InferenceX, benchmarks/single_node (formerly InferenceMAX).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from laconic.simulator.serving.deployment import Deployment
from laconic.simulator.serving.frameworks import Framework

LENGTHS = frozenset({(1024, 1024), (1024, 8192), (8192, 1024)})
"""Tokens of a prompt and of an answer."""
SHORTEST = 0.8
"""Lengths are drawn between this share of the length in the row and all of it."""

_REQUEST_S = 13e-3
_PASSES_BEFORE_FIRST: Mapping[tuple[str, str, str], float] = {
    ("trtllm", "deepseek-v3", "1.2"): 16.0,
    ("trtllm", "deepseek-v3", "1.3"): 16.0,
    ("trtllm", "deepseek-v3", ""): 23.0,
    ("trtllm", "gpt-oss-120b", ""): 1.0,
    ("trtllm", "llama3-70b", ""): 1.5,
    ("sglang", "deepseek-v3", "0.5.9"): 8.0,
    ("sglang", "deepseek-v3", "0.5.10"): 8.0,
}
"""Framework, model and beginning of the version -> passes that go by before a first token. Others have the passes
of the framework."""
_POLLS_AT_INTERVALS = frozenset({"deepseek-v3", "qwen3.5-397b-a17b"})
"""Models that SGLang serves with --scheduler-recv-interval, on Blackwell."""
_FEW_CLIENTS, _POLL_PASSES_FEW, _POLL_PASSES = 16, 10, 30
"""The interval is shorter below this number of clients."""


def recipe(framework: Framework, deployment: Deployment, *, version: str, clients: int) -> Framework:
    """The framework as InferenceMAX starts it."""
    name, model = framework.name, deployment.model.name
    # --kv-cache-dtype fp8, in most scripts.
    framework = replace(framework, kv_bytes=1.0)
    if name == "sglang" and model in _POLLS_AT_INTERVALS and deployment.device.is_blackwell:
        framework = replace(framework, poll_passes=_POLL_PASSES_FEW if clients < _FEW_CLIENTS else _POLL_PASSES)
    for (named, served, beginning), late in _PASSES_BEFORE_FIRST.items():
        if (named, served) == (name, model) and version.startswith(beginning):
            framework = replace(framework, passes_before_first=late)
            return replace(framework, request_s=_REQUEST_S) if name == "trtllm" else framework
    return framework
