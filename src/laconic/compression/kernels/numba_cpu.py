"""Quantizers on a CPU: one pass over a chunk for its scale, one for its codes, while it is in the cache.

Bit for bit what `reference` gives; only a scale that is a sum (L1, L2, means) may differ in its last bit, because the
sum is made in another order. Each function has one signature, compiled when it is first called and kept on disk.
Imported only where numba is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from laconic.compression.kernels.reference import LARGEST_FP8, SMALLEST_SCALE
from laconic.compression.wire.chunks import Chunks

_PIECE = 2**18
"""Elements widened to float32 at a time: no second copy of a whole bucket."""

_ABSMAX, _L2, _CLIPPED = 0, 1, 2
"""What the levels of a chunk are measured in."""
_ONE, _L1, _MEANS = 0, 1, 2
"""What the signs of a chunk are worth."""

# Whole numbers are cast after every operation: numba would widen them to 64 bits, and vectors would be half as long.
_u8, _u32, _u64, _i32, _f32, _f64 = np.uint8, np.uint32, np.uint64, np.int32, np.float32, np.float64

_INFINITY = _u32(0x7F800000)
_SMALLEST = _f32(SMALLEST_SCALE)
_FP8_LOWEST = _u32(121 << 23)
"""2^-6: e4m3 has no smaller exponent, only fewer digits."""
_FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
_FP16_LOWEST = _u32(113 << 23)
"""2^-14, likewise."""
_ROUNDER = _f32(1.5 * 2**23)
"""A number added to it is rounded to the nearest whole number, ties to even, which then stands in its lowest bits."""


@njit(cache=True, nogil=True)
def _mix(x):
    x = _u32(x ^ (x >> _u32(16)))
    x = _u32(x * _u32(0x7FEB352D))
    x = _u32(x ^ (x >> _u32(15)))
    x = _u32(x * _u32(0x846CA68B))
    return _u32(x ^ (x >> _u32(16)))


@njit(cache=True, nogil=True)
def _uniform(number):
    return _f32(_f32(_i32(number >> _u32(8))) * _f32(2.0**-24))


@njit(cache=True, nogil=True)
def _fill(out, value):
    for i in range(len(out)):
        out[i] = value


@njit(cache=True, nogil=True)
def _largest_bits(x):
    """The bits of max |x|: they order magnitudes, infinity comes after every finite value and NaN after infinity."""
    largest = _u32(0)
    for i in range(len(x)):
        bits = _u32(_f32(x[i]).view(_u32) & _u32(0x7FFFFFFF))
        largest = max(bits, largest)
    return largest


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def _sum_of_squares(x):
    total = 0.0
    for i in range(len(x)):
        total += _f64(x[i]) * _f64(x[i])
    return total


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def _sum_of_magnitudes(x):
    total = 0.0
    for i in range(len(x)):
        total += _f64(abs(x[i]))
    return total


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def _sum_of_positives(x):
    total, count = 0.0, 0
    for i in range(len(x)):
        positive = x[i] >= _f32(0)
        total += _f64(x[i]) if positive else 0.0
        count += positive
    return total, count


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def _sum_of_negatives(x):
    total = 0.0
    for i in range(len(x)):
        total += 0.0 if x[i] >= _f32(0) else _f64(x[i])
    return total


@njit(cache=True, nogil=True)
def _pack(codes, length, bits, out):
    """The lowest `bits` (1 to 7) of each of `length` bytes, closed up; the rest of the last eight must be zeros."""
    if bits == 4:
        for i in range(len(out)):
            out[i] = _u8(codes[2 * i] | (codes[2 * i + 1] << _u8(4)))
        return
    if bits == 2:
        for i in range(len(out)):
            low, high = codes[4 * i] | (codes[4 * i + 1] << _u8(2)), codes[4 * i + 2] | (codes[4 * i + 3] << _u8(2))
            out[i] = _u8(low | (high << _u8(4)))
        return
    words = codes.view(_u64)
    if bits == 1:
        for i in range(len(out)):
            # Of the product only the top byte matters: there each code meets its own power of two.
            out[i] = _u8(_u64(words[i] * _u64(0x0102040810204080)) >> _u64(56))
        return
    # Eight codes are one word: neighbours are moved together, then pairs, then fours.
    b = _u64(bits)
    one = _u64(((_u64(1) << b) - _u64(1)) * _u64(0x0001000100010001))
    two = _u64(((_u64(1) << _u64(_u64(2) * b)) - _u64(1)) * _u64(0x0000000100000001))
    four = _u64((_u64(1) << _u64(_u64(4) * b)) - _u64(1))
    for group in range((length + 7) // 8):
        word = words[group]
        word = _u64((word & one) | ((word >> _u64(_u64(8) - b)) & _u64(one << b)))
        word = _u64((word & two) | ((word >> _u64(_u64(16) - _u64(2) * b)) & _u64(two << _u64(_u64(2) * b))))
        word = _u64((word & four) | ((word >> _u64(_u64(32) - _u64(4) * b)) & _u64(four << _u64(_u64(4) * b))))
        for byte in range(group * bits, min(group * bits + bits, len(out))):
            out[byte] = _u8(word & _u64(0xFF))
            word = _u64(word >> _u64(8))


@njit(cache=True, nogil=True)
def _unpack(data, length, bits, codes):
    """The inverse of `_pack`."""
    if bits == 4:
        for i in range(len(data)):
            codes[2 * i], codes[2 * i + 1] = data[i] & _u8(15), data[i] >> _u8(4)
        return
    if bits == 2:
        for i in range(len(data)):
            codes[4 * i], codes[4 * i + 1] = data[i] & _u8(3), (data[i] >> _u8(2)) & _u8(3)
            codes[4 * i + 2], codes[4 * i + 3] = (data[i] >> _u8(4)) & _u8(3), data[i] >> _u8(6)
        return
    words = codes.view(_u64)
    if bits == 1:
        for i in range(len(data)):
            # The byte eight times, one bit of each copy kept, and that bit moved to the bottom.
            spread = _u64(_u64(data[i]) * _u64(0x0101010101010101)) & _u64(0x8040201008040201)
            words[i] = _u64((_u64(spread + _u64(0x7F7F7F7F7F7F7F7F)) >> _u64(7)) & _u64(0x0101010101010101))
        return
    b = _u64(bits)
    one = _u64(((_u64(1) << b) - _u64(1)) * _u64(0x0001000100010001))
    two = _u64(((_u64(1) << _u64(_u64(2) * b)) - _u64(1)) * _u64(0x0000000100000001))
    four = _u64((_u64(1) << _u64(_u64(4) * b)) - _u64(1))
    for group in range((length + 7) // 8):
        word = _u64(0)
        for byte in range(min(bits, len(data) - group * bits)):
            word = _u64(word | (_u64(data[group * bits + byte]) << _u64(8 * byte)))
        word = _u64((word & four) | ((word & _u64(four << _u64(_u64(4) * b))) << _u64(_u64(32) - _u64(4) * b)))
        word = _u64((word & two) | ((word & _u64(two << _u64(_u64(2) * b))) << _u64(_u64(16) - _u64(2) * b)))
        words[group] = _u64((word & one) | ((word & _u64(one << b)) << _u64(_u64(8) - b)))


@njit(cache=True, nogil=True)
def _round_to_levels(x, inverse, largest, out):
    for i in range(len(x)):
        shifted = _f32(_f32(x[i] * inverse) + _ROUNDER)
        out[i] = _u8(_u32(shifted.view(_u32) + largest) & _u32(0xFF))


@njit(cache=True, nogil=True)
def _draw_levels(x, bound, inverse, largest, seed, out):
    for i in range(len(x)):
        scaled = _f32(min(abs(x[i]), bound) * inverse)
        level = _i32(scaled)
        up = _uniform(_mix(_u32(_u32(i) + seed))) < _f32(scaled - _f32(level))
        level = min(_i32(level + _i32(up)), largest)
        out[i] = _u8(largest - level) if x[i] < _f32(0) else _u8(largest + level)


@njit(cache=True, nogil=True)
def _encode_levels(
    values, starts, code_starts, seeds, seed, scales, codes, scratch, bits, largest, measure, clip, stochastic
):
    for chunk in range(len(starts) - 1):
        x = values[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        out = codes[code_starts[chunk] : code_starts[chunk + 1]]
        levels = out if bits == 8 else scratch[: len(x)]
        bits_of_largest = _largest_bits(x)
        scale = _u32(bits_of_largest).view(_f32)
        if measure == _L2:
            scale = _f32(np.sqrt(_sum_of_squares(x)))
        elif measure == _CLIPPED:
            scale = min(scale, _f32(clip * np.sqrt(_sum_of_squares(x) / len(x))))
        if bits_of_largest >= _INFINITY or scale == _f32(np.inf):
            scales[chunk] = np.nan
            _fill(levels, _u8(largest))
        elif scale < _SMALLEST:
            scales[chunk] = 0
            _fill(levels, _u8(largest))
        else:
            scales[chunk] = _f32(scale / _f32(largest))
            inverse = _f32(_f32(largest) / scale)
            if stochastic:
                _draw_levels(x, scale, inverse, _i32(largest), _mix(_u32(seeds[chunk] ^ seed)), levels)
            else:
                _round_to_levels(x, inverse, _u32(largest), levels)
        if bits != 8:
            _fill(scratch[len(x) : (len(x) + 7) // 8 * 8], _u8(0))
            _pack(scratch, len(x), bits, out)


@njit(cache=True, nogil=True)
def _decode_levels(scales, codes, starts, code_starts, scratch, bits, largest, out):
    for chunk in range(len(starts) - 1):
        y = out[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        data = codes[code_starts[chunk] : code_starts[chunk + 1]]
        if bits == 8:
            _scale_levels(data, _i32(largest), scales[chunk], y)
        else:
            _unpack(data, len(y), bits, scratch)
            _scale_levels(scratch, _i32(largest), scales[chunk], y)


@njit(cache=True, nogil=True)
def _scale_levels(levels, largest, scale, out):
    for i in range(len(out)):
        out[i] = _f32(_f32(_i32(_i32(levels[i]) - largest)) * scale)


@njit(cache=True, nogil=True)
def _round_to_fp8(x, inverse, out):
    for i in range(len(x)):
        scaled = _f32(x[i] * inverse)
        bits = scaled.view(_u32)
        exponent = max(_u32(bits & _INFINITY), _FP8_LOWEST)
        # As _ROUNDER, for steps of 2^(exponent - 3).
        rounder = _u32(exponent + _u32((20 << 23) + (1 << 22))).view(_f32)
        shifted = _f32(abs(scaled) + rounder)
        code = _u32(_u32(_u32(exponent - _FP8_LOWEST) >> _u32(20)) + _u32(shifted.view(_u32) & _u32(31)))
        out[i] = _u8(code | _u32((bits >> _u32(24)) & _u32(128)))


@njit(cache=True, nogil=True)
def _draw_fp8(x, inverse, seed, out):
    for i in range(len(x)):
        scaled = _f32(x[i] * inverse)
        bits = scaled.view(_u32)
        exponent = max(_u32(bits & _INFINITY), _FP8_LOWEST)
        steps = _f32(abs(scaled) * _u32(_u32(257 << 23) - exponent).view(_f32))
        level = _i32(steps)
        up = _uniform(_mix(_u32(_u32(i) + seed))) < _f32(steps - _f32(level))
        code = _u32(_u32(_u32(exponent - _FP8_LOWEST) >> _u32(20)) + _u32(level + _i32(up)))
        out[i] = _u8(min(code, _u32(0x7E)) | _u32((bits >> _u32(24)) & _u32(128)))


@njit(cache=True, nogil=True)
def _encode_fp8(values, starts, seeds, seed, scales, codes, stochastic):
    for chunk in range(len(starts) - 1):
        x = values[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        out = codes[starts[chunk] : starts[chunk + 1]]
        largest = _largest_bits(x)
        scale = _u32(largest).view(_f32)
        if largest >= _INFINITY or scale < _SMALLEST:
            scales[chunk] = np.nan if largest >= _INFINITY else 0
            _fill(out, _u8(0))
        else:
            scales[chunk] = _f32(scale / _f32(LARGEST_FP8))
            inverse = _f32(_f32(LARGEST_FP8) / scale)
            if stochastic:
                _draw_fp8(x, inverse, _mix(_u32(seeds[chunk] ^ seed)), out)
            else:
                _round_to_fp8(x, inverse, out)


@njit(cache=True, nogil=True)
def _decode_fp8(scales, codes, starts, table, out):
    for chunk in range(len(starts) - 1):
        y = out[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        levels = codes[starts[chunk] : starts[chunk + 1]]
        scale = scales[chunk]
        for i in range(len(y)):
            y[i] = _f32(table[levels[i]] * scale)


@njit(cache=True, nogil=True)
def _draw_powers(x, top, seed, out):
    lowest = _i32(max(top - 126, 1))
    up_from_lowest = _u32(_u32(254 - lowest) << _u32(23)).view(_f32)
    for i in range(len(x)):
        bits = _f32(x[i]).view(_u32)
        magnitude = _u32(bits & _u32(0x7FFFFFFF))
        number = _mix(_u32(_u32(i) + seed))
        exponent = _i32(magnitude >> _u32(23))
        up = _u32(number >> _u32(8)) < _u32(_u32(magnitude & _u32(0x7FFFFF)) * _u32(2))
        code = _i32(1 + top - min(_i32(exponent + _i32(up)), top))
        kept = _uniform(number) < _f32(abs(x[i]) * up_from_lowest)
        code = code if exponent >= lowest else _i32(_i32(1 + top - lowest) * _i32(kept))
        out[i] = _u8(_u32(code) | _u32((bits >> _u32(24)) & _u32(128))) if code > 0 else _u8(0)


@njit(cache=True, nogil=True)
def _encode_natural(values, starts, seeds, seed, scales, codes):
    for chunk in range(len(starts) - 1):
        x = values[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        out = codes[starts[chunk] : starts[chunk + 1]]
        largest = _largest_bits(x)
        if largest >= _INFINITY or largest == _u32(0):
            scales[chunk] = np.nan if largest >= _INFINITY else 0
            _fill(out, _u8(0))
        else:
            top = min(_i32(_i32(largest >> _u32(23)) + 1), _i32(254))
            scales[chunk] = _u32(_u32(top) << _u32(23)).view(_f32)
            _draw_powers(x, top, _mix(_u32(seeds[chunk] ^ seed)), out)


@njit(cache=True, nogil=True)
def _decode_natural(scales, codes, starts, out):
    for chunk in range(len(starts) - 1):
        y = out[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        levels = codes[starts[chunk] : starts[chunk + 1]]
        if np.isnan(scales[chunk]):
            _fill(y, scales[chunk])
            continue
        top = _u32(_f32(scales[chunk]).view(_u32) >> _u32(23))
        for i in range(len(y)):
            code = _u32(levels[i])
            below = _u32(code & _u32(0x7F))
            power = _u32(_u32(top + _u32(1) - below) << _u32(23))
            sign = _u32(_u32(code & _u32(0x80)) << _u32(24))
            y[i] = _u32(_u32(power | sign) if below > _u32(0) else _u32(0)).view(_f32)


@njit(cache=True, nogil=True)
def _encode_signs(values, starts, code_starts, scales, codes, scratch, worth):
    for chunk in range(len(starts) - 1):
        x = values[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        out = codes[code_starts[chunk] : code_starts[chunk + 1]]
        finite = _largest_bits(x) < _INFINITY
        if worth == _ONE:
            scales[chunk] = _f32(1) if finite else _f32(np.nan)
        elif worth == _L1:
            scales[chunk] = _f32(_sum_of_magnitudes(x) / len(x)) if finite else _f32(np.nan)
        else:
            high, count = _sum_of_positives(x)
            low = _sum_of_negatives(x)
            scales[2 * chunk] = _f32(high / max(count, 1)) if finite else _f32(np.nan)
            scales[2 * chunk + 1] = _f32(low / max(len(x) - count, 1)) if finite else _f32(np.nan)
        for i in range(len(x)):
            scratch[i] = _u8(x[i] >= _f32(0))
        _fill(scratch[len(x) : (len(x) + 7) // 8 * 8], _u8(0))
        _pack(scratch, len(x), 1, out)


@njit(cache=True, nogil=True)
def _decode_signs(scales, codes, starts, code_starts, scratch, worth, out):
    for chunk in range(len(starts) - 1):
        y = out[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        _unpack(codes[code_starts[chunk] : code_starts[chunk + 1]], len(y), 1, scratch)
        high = scales[2 * chunk] if worth == _MEANS else scales[chunk]
        low = scales[2 * chunk + 1] if worth == _MEANS else _f32(-high)
        for i in range(len(y)):
            y[i] = high if scratch[i] else low


@njit(cache=True, nogil=True)
def _draw_bf16(values, starts, seeds, seed, codes):
    for chunk in range(len(starts) - 1):
        x = values[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        out = codes[starts[chunk] : starts[chunk + 1]]
        chunk_seed = _mix(_u32(seeds[chunk] ^ seed))
        for i in range(len(x)):
            bits = _f32(x[i]).view(_u32)
            magnitude = _u32(bits & _u32(0x7FFFFFFF))
            number = _u32(_mix(_u32(_u32(i) + chunk_seed)) >> _u32(16))
            code = _u32(_u32(bits + (number if magnitude < _INFINITY else _u32(0))) >> _u32(16))
            out[i] = np.uint16(_u32(0x7FC0) if magnitude > _INFINITY else code)


@njit(cache=True, nogil=True)
def _draw_fp16(values, starts, seeds, seed, codes):
    for chunk in range(len(starts) - 1):
        x = values[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        out = codes[starts[chunk] : starts[chunk + 1]]
        chunk_seed = _mix(_u32(seeds[chunk] ^ seed))
        for i in range(len(x)):
            bits = _f32(x[i]).view(_u32)
            magnitude = _u32(bits & _u32(0x7FFFFFFF))
            number = _mix(_u32(_u32(i) + chunk_seed))
            magnitude_or_infinity = min(abs(x[i]), _f32(2.0**17))
            exponent = max(_u32(_f32(magnitude_or_infinity).view(_u32) & _INFINITY), _FP16_LOWEST)
            steps = _f32(magnitude_or_infinity * _u32(_u32(264 << 23) - exponent).view(_f32))
            level = _i32(steps)
            up = _uniform(number) < _f32(steps - _f32(level))
            code = _u32(_u32(_u32(exponent - _FP16_LOWEST) >> _u32(13)) + _u32(level + _i32(up)))
            code = min(code, _u32(0x7C00))
            code = _u32(code | _u32((bits >> _u32(16)) & _u32(0x8000)))
            out[i] = np.uint16(_u32(0x7E00) if magnitude > _INFINITY else code)


_NO_SEEDS = np.empty(0, np.int64)


@dataclass(frozen=True)
class _Part:
    """Neighbouring chunks, with views of what belongs to them; a kernel counts elements from the part's first one."""

    elements: slice
    starts: NDArray[np.int64]
    code_starts: NDArray[np.int64]
    seeds: NDArray[np.int64]
    scales: NDArray[np.float32]


