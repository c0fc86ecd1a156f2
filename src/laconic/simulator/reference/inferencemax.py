"""How InferenceMAX runs its benchmark: the lengths of requests and the settings with which it starts the frameworks.

Most rows of the published table of serving are from InferenceMAX, and no column says so. Its rows are recognized by
their lengths, which hardly any other row has. The settings are those of most of its public start scripts, except the
passes and the time per request of TensorRT-LLM, the passes of SGLang, and how many tokens speculative decoding gets
accepted; these were estimated from rows (reference/serving.py).

Reference: github.com/SemiAnalysisAI/InferenceX, benchmarks/single_node (formerly InferenceMAX).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from laconic.simulator.serving.deployment import Deployment
from laconic.simulator.serving.frameworks import Framework
from laconic.simulator.serving.load import Load

LENGTHS = frozenset({(1024, 1024), (1024, 8192), (8192, 1024)})
"""Tokens of a prompt and of an answer."""
SHORTEST = 0.8
"""Lengths are drawn between this share of the length in the row and all of it."""

_REQUEST_S = 13e-3
_PASSES_BEFORE_FIRST: Mapping[tuple[str, str, str], float] = {
    ("trtllm", "deepseek-v3", "1.2"): 10.0,
    ("trtllm", "deepseek-v3", "1.3"): 10.0,
    ("trtllm", "deepseek-v3", ""): 20.0,
    ("trtllm", "gpt-oss-120b", ""): 1.0,
    ("trtllm", "llama3-70b", ""): 1.5,
    ("sglang", "deepseek-v3", "0.5.9"): 8.0,
    ("sglang", "deepseek-v3", "0.5.10"): 8.0,
    ("sglang", "qwen3.5-397b-a17b", "0.5.10"): 4.0,
}
"""Framework, model and beginning of the version -> passes that go by before a first token. Others have the passes
of the framework."""
_POLLS_AT_INTERVALS = frozenset({"deepseek-v3", "qwen3.5-397b-a17b"})
"""Models that SGLang serves with --scheduler-recv-interval, on Blackwell."""
_FEW_CLIENTS, _POLL_PASSES_FEW, _POLL_PASSES = 16, 10, 30
"""The interval is shorter below this number of clients."""
_SPECULATIVE_VERSION, _ACCEPTED = "1.2.0rc6.post3", 1.6
"""The version of TensorRT-LLM that runs DeepSeek with multi-token prediction, and the tokens of one of its passes."""


def recipe(framework: Framework, deployment: Deployment, load: Load, *, version: str) -> Framework:
    """The framework as InferenceMAX starts it."""
    name, model = framework.name, deployment.model.name
    # --kv-cache-dtype fp8, in most scripts.
    framework = replace(framework, kv_bytes=1.0)
    if name == "sglang" and model in _POLLS_AT_INTERVALS and deployment.device.is_blackwell:
        few = load.concurrency < _FEW_CLIENTS
        framework = replace(framework, poll_passes=_POLL_PASSES_FEW if few else _POLL_PASSES)
    if name == "trtllm":
        framework = _tensorrt_llm(framework, deployment, load, version)
    for (named, served, beginning), late in _PASSES_BEFORE_FIRST.items():
        if (named, served) == (name, model) and version.startswith(beginning):
            framework = replace(framework, passes_before_first=late)
            return replace(framework, request_s=_REQUEST_S) if name == "trtllm" else framework
    return framework


def _tensorrt_llm(framework: Framework, deployment: Deployment, load: Load, version: str) -> Framework:
    model = deployment.model.name
    if model == "llama3-70b":
        # --max_num_tokens $MAX_MODEL_LEN
        framework = replace(framework, tokens_per_pass=load.input_tokens + load.output_tokens + 200)
        if (load.input_tokens, load.output_tokens) == (1024, 1024) and deployment.tp < 8:
            # batch_wait_timeout_iters: 20, batch_wait_max_tokens_ratio: 0.9
            return replace(framework, batch_wait_passes=20, batch_wait_share=0.9)
    if model == "gpt-oss-120b":
        return replace(framework, tokens_per_pass=20_000)
    if model == "deepseek-v3":
        tokens = load.input_tokens + load.concurrency + 64
        if version.startswith(("1.2", "1.3")):
            tokens = max(8192, tokens)
        accepted = _ACCEPTED if version == _SPECULATIVE_VERSION else 1.0
        return replace(framework, tokens_per_pass=tokens, accepted=accepted)
    return framework
