"""Codes and scales of the quantizers on a GPU: functions of a few chunks in registers, one chunk per row.

Results equal those of `reference` bit for bit; only a scale that is a sum (L1, L2, means) may differ in its last bit,
because the sum is made in another order. Imported only where Triton is installed.
"""

from __future__ import annotations

import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

from laconic.compression.kernels.reference.quantizers import SMALLEST_SCALE

# Triton takes a constant only in this form.
_SMALLEST = tl.constexpr(SMALLEST_SCALE)
_ROUNDER = tl.constexpr(1.5 * 2**23)


@triton.jit
def mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def uniform(number):
    return (number >> 8).to(tl.int32).to(tl.float32) * (2.0**-24)


@triton.jit
def finite(scale):
    return tl.where(tl.abs(scale) <= 3.4028234663852886e38, scale, float("nan"))


@triton.jit
def absmax(x):
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    return tl.where(bits < 0x7F800000, bits.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def _scaled(x, scale, largest):
    inverse = tl.math.div_rn(largest, scale)
    return tl.where((scale >= _SMALLEST)[:, None], x * inverse[:, None], 0.0)


@triton.jit
def _unit(scale, largest):
    return tl.where(scale < _SMALLEST, 0.0, tl.math.div_rn(scale, largest))


@triton.jit
def _up_or_down(magnitudes, numbers):
    lower = tl.floor(magnitudes)
    return lower + (uniform(numbers) < magnitudes - lower).to(tl.float32)


@triton.jit
def _levels(scaled, largest, numbers):
    level = tl.minimum(_up_or_down(tl.abs(scaled), numbers), largest)
    return (tl.where(scaled < 0, -level, level) + largest).to(tl.int32)


@triton.jit
def packed_bytes(codes, BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Codes of 1, 2 or 4 bits as bytes, the first code in the lowest bits: neighbours are joined, two at a time."""
    low, high = tl.split(tl.reshape(codes, (ROWS, BLOCK // 2, 2)))
    data = low | (high << BITS)
    if BITS <= 2:
        low, high = tl.split(tl.reshape(data, (ROWS, BLOCK // 4, 2)))
        data = low | (high << (2 * BITS))
    if BITS == 1:
        low, high = tl.split(tl.reshape(data, (ROWS, BLOCK // 8, 2)))
        data = low | (high << 4)
    return data


@triton.jit
def codes_in_bytes(data, BITS: tl.constexpr):
    """The inverse of `packed_bytes`."""
    codes = tl.interleave(data & 15, data >> 4)
    if BITS <= 2:
        codes = tl.interleave(codes & 3, codes >> 2)
    if BITS == 1:
        codes = tl.interleave(codes & 1, codes >> 1)
    return codes


@triton.jit
def power_of_two(exponent):
    return (exponent << 23).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def level_codes(x, length, largest, clip, numbers, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The size of one level, and codes 0 .. 2 * largest."""
    if KIND == "integer":
        scale = absmax(x)
    else:
        wide = x.to(tl.float64)
        squares = tl.sum(wide * wide, axis=1)
        if KIND == "qsgd":
            scale = finite(tl.sqrt(squares).to(tl.float32))
        else:
            bound = (clip * tl.sqrt(squares / tl.maximum(length, 1).to(tl.float64))).to(tl.float32)
            scale = absmax(x)
            scale = tl.where(scale == scale, tl.minimum(scale, bound), scale)
            x = tl.minimum(tl.maximum(x, -scale[:, None]), scale[:, None])
    scaled = _scaled(x, scale, largest)
    if STOCHASTIC:
        codes = _levels(scaled, largest, numbers)
    else:
        # Added and taken away again, it rounds to the nearest whole number, ties to even.
        codes = ((scaled + _ROUNDER) - _ROUNDER + largest).to(tl.int32)
    return _unit(scale, largest), codes


@triton.jit
def power_codes(x, levels, numbers):
    """The L2 norm, and codes 0 .. 2 * levels of powers of two below it."""
    wide = x.to(tl.float64)
    norm = finite(tl.sqrt(tl.sum(wide * wide, axis=1)).to(tl.float32))
    scaled = _scaled(x, norm, 1.0)
    magnitudes = tl.minimum(tl.abs(scaled), 1.0)
    bits = magnitudes.to(tl.int32, bitcast=True)
    below = tl.maximum((bits >> 23) - 127 + levels, 0)
    rises = (numbers >> 8).to(tl.int32) < 2 * (bits & 0x7FFFFF)
    starts = uniform(numbers) < magnitudes * power_of_two(126 + levels)
    level = tl.minimum(below + tl.where(below > 0, rises, starts).to(tl.int32), levels)
    return _unit(norm, 1.0), tl.where(scaled < 0, -level, level) + levels


@triton.jit
def fp8_codes(x, largest, numbers, STOCHASTIC: tl.constexpr):
    scale = absmax(x)
    scaled = _scaled(x, scale, largest)
    if STOCHASTIC:
        magnitudes = tl.abs(scaled)
        # Between two powers of two, and below the lowest, e4m3 has even steps.
        exponent = tl.maximum(magnitudes.to(tl.int32, bitcast=True) >> 23, 121)
        steps = _up_or_down(magnitudes * power_of_two(257 - exponent), numbers).to(tl.int32)
        codes = tl.minimum(((exponent - 121) << 3) + steps, 0x7E)
        codes += tl.where(scaled.to(tl.int32, bitcast=True) < 0, 128, 0)
    else:
        codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    return _unit(scale, largest), codes


@triton.jit
def natural_codes(x, numbers):
    scale = absmax(x)
    known = tl.where(scale == scale, scale, 0.0)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.minimum((known.to(tl.int32, bitcast=True) >> 23) + 1, 254)
    lowest = tl.maximum(top - 126, 1)
    up = (numbers >> 8).to(tl.int32) < 2 * (bits & 0x7FFFFF)
    exponent = tl.minimum((bits >> 23) + up.to(tl.int32), top[:, None])
    kept = uniform(numbers) < tl.abs(x) * power_of_two(254 - lowest)[:, None]
    small = (1 + top - lowest)[:, None] * kept.to(tl.int32)
    codes = tl.where((bits >> 23) >= lowest[:, None], 1 + top[:, None] - exponent, small)
    signed = codes + tl.where(x.to(tl.int32, bitcast=True) < 0, 128, 0)
    codes = tl.where((scale > 0)[:, None] & (codes > 0), signed, 0)
    return tl.where(scale > 0, power_of_two(top), scale), codes


@triton.jit
def means(x, positive, length):
    """The mean of the values >= 0, and that of the values below 0."""
    wide = x.to(tl.float64)
    high = tl.sum(tl.where(x >= 0, wide, 0.0), axis=1) / tl.maximum(positive, 1).to(tl.float64)
    low = tl.sum(tl.where(x < 0, wide, 0.0), axis=1) / tl.maximum(length - positive, 1).to(tl.float64)
    return high.to(tl.float32), low.to(tl.float32)


@triton.jit
def bf16_codes(x, numbers):
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    up = tl.where(magnitude < 0x7F800000, (numbers >> 16).to(tl.int32), 0)
    # A NaN whose upper half says infinity would become one.
    return tl.where(magnitude > 0x7F800000, 0x7FC0, ((bits + up) >> 16) & 0xFFFF)


@triton.jit
def fp16_codes(x, numbers):
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # 2^17 is as infinite as anything larger.
    known = tl.minimum(magnitude, 144 << 23)
    exponent = tl.maximum(known >> 23, 113)
    steps = _up_or_down(known.to(tl.float32, bitcast=True) * power_of_two(264 - exponent), numbers).to(tl.int32)
    codes = tl.minimum(((exponent - 113) << 10) + steps, 0x7C00)
    codes += tl.where(x.to(tl.int32, bitcast=True) < 0, 0x8000, 0)
    return tl.where(magnitude > 0x7F800000, 0x7E00, codes)