def _parts(chunks: Chunks, packed: torch.Tensor, dtype: torch.dtype, *, random: bool = False) -> Iterator[_Part]:
    """All chunks at once, or as many as hold about `_PIECE` elements where values must be widened."""
    scales = packed[: chunks.scale_bytes].view(torch.float32).numpy()
    step = chunks.num_chunks if dtype == torch.float32 else max(1, _PIECE // chunks.block)
    for first in range(0, chunks.num_chunks, step or 1):
        last = min(first + step, chunks.num_chunks)
        yield _Part(
            slice(int(chunks.starts[first]), int(chunks.starts[last])),
            chunks.starts[first : last + 1],
            chunks.code_starts[first : last + 1],
            chunks.seeds[first:last] if random else _NO_SEEDS,
            scales[first * chunks.num_scales : last * chunks.num_scales],
        )


def _codes(packed: torch.Tensor, chunks: Chunks) -> NDArray[np.uint8]:
    return packed[chunks.scale_bytes :].numpy()


def _values(flat: torch.Tensor, part: _Part) -> NDArray[np.float32]:
    return flat[part.elements].detach().float().contiguous().numpy()


def _scratch(chunks: Chunks) -> NDArray[np.uint8]:
    return np.empty(-(-chunks.block // 8) * 8, np.uint8)


def _write(out: torch.Tensor, part: _Part, decode: Callable[[NDArray[np.float32]], None]) -> None:
    """Let `decode` write float32 into the part's place of `out`, directly where that is float32 too."""
    place = out[part.elements]
    found = (
        place
        if place.dtype == torch.float32 and place.is_contiguous()
        else torch.empty(len(place), dtype=torch.float32, device="cpu")
    )
    decode(found.numpy())
    if found is not place:
        place.copy_(found)


def _levels_encoder(
    flat: torch.Tensor,
    chunks: Chunks,
    packed: torch.Tensor,
    moment_seed: int,
    largest: int,
    measure: int,
    clip: float,
    stochastic: bool,
) -> None:
    codes, scratch = _codes(packed, chunks), _scratch(chunks)
    for part in _parts(chunks, packed, flat.dtype, random=stochastic):
        places = part.starts, part.code_starts, part.seeds, moment_seed, part.scales, codes, scratch
        _encode_levels(_values(flat, part), *places, chunks.bits, largest, measure, clip, stochastic)


def encode_integer(
    flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int, *, largest: int, stochastic: bool
) -> None:
    """See `reference.encode_integer`."""
    _levels_encoder(flat, chunks, packed, moment_seed, largest, _ABSMAX, 0.0, stochastic)


def encode_qsgd(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int, *, levels: int) -> None:
    """See `reference.encode_qsgd`."""
    _levels_encoder(flat, chunks, packed, moment_seed, levels, _L2, 0.0, True)


def encode_terngrad(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int, *, clip: float) -> None:
    """See `reference.encode_terngrad`."""
    _levels_encoder(flat, chunks, packed, moment_seed, 1, _CLIPPED, float(clip), True)


def decode_levels(packed: torch.Tensor, chunks: Chunks, out: torch.Tensor, *, largest: int) -> None:
    """See `reference.decode_levels`."""
    codes, scratch = _codes(packed, chunks), _scratch(chunks)
    for part in _parts(chunks, packed, out.dtype):
        places = part.scales, codes, part.starts, part.code_starts, scratch, chunks.bits, largest
        _write(out, part, lambda y, places=places: _decode_levels(*places, y))


def encode_fp8(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int, *, stochastic: bool) -> None:
    """See `reference.encode_fp8`."""
    codes = _codes(packed, chunks)
    for part in _parts(chunks, packed, flat.dtype, random=stochastic):
        _encode_fp8(_values(flat, part), part.starts, part.seeds, moment_seed, part.scales, codes, stochastic)


def decode_fp8(packed: torch.Tensor, chunks: Chunks, out: torch.Tensor) -> None:
    """See `reference.decode_fp8`."""
    codes = _codes(packed, chunks)
    for part in _parts(chunks, packed, out.dtype):
        _write(out, part, lambda y, part=part: _decode_fp8(part.scales, codes, part.starts, _FP8_VALUES, y))


def encode_natural(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int) -> None:
    """See `reference.encode_natural`."""
    codes = _codes(packed, chunks)
    for part in _parts(chunks, packed, flat.dtype, random=True):
        _encode_natural(_values(flat, part), part.starts, part.seeds, moment_seed, part.scales, codes)


def decode_natural(packed: torch.Tensor, chunks: Chunks, out: torch.Tensor) -> None:
    """See `reference.decode_natural`."""
    codes = _codes(packed, chunks)
    for part in _parts(chunks, packed, out.dtype):
        _write(out, part, lambda y, part=part: _decode_natural(part.scales, codes, part.starts, y))


def _signs_encoder(worth: int) -> Callable[..., None]:
    def encode(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int) -> None:
        codes, scratch = _codes(packed, chunks), _scratch(chunks)
        for part in _parts(chunks, packed, flat.dtype):
            _encode_signs(_values(flat, part), part.starts, part.code_starts, part.scales, codes, scratch, worth)

    return encode


def _signs_decoder(worth: int) -> Callable[..., None]:
    def decode(packed: torch.Tensor, chunks: Chunks, out: torch.Tensor) -> None:
        codes, scratch = _codes(packed, chunks), _scratch(chunks)
        for part in _parts(chunks, packed, out.dtype):
            places = part.scales, codes, part.starts, part.code_starts, scratch, worth
            _write(out, part, lambda y, places=places: _decode_signs(*places, y))

    return decode


def encode_bf16(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int) -> None:
    """See `reference.encode_bf16`."""
    codes = _codes(packed, chunks).view(np.uint16)
    for part in _parts(chunks, packed, flat.dtype, random=True):
        _draw_bf16(_values(flat, part), part.starts, part.seeds, moment_seed, codes)


def encode_fp16(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int) -> None:
    """See `reference.encode_fp16`."""
    codes = _codes(packed, chunks).view(np.uint16)
    for part in _parts(chunks, packed, flat.dtype, random=True):
        _draw_fp16(_values(flat, part), part.starts, part.seeds, moment_seed, codes)


ENCODERS: dict[str, Callable[..., None]] = {
    "integer": encode_integer,
    "qsgd": encode_qsgd,
    "terngrad": encode_terngrad,
    "fp8": encode_fp8,
    "natural": encode_natural,
    "sign": _signs_encoder(_ONE),
    "scaled_sign": _signs_encoder(_L1),
    "onebit": _signs_encoder(_MEANS),
    "bf16": encode_bf16,
    "fp16": encode_fp16,
}
"""As `reference.ENCODERS`."""

DECODERS: dict[str, Callable[..., None]] = {
    "levels": decode_levels,
    "fp8": decode_fp8,
    "natural": decode_natural,
    "sign": _signs_decoder(_ONE),
    "onebit": _signs_decoder(_MEANS),
}
"""As `reference.DECODERS`."""
