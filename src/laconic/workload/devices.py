"""GPUs by name: peaks and memory from their data sheets, for models that were not profiled.

    compute of a step = operations and bytes of its layers at the peaks / SHARE

Peaks are those of bfloat16 or float16 products that are added up in float32, without sparsity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.errors import UsageError, did_you_mean, one_line
from laconic.workload.roofline import H200_BF16, Device, LayerWork, stated_compute_s

SHARE = 0.61
"""Share of the peaks that training reaches: measured for llama-7b on an H200 (docs/workloads.md), assumed elsewhere."""


@dataclass(frozen=True, kw_only=True)
class KnownDevice:
    """One kind of GPU."""

    name: str
    peaks: Device
    memory_bytes: int

    def compute_s(self, work: Sequence[LayerWork]) -> float:
        """The time of both passes of these layers."""
        return stated_compute_s(work, self.peaks, share=SHARE)


def _device(name: str, tflops: float, gigabytes_per_s: float, gigabytes: int) -> KnownDevice:
    peaks = Device(flops_per_s=tflops * 1e12, memory_bytes_per_s=gigabytes_per_s * 1e9, element_bytes=2)
    return KnownDevice(name=name, peaks=peaks, memory_bytes=gigabytes * 10**9)


DEVICES: dict[str, KnownDevice] = {
    "h200": KnownDevice(name="h200", peaks=H200_BF16, memory_bytes=141 * 10**9),
    "h100": _device("h100", 989.4, 3350, 80),
    "a100": _device("a100", 312, 2039, 80),
    "v100": _device("v100", 125, 900, 32),
    "l40s": _device("l40s", 362, 864, 48),
    "l4": _device("l4", 121, 300, 24),
    "t4": _device("t4", 65, 320, 16),
    "rtx-4090": _device("rtx-4090", 165.2, 1008, 24),
    "rtx-3090": _device("rtx-3090", 71, 936, 24),
    "rtx-2080-ti": _device("rtx-2080-ti", 53.8, 616, 11),
}
"""NVIDIA's data sheets and architecture white papers: the SXM versions of H100, A100 (80 GB) and V100 (32 GB)."""


def device(name: str) -> KnownDevice:
    """The device of that name."""
    if name not in DEVICES:
        raise UsageError(f'there is no device "{one_line(name, 40)}". {did_you_mean(name, DEVICES)}')
    return DEVICES[name]
