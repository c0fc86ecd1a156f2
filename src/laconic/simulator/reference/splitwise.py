"""Splitwise: prefill and decode times of two models on DGX-A100 and DGX-H100, by tensor-parallel degree.

vLLM of 2023 started kernels one by one: a pass takes

    host + max(start of all kernels, GPU)

and the GPU's part is that of serving/forward.py. The host's constants are read off tensor-parallel degree 8. Two models
separate the host's time from kernel launches: Llama 2 is bound by launching the kernels of its 80 layers, BLOOM, with
2.5 times the weights, by the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from laconic.errors import ConfigurationError
from laconic.simulator.reference.published import PublishedTable, Row
from laconic.simulator.serving.deployment import Deployment
from laconic.simulator.serving.devices import ServingDevice, serving_device
from laconic.simulator.serving.forward import ForwardPass
from laconic.simulator.serving.frameworks import Framework
from laconic.simulator.serving.latency import decode_pass_s, prompt_pass_s
from laconic.simulator.serving.models import served_model

_MODELS = ("bloom-176b", "llama2-70b")
_HOST_S = 17.3e-3
_FRAMEWORKS = {
    "a100": Framework(
        name="vLLM of 2023, host of a DGX-A100",
        step_s=_HOST_S,
        sequence_s=0.32e-3,
        layer_s=0.0,
        launch_s=0.32e-3,
        prefill_launch_s=0.6e-3,
        long_pass_tokens=2048,
        long_pass_token_s=80e-6,
        one_shot=False,
    ),
    "h100": Framework(
        name="vLLM of 2023, host of a DGX-H100",
        step_s=_HOST_S,
        sequence_s=0.28e-3,
        layer_s=0.0,
        launch_s=0.16e-3,
        prefill_launch_s=0.45e-3,
        long_pass_tokens=2048,
        long_pass_token_s=40e-6,
        one_shot=False,
    ),
}


def _device(name: str, matmul_share: float) -> ServingDevice:
    """The device with the shares that 16-bit kernels of 2023 reached, kernels between products included."""
    return replace(serving_device(name), matmul_share=matmul_share, moves=0.0, attention_share=0.4)


_DEVICES: dict[str, tuple[ServingDevice, str, float]] = {
    "a100-80gb": (_device("a100_sxm", 0.55), "a100", 1.0),
    "h100-80gb": (_device("h100_sxm", 0.5), "h100", 1.0),
    # Half the power limit: prompts take 1.3 times as long, tokens as long as before.
    "h100-80gb-pcap": (_device("h100_sxm", 0.5), "h100", 1.3),
}
"""hardware -> device, host, factor of prompts."""


class Splitwise(PublishedTable):
    """Milliseconds of a prompt and per token."""

    name = "splitwise"
    source = "Splitwise (Patel et al., ISCA 2024, arXiv:2311.18677), github.com/Mutinifni/splitwise-sim, perf_model.csv"
    columns = ("model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size")
    measured = ("prompt_time", "token_time")
    carried_along = ("e2e_time",)
    calibrated_on = (
        "tensor parallelism 8: host, start of kernels and share of the peak from prompts of 128 and 2048 tokens and "
        "from tokens at batch 1 and 32; the cost of passes over more than 2048 tokens from 64 prompts at once"
    )

    def predict(self, row: Row) -> Mapping[str, float]:
        """Milliseconds."""
        device, host, factor = _DEVICES[row.choice("hardware", _DEVICES)]
        tp, batch, prompt = row.whole("tensor_parallel"), row.whole("batch_size"), row.whole("prompt_size")
        model = served_model(row.choice("model", _MODELS))
        if model.num_attention_heads % tp:
            raise ConfigurationError(
                f"{row.where}, column tensor_parallel: {tp} does not divide {model.num_attention_heads} heads."
            )
        forward = ForwardPass(Deployment(model=model, device=device, tp=tp), _FRAMEWORKS[host])
        context = prompt + row.whole("token_size") / 2
        return {
            "prompt_time": 1e3 * factor * prompt_pass_s(forward, prompt, batch),
            "token_time": 1e3 * decode_pass_s(forward, batch, context),
        }

    def carried_rows(self) -> list[dict[str, str]]:
        """The rows that the host's time and kernel launches are read off."""
        rows = {
            ("bloom-176b", "a100-80gb", "2048"): ("540.412", "49.358"),
            ("bloom-176b", "h100-80gb", "2048"): ("253.113", "35.722"),
            ("llama2-70b", "a100-80gb", "2048"): ("274.222", "45.437"),
            ("llama2-70b", "h100-80gb", "2048"): ("136.797", "31.048"),
        }
        return [
            {
                "model": model,
                "hardware": hardware,
                "tensor_parallel": "8",
                "prompt_size": prompt,
                "batch_size": "1",
                "token_size": "128",
                "prompt_time": prompt_ms,
                "token_time": token_ms,
            }
            for (model, hardware, prompt), (prompt_ms, token_ms) in rows.items()
        ]
