"""The time of a matrix product, of a memory-bound kernel, and of fused attention on one accelerator.

    tiles   = ceil(m / tile m) * ceil(n / tile n) * batch
    product = ceil(tiles / multiprocessors) * tile m * tile n * (k + prologue) * 2 / (peak * share / multiprocessors)

at the fastest of the tile shapes that libraries offer; small tiles reach a smaller share of the peak, because each
element that they load is used less often. A product takes at least the time that its operands need to cross memory.

References: Williams et al. 2009, doi:10.1145/1498765.1498785 (roofline); NVIDIA, Matrix Multiplication Background
User's Guide (tile and wave quantization).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from laconic.simulator.parallel.work import Product

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.62))
"""Tile shapes and the share of the best tile's rate that each reaches."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Peaks from a data sheet, and the shares of them that kernels reach."""

    name: str
    flops_per_s: float
    """Peak of products of 16-bit numbers, without sparsity."""
    memory_bytes_per_s: float
    memory_bytes: float
    multiprocessors: int
    matmul_share: float
    """Share of the peak that a large product reaches."""
    memory_share: float = 0.8
    """Share of the memory bandwidth that element-wise kernels reach."""
    attention_share: float = 0.55
    """Share of the peak that fused attention reaches on long sequences."""
    prologue: int = 64
    """Cost of loading the first and storing the last tile, in elements of the inner dimension."""

    def scaled(self, factor: float) -> Accelerator:
        """An accelerator on which products, fused attention included, run `factor` times as fast."""
        return replace(self, matmul_share=self.matmul_share * factor, attention_share=self.attention_share * factor)

    def matmul_s(self, product: Product, *, rate: float = 1.0) -> float:
        """Seconds of a product; `rate` is relative to 16-bit numbers."""
        return _matmul_s(self, product, rate)

    def memory_s(self, nbytes: float) -> float:
        """Seconds of a kernel that reads and writes this many bytes."""
        return nbytes / (self.memory_bytes_per_s * self.memory_share)

    def attention_s(self, flops: float) -> float:
        """Seconds of fused attention."""
        return flops / (self.flops_per_s * self.attention_share)


@lru_cache(maxsize=65_536)
def _matmul_s(device: Accelerator, product: Product, rate: float) -> float:
    m, n, k, batch = product.m, product.n, product.k, product.batch
    per_multiprocessor = device.flops_per_s * rate * device.matmul_share / device.multiprocessors
    best = math.inf
    for tile_m, tile_n, share in _TILES:
        tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n) * batch
        waves = math.ceil(tiles / device.multiprocessors)
        seconds = waves * tile_m * tile_n * (k + device.prologue) * 2 / (per_multiprocessor * share)
        best = min(best, seconds)
    moved = 2.0 * batch * (m * k + k * n + m * n)
    return max(best, device.memory_s(moved))


A100 = Accelerator(
    name="A100 80 GB",
    flops_per_s=312e12,
    memory_bytes_per_s=2.04e12,
    memory_bytes=80e9,
    multiprocessors=108,
    matmul_share=0.83,
    memory_share=0.65,
    attention_share=0.31,
)
"""Peaks from NVIDIA's data sheet of the A100 SXM; the shares are those of published runs (docs/large-models.md)."""
H100 = Accelerator(
    name="H100",
    flops_per_s=989.4e12,
    memory_bytes_per_s=3.35e12,
    memory_bytes=80e9,
    multiprocessors=132,
    matmul_share=0.67,
    memory_share=0.65,
    attention_share=0.35,
)
"""Peaks from NVIDIA's data sheet of the H100 SXM; shares as above."""
H200 = replace(H100, name="H200", memory_bytes_per_s=4.8e12, memory_bytes=141e9)
"""An H100 with more and faster memory."""
ACCELERATORS = {"a100": A100, "h100": H100, "h200": H200}
"""Accelerators by name."""
