"""Two bounds for the magnitudes that are wanted, from a sample, by one program of a GPU.

`selection` says what the bounds are for, and `selection_kernels` explains the table `work`. Imported only where Triton
is installed.
"""

from __future__ import annotations

import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

from laconic.compression.kernels.reference import approximate_topk as reference
from laconic.compression.kernels.triton_gpu.selection_kernels import FIRST_FREE, HIGH, LOW

# Triton takes a constant only in this form.
_FIRST_FREE, _LOW, _HIGH = tl.constexpr(FIRST_FREE), tl.constexpr(LOW), tl.constexpr(HIGH)
_RUN = tl.constexpr(reference.RUN)
_STAGE_SHARE = tl.constexpr(reference.STAGE_SHARE)


@triton.jit
def _clear(work):
    """Zeros for all counts; not for the bounds, which the same program writes."""
    place = tl.arange(0, 512)
    tl.store(work + place, tl.zeros_like(place), mask=(place > _HIGH) & (place < _FIRST_FREE))


@triton.jit
def _sample_places(n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    run = i // _RUN
    x = run.to(tl.uint32)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    RUNS: tl.constexpr = SIZE // _RUN
    return (run.to(tl.int64) * n // RUNS).to(tl.int32) + (x >> 8).to(tl.int32) % (n // RUNS - _RUN + 1) + i % _RUN


@triton.jit(do_not_specialize=["rank_low", "rank_high"])
def sample(
    bits,
    work,
    n,
    rank_low,
    rank_high,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Bounds that the rank_low and the rank_high largest keys of a sample reach, both at least 1.

    The last REST of WIDTH bits are not looked for: they are zero in `low`, and made up for in `high`.
    """
    _clear(work)
    keys = tl.load(bits + _sample_places(n, SIZE)).to(tl.int32) & LARGEST
    low, high = rank_low * 0, rank_low * 0
    for step in range(WIDTH - REST):
        bit = 1 << (WIDTH - 1 - step)
        reach = tl.sum((keys >= (low | bit)).to(tl.int32) + ((keys >= (high | bit)).to(tl.int32) << 16), axis=0)
        low = tl.where((reach & 0xFFFF) >= rank_low, low | bit, low)
        high = tl.where((reach >> 16) >= rank_high, high | bit, high)
    low = tl.maximum(low, 1)
    known = (rank_high > 0) & (high < LARGEST - 2**REST)
    high = tl.where(known, high + 2**REST, LARGEST)
    tl.store(work + _LOW, low)
    tl.store(work + _HIGH, tl.maximum(high, low))


@triton.jit(do_not_specialize=["k"])
def fit(values, work, n, k, SIZE: tl.constexpr):
    """The thresholds as keys: an entry passes if its key is at least this large."""
    _clear(work)
    wanted = k.to(tl.float64) * SIZE / n.to(tl.float64)
    clearly = wanted + 4.0 * tl.sqrt(wanted) + 8.0
    x = tl.abs(tl.load(values + _sample_places(n, SIZE)))
    wide = x.to(tl.float64)
    total = tl.sum(wide, axis=0)
    left, share = total * 0.0 + SIZE, total * 0.0
    threshold = tl.sum(x, axis=0) * 0.0
    fill = threshold
    while (left > wanted) & (share <= _STAGE_SHARE):
        share = tl.maximum(wanted / left, _STAGE_SHARE)
        start = threshold.to(tl.float64)
        threshold = (start + (total / left - start) * tl.log(1.0 / share)).to(tl.float32)
        passes = x > threshold
        left = tl.sum(passes.to(tl.int32), axis=0).to(tl.float64)
        total = tl.sum(tl.where(passes, wide, 0.0), axis=0)
        fill = tl.where(left > clearly, threshold, fill)
    low, high = fill.to(tl.int32, bitcast=True) + 1, threshold.to(tl.int32, bitcast=True) + 1
    # If a value is not finite, `finish` finds that out too; here it is enough that bounds are in order.
    known = (threshold >= fill) & (threshold < float("inf"))
    tl.store(work + _LOW, tl.where(known, low, 1))
    tl.store(work + _HIGH, tl.where(known, high, 0x7FFFFFFF))
