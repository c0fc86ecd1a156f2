"""Quantizers on a GPU: a program reads a few chunks once, makes their scales and codes in registers, and writes them.

Bit for bit what `reference` gives; only a scale that is a sum (L1, L2, means) may differ in its last bit, because the
sum is made in another order. Codes of 3, 5, 6 or 7 bits, and scales of chunks that do not fit into one program, are
left to the reference. Imported only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

from laconic.compression.kernels import reference
from laconic.compression.kernels.reference import LARGEST_FP8, SMALLEST_SCALE
from laconic.compression.wire.chunks import Chunks

_TILE = 2048
"""Elements of one program."""
_WARPS = 4
"""These two by measurement on an H200, for all kernels together."""

# Triton takes a constant only in this form.
_SMALLEST = tl.constexpr(SMALLEST_SCALE)
_ROUNDER = tl.constexpr(1.5 * 2**23)


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _uniform(number):
    return (number >> 8).to(tl.int32).to(tl.float32) * (2.0**-24)


@triton.jit
def _finite(scale):
    return tl.where(tl.abs(scale) <= 3.4028234663852886e38, scale, float("nan"))


@triton.jit
def _absmax(x):
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
    return lower + (_uniform(numbers) < magnitudes - lower).to(tl.float32)


@triton.jit
def _levels(scaled, largest, numbers):
    level = tl.minimum(_up_or_down(tl.abs(scaled), numbers), largest)
    return (tl.where(scaled < 0, -level, level) + largest).to(tl.int32)


@triton.jit
def _power_of_two(exponent):
    return (exponent << 23).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _level_codes(x, length, largest, clip, numbers, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes 0 .. 2 * largest, and what one level is worth."""
    if KIND == "integer":
        scale = _absmax(x)
    else:
        wide = x.to(tl.float64)
        squares = tl.sum(wide * wide, axis=1)
        if KIND == "qsgd":
            scale = _finite(tl.sqrt(squares).to(tl.float32))
        else:
            bound = (clip * tl.sqrt(squares / tl.maximum(length, 1).to(tl.float64))).to(tl.float32)
            scale = _absmax(x)
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
def _fp8_codes(x, largest, numbers, STOCHASTIC: tl.constexpr):
    scale = _absmax(x)
    scaled = _scaled(x, scale, largest)
    if STOCHASTIC:
        magnitudes = tl.abs(scaled)
        # Between two powers of two, and below the lowest, e4m3 has even steps.
        exponent = tl.maximum(magnitudes.to(tl.int32, bitcast=True) >> 23, 121)
        steps = _up_or_down(magnitudes * _power_of_two(257 - exponent), numbers).to(tl.int32)
        codes = tl.minimum(((exponent - 121) << 3) + steps, 0x7E)
        codes += tl.where(scaled.to(tl.int32, bitcast=True) < 0, 128, 0)
    else:
        codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    return _unit(scale, largest), codes


@triton.jit
def _natural_codes(x, numbers):
    scale = _absmax(x)
    known = tl.where(scale == scale, scale, 0.0)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.minimum((known.to(tl.int32, bitcast=True) >> 23) + 1, 254)
    lowest = tl.maximum(top - 126, 1)
    up = (numbers >> 8).to(tl.int32) < 2 * (bits & 0x7FFFFF)
    exponent = tl.minimum((bits >> 23) + up.to(tl.int32), top[:, None])
    kept = _uniform(numbers) < tl.abs(x) * _power_of_two(254 - lowest)[:, None]
    small = (1 + top - lowest)[:, None] * kept.to(tl.int32)
    codes = tl.where((bits >> 23) >= lowest[:, None], 1 + top[:, None] - exponent, small)
    signed = codes + tl.where(x.to(tl.int32, bitcast=True) < 0, 128, 0)
    codes = tl.where((scale > 0)[:, None] & (codes > 0), signed, 0)
    return tl.where(scale > 0, _power_of_two(top), scale), codes


@triton.jit
def _means(x, positive, length):
    """Of the values from zero up, and of those below."""
    wide = x.to(tl.float64)
    high = tl.sum(tl.where(x >= 0, wide, 0.0), axis=1) / tl.maximum(positive, 1).to(tl.float64)
    low = tl.sum(tl.where(x < 0, wide, 0.0), axis=1) / tl.maximum(length - positive, 1).to(tl.float64)
    return high.to(tl.float32), low.to(tl.float32)


