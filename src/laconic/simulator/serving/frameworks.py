"""The overhead of serving frameworks: time on the host, kernel launches, and how requests queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Framework:
    """One framework, as of the measurements it is calibrated on."""

    name: str
    step_s: float
    """On the host per forward pass, not overlapped with the GPU."""
    sequence_s: float
    """On the host per pass and sequence."""
    layer_s: float
    """Kernels of a layer that neither compute nor read weights: normalizations, quantization, gaps."""
    launch_s: float = 0.0
    """Launching the kernels of a layer without a CUDA graph; hidden behind longer kernels."""
    prefill_launch_s: float = 0.0
    """The same for a pass over a prompt."""
    long_pass_tokens: int = 0
    long_pass_token_s: float = 0.0
    """On the host per token of a pass over more than `long_pass_tokens`; 0: none."""
    request_s: float = 0.0
    """Per request before its first pass: HTTP and scheduling."""
    client_s: float = 0.0
    """The same for every request in flight, as one process handles the requests and tokens of all."""
    passes_before_first: float = 0.0
    """Decode passes that go by before a new request is looked for, and before its first token is handed out: frameworks
    do both at intervals, to keep the host's work small."""
    handling_s: float = 0.0
    """On the host per request before its first pass, one request after the other: HTTP."""
    handling_token_s: float = 0.0
    """The same per token of the prompt: splitting text into tokens."""
    poll_passes: int = 1
    """Decode passes between two checks for new requests."""
    accepted: float = 1.0
    """Tokens that a sequence gets per decode pass, on average: above 1 with speculative decoding."""
    batch_wait_passes: int = 0
    """The most decode passes that prompts wait for further prompts, while sequences run."""
    batch_wait_share: float = 0.0
    """Prompts do not wait any longer once a pass is filled to this share of `tokens_per_pass`."""
    tokens_per_pass: int = 8192
    """The most prompt tokens in a pass."""
    mixes: bool = True
    """Whether a pass over prompts gives a token to the sequences that run."""
    one_shot: bool = True
    """Small all-reduces are one kernel that reads all other GPUs' buffers, instead of NCCL's ring."""
    kv_bytes: float = 2.0
    """Per element of the cache."""


_HANDLING = {"handling_s": 0.2e-3, "handling_token_s": 4e-6}
"""A tokenizer in one process splits about 250,000 tokens per second."""

FRAMEWORKS: Mapping[str, Framework] = {
    framework.name: framework
    for framework in (
        Framework(
            name="vllm",
            step_s=2.0e-3,
            sequence_s=5e-6,
            layer_s=25e-6,
            request_s=7e-3,
            **_HANDLING,
            client_s=0.3e-3,
            passes_before_first=3.0,
        ),
        Framework(
            name="sglang",
            step_s=3e-3,
            sequence_s=10e-6,
            layer_s=50e-6,
            request_s=25e-3,
            **_HANDLING,
            client_s=0.3e-3,
            passes_before_first=20.0,
            tokens_per_pass=16_384,
            mixes=False,
        ),
        Framework(
            name="trtllm",
            step_s=0.5e-3,
            sequence_s=5e-6,
            layer_s=25e-6,
            request_s=135e-3,
            **_HANDLING,
            client_s=0.3e-3,
            passes_before_first=0.7,
            kv_bytes=1.0,
        ),
    )
}
"""By name."""
