"""GPUs that serve: peaks from NVIDIA's data sheets (dense), and the shares of them that kernels reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from laconic.errors import UsageError, did_you_mean, one_line


@dataclass(frozen=True, kw_only=True)
class ServingDevice:
    """One GPU."""

    name: str
    flops_per_s: Mapping[str, float]
    """By precision of the weights, without sparsity; a precision that the device cannot multiply runs in 16 bits."""
    memory_bytes_per_s: float
    memory_bytes: float
    gpus_per_domain: int = 8
    """How many GPUs share NVLink."""
    system: str
    """The measured system its collective operations are taken from."""
    matmul_share: float = 0.6
    """The share of the peak that products of a long prompt reach."""
    expert_share: float = 0.2
    """The same share for experts, whose rows are sorted, padded and multiplied in groups."""
    memory_share: float = 0.8
    """The share of the memory's bandwidth that reading weights and keys reaches."""
    attention_share: float = 0.31
    """The share of the 16-bit peak that fused attention reaches on a prompt."""
    is_blackwell: bool = False
    """Whether the GPU is of the generation of B200."""
    expert_prompt_ratio: float = 0.7
    """The factor on the time of experts in a prefill pass, whose groups of rows are larger than those of decode."""
    moves: float = 16.0
    """How often a layer of a prefill pass reads or writes each token's activations outside of products."""
    expert_moves: float = 12.0
    """The same for each copy of a token that an expert gets: sorting, quantization, sums."""


def _peaks(bf16: float, fp8: float = 0.0, fp4: float = 0.0) -> dict[str, float]:
    return {"bf16": bf16, "fp8": fp8 or bf16, "fp4": fp4 or bf16, "int4": bf16}


_BLACKWELL: dict[str, Any] = {
    "is_blackwell": True,
    "attention_share": 0.235,
}
"""Attention in prefill reaches a smaller share of a higher peak."""

DEVICES: Mapping[str, ServingDevice] = {
    device.name: device
    for device in (
        ServingDevice(
            name="a100_sxm",
            flops_per_s=_peaks(312e12),
            memory_bytes_per_s=2.04e12,
            memory_bytes=80e9,
            system="a100_sxm",
        ),
        ServingDevice(
            name="h100_sxm",
            flops_per_s=_peaks(989e12, 1979e12),
            memory_bytes_per_s=3.35e12,
            memory_bytes=80e9,
            system="h100_sxm",
        ),
        ServingDevice(
            name="h200_sxm",
            flops_per_s=_peaks(989e12, 1979e12),
            memory_bytes_per_s=4.8e12,
            memory_bytes=141e9,
            system="h200_sxm",
        ),
        ServingDevice(
            name="b200_sxm",
            flops_per_s=_peaks(2250e12, 4500e12, 9000e12),
            memory_bytes_per_s=8e12,
            memory_bytes=180e9,
            system="b200_sxm",
            **_BLACKWELL,
        ),
        ServingDevice(
            name="b300_sxm",
            flops_per_s=_peaks(2250e12, 4500e12, 14000e12),
            memory_bytes_per_s=8e12,
            memory_bytes=270e9,
            system="b300_sxm",
            **_BLACKWELL,
        ),
        ServingDevice(
            name="gb200",
            flops_per_s=_peaks(2500e12, 5000e12, 10000e12),
            memory_bytes_per_s=8e12,
            memory_bytes=186e9,
            gpus_per_domain=72,
            system="gb200",
            **_BLACKWELL,
        ),
        ServingDevice(
            name="gb300",
            flops_per_s=_peaks(2500e12, 5000e12, 15000e12),
            memory_bytes_per_s=8e12,
            memory_bytes=279e9,
            gpus_per_domain=72,
            system="gb300",
            **_BLACKWELL,
        ),
        ServingDevice(
            name="l40s",
            flops_per_s=_peaks(362e12, 733e12),
            memory_bytes_per_s=0.864e12,
            memory_bytes=48e9,
            system="l40s",
        ),
    )
}
"""By name."""


def serving_device(name: str) -> ServingDevice:
    """The device of that name."""
    if name not in DEVICES:
        raise UsageError(f'there is no serving device "{one_line(name, 40)}". {did_you_mean(name, DEVICES)}')
    return DEVICES[name]