@triton.jit
def _places(starts, code_starts, row, there, BITS: tl.constexpr, ALIGNED: tl.constexpr):
    """Where chunks begin, how long they are, and where their codes begin."""
    start = tl.load(starts + row, mask=there, other=0)
    length = (tl.load(starts + row + 1, mask=there, other=0) - start).to(tl.int32)
    code_start = tl.load(code_starts + row, mask=there, other=0)
    if ALIGNED:
        # Then the compiler may move sixteen values at a time.
        start = tl.multiple_of(start, 16)
        length = tl.multiple_of(length, 16)
        code_start = tl.multiple_of(code_start, 2 * BITS)
    return start, length, code_start


@triton.jit
def _encode(
    flat,
    starts,
    code_starts,
    seeds,
    packed,
    scale_bytes,
    num_chunks,
    moment_seed,
    largest,
    clip,
    KIND: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    scales = packed.to(tl.pointer_type(tl.float32), bitcast=True)
    codes_at = packed + scale_bytes
    row = tl.program_id(0) // PARTS * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(0) % PARTS
    there = row < num_chunks
    start, length, code_start = _places(starts, code_starts, row, there, BITS, ALIGNED)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column[None, :] < length[:, None]
    x = tl.load(flat + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if STOCHASTIC:
        seed = _mix((tl.load(seeds + row, mask=there, other=0) ^ moment_seed).to(tl.uint32))
        numbers = _mix(column[None, :].to(tl.uint32) + seed[:, None])
    else:
        numbers = column[None, :].to(tl.uint32)
    if KIND == "fp8":
        scale, codes = _fp8_codes(x, largest, numbers, STOCHASTIC)
        tl.store(scales + row, scale, mask=there)
    elif KIND == "natural":
        scale, codes = _natural_codes(x, numbers)
        tl.store(scales + row, scale, mask=there)
    elif KIND == "integer" or KIND == "qsgd" or KIND == "terngrad":
        scale, codes = _level_codes(x, length, largest, clip, numbers, KIND, STOCHASTIC)
        tl.store(scales + row, scale, mask=there)
    else:
        codes = ((x >= 0) & inside).to(tl.int32)
        absmax = _absmax(x)
        if KIND == "sign":
            # Filled with ones before; of several programs that share a chunk, one may find what the others do not.
            tl.store(scales + row, absmax, mask=there & (absmax != absmax))
        elif KIND == "scaled_sign":
            mean = tl.sum(tl.abs(x).to(tl.float64), axis=1) / tl.maximum(length, 1).to(tl.float64)
            mean = tl.where(absmax == absmax, _finite(mean.to(tl.float32)), float("nan"))
            tl.store(scales + row, mean, mask=there)
        else:
            high, low = _means(x, tl.sum(codes, axis=1), length)
            tl.store(scales + 2 * row, tl.where(absmax == absmax, high, absmax), mask=there)
            tl.store(scales + 2 * row + 1, tl.where(absmax == absmax, low, absmax), mask=there)
    codes = tl.where(inside, codes, 0)
    if BITS == 8:
        tl.store(codes_at + code_start[:, None] + column[None, :], codes.to(tl.uint8), mask=inside)
    else:
        PER: tl.constexpr = 8 // BITS
        grouped = tl.reshape(codes, (ROWS, BLOCK // PER, PER))
        data = tl.sum(grouped << (tl.arange(0, PER) * BITS)[None, None, :], axis=2)
        byte = part * (BLOCK // PER) + tl.arange(0, BLOCK // PER)
        due = byte[None, :] * PER < length[:, None]
        tl.store(codes_at + code_start[:, None] + byte[None, :], data.to(tl.uint8), mask=due)


@triton.jit
def _decode(
    packed,
    scale_bytes,
    starts,
    code_starts,
    out,
    num_chunks,
    largest,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    scales = packed.to(tl.pointer_type(tl.float32), bitcast=True)
    codes_at = packed + scale_bytes
    row = tl.program_id(0) // PARTS * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(0) % PARTS
    there = row < num_chunks
    start, length, code_start = _places(starts, code_starts, row, there, BITS, ALIGNED)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column[None, :] < length[:, None]
    if BITS == 8:
        codes = tl.load(codes_at + code_start[:, None] + column[None, :], mask=inside, other=0)
    else:
        PER: tl.constexpr = 8 // BITS
        byte = part * (BLOCK // PER) + tl.arange(0, BLOCK // PER)
        due = byte[None, :] * PER < length[:, None]
        data = tl.load(codes_at + code_start[:, None] + byte[None, :], mask=due, other=0).to(tl.int32)
        spread = (data[:, :, None] >> (tl.arange(0, PER) * BITS)[None, None, :]) & ((1 << BITS) - 1)
        codes = tl.reshape(spread, (ROWS, BLOCK))
    if KIND == "levels":
        scale = tl.load(scales + row, mask=there, other=0.0)
        values = (codes.to(tl.int32) - largest).to(tl.float32) * scale[:, None]
    elif KIND == "fp8":
        scale = tl.load(scales + row, mask=there, other=0.0)
        values = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
    elif KIND == "natural":
        scale = tl.load(scales + row, mask=there, other=0.0)
        known = tl.where(scale == scale, scale, 0.0)
        below = (codes.to(tl.int32) & 127) - 1
        top = known.to(tl.int32, bitcast=True) >> 23
        power = _power_of_two(tl.maximum(top[:, None] - below, 0))
        values = tl.where(below >= 0, power, 0.0)
        values = tl.where(codes.to(tl.int32) >= 128, -values, values)
        values = tl.where((scale == scale)[:, None], values, scale[:, None])
    elif KIND == "sign":
        scale = tl.load(scales + row, mask=there, other=0.0)
        values = tl.where(codes == 1, scale[:, None], -scale[:, None])
    else:
        high = tl.load(scales + 2 * row, mask=there, other=0.0)
        low = tl.load(scales + 2 * row + 1, mask=there, other=0.0)
        values = tl.where(codes == 1, high[:, None], low[:, None])
    tl.store(out + start[:, None] + column[None, :], values.to(out.dtype.element_ty), mask=inside)


def _shape(chunks: Chunks) -> tuple[tuple[int], dict[str, int]]:
    """How many programs, and the constants they are compiled for: several chunks a program, or several for a chunk."""
    longest = max(8, triton.next_power_of_2(min(chunks.block, chunks.bucket.numel)))
    block, parts = min(longest, _TILE), max(1, longest // _TILE)
    rows = _TILE // block
    constants = {"BITS": chunks.bits, "ROWS": rows, "BLOCK": block, "PARTS": parts, "ALIGNED": chunks.aligned}
    return (triton.cdiv(chunks.num_chunks, rows) * parts,), constants


def _fits(chunks: Chunks) -> bool:
    return chunks.bits in (1, 2, 4, 8)


def _encoder(kind: str, *, largest: str | int = 1, always_random: bool = False) -> Callable[..., None]:
    def encode(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int, **settings: float) -> None:
        if not chunks.num_chunks:
            return
        grid, constants = _shape(chunks)
        # Only signs need nothing that all programs of a chunk would have to agree on first.
        if not _fits(chunks) or (constants["PARTS"] > 1 and kind != "sign"):
            reference.ENCODERS[kind](flat, chunks, packed, moment_seed, **settings)
            return
        if kind == "sign":
            packed[: chunks.scale_bytes].view(torch.float32).fill_(1.0)
        _encode[grid](
            flat,
            chunks.starts_tensor,
            chunks.code_starts_tensor,
            chunks.seeds_tensor,
            packed,
            chunks.scale_bytes,
            chunks.num_chunks,
            moment_seed,
            float(settings[largest] if isinstance(largest, str) else largest),
            float(settings.get("clip", 0.0)),
            KIND=kind,
            STOCHASTIC=always_random or bool(settings.get("stochastic", False)),
            **constants,
            num_warps=_WARPS,
            # A product that is added must be rounded first, as everywhere else.
            enable_fp_fusion=False,
        )

    return encode


def _decoder(kind: str) -> Callable[..., None]:
    def decode(packed: torch.Tensor, chunks: Chunks, out: torch.Tensor, **settings: float) -> None:
        if not _fits(chunks):
            reference.DECODERS[kind](packed, chunks, out, **settings)
            return
        if not chunks.num_chunks:
            return
        grid, constants = _shape(chunks)
        _decode[grid](
            packed,
            chunks.scale_bytes,
            chunks.starts_tensor,
            chunks.code_starts_tensor,
            out,
            chunks.num_chunks,
            int(settings.get("largest", 0)),
            KIND=kind,
            **constants,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )

    return decode


ENCODERS: dict[str, Callable[..., None]] = {
    "integer": _encoder("integer", largest="largest"),
    "qsgd": _encoder("qsgd", largest="levels", always_random=True),
    "terngrad": _encoder("terngrad", always_random=True),
    "fp8": _encoder("fp8", largest=LARGEST_FP8),
    "natural": _encoder("natural", always_random=True),
    "sign": _encoder("sign"),
    "scaled_sign": _encoder("scaled_sign"),
    "onebit": _encoder("onebit"),
}

DECODERS: dict[str, Callable[..., None]] = {
    "levels": _decoder("levels"),
    "fp8": _decoder("fp8"),
    "natural": _decoder("natural"),
    "sign": _decoder("sign"),
    "onebit": _decoder("onebit"),
}
