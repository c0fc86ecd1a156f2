"""Quantizers on a GPU: a program reads a few chunks once, makes their scales and codes in registers, and writes them.

Results equal those of `reference` bit for bit; only a scale that is a sum (L1, L2, means) may differ in its last bit,
because the sum is made in another order. Scales of chunks that do not fit into one program are left to the reference.
Imported only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

from laconic.compression.kernels.reference import quantizers as reference
from laconic.compression.kernels.reference.quantizers import LARGEST_FP8
from laconic.compression.kernels.triton_gpu.codes import (
    absmax,
    bf16_codes,
    codes_in_bytes,
    finite,
    fp8_codes,
    fp16_codes,
    level_codes,
    means,
    mix,
    natural_codes,
    packed_bytes,
    power_codes,
    power_of_two,
)
from laconic.compression.wire.chunks import Chunks

_MOST = 2048
"""Elements of one program at most."""


class _Tile(NamedTuple):
    """How values are divided among programs; chosen by measurement on an H200."""

    elements: int
    """Elements of one program, if chunks are not longer."""
    per_warp: int
    """Elements of one warp."""


_READS_ONE = _Tile(512, 1024)
"""For programs that read a gradient or a payload."""
_READS_MORE = _Tile(1024, 512)
"""For programs that also read a residual, or several payloads."""


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
        if BITS & (BITS - 1) == 0:
            code_start = tl.multiple_of(code_start, 2 * BITS)
    return start, length, code_start


@triton.jit
def _bytes_of_words(length, code_start, part, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Positions of the bytes of each eight codes, padded to eight bytes, and a mask of the bytes that exist."""
    byte = tl.arange(0, 8)[None, :]
    place = (part * (BLOCK // 8) + tl.arange(0, BLOCK // 8))[:, None] * BITS + byte
    num_bytes = (length * BITS + 7) // 8
    due = (place[None, :, :] < num_bytes[:, None, None]) & ((byte + 0 * place) < BITS)[None, :, :]
    return code_start[:, None, None] + place[None, :, :], due


@triton.jit
def _encode(
    flat,
    flat_stride,
    residuals,
    starts,
    code_starts,
    seeds,
    seeds_stride,
    packed,
    packed_stride,
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
    RESIDUAL: tl.constexpr,
    DUE: tl.constexpr,
):
    """The second axis of the grid: rows, each of which has a payload of its own.

    residuals: the address of the residual of each row. A residual is added to its row, and replaced by the part that
    the codes lose. RESIDUAL is the dtype of residuals, and DUE that of the sum; None where there are no residuals.
    """
    flat += tl.program_id(1).to(tl.int64) * flat_stride
    seeds += tl.program_id(1).to(tl.int64) * seeds_stride
    packed += tl.program_id(1).to(tl.int64) * packed_stride
    scales = packed.to(tl.pointer_type(tl.float32), bitcast=True)
    codes_at = packed + scale_bytes
    row = tl.program_id(0) // PARTS * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(0) % PARTS
    there = row < num_chunks
    start, length, code_start = _places(starts, code_starts, row, there, BITS, ALIGNED)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column[None, :] < length[:, None]
    at = start[:, None] + column[None, :]
    x = tl.load(flat + at, mask=inside, other=0.0).to(tl.float32)
    due, residual = x, residuals
    if DUE is not None:
        # Rounded wherever two operations of torch would round.
        residual = tl.load(residuals + tl.program_id(1)).to(tl.pointer_type(RESIDUAL))
        residual = tl.multiple_of(residual, 16)
        due = (tl.load(residual + at, mask=inside, other=0.0).to(tl.float32) + x).to(DUE).to(tl.float32)
        x = due.to(flat.dtype.element_ty).to(tl.float32)
    if STOCHASTIC:
        seed = mix((tl.load(seeds + row, mask=there, other=0) ^ moment_seed).to(tl.uint32))
        numbers = mix(column[None, :].to(tl.uint32) + seed[:, None])
    else:
        numbers = column[None, :].to(tl.uint32)
    if KIND == "fp8":
        scale, codes = fp8_codes(x, largest, numbers, STOCHASTIC)
        tl.store(scales + row, scale, mask=there)
    elif KIND == "natural":
        scale, codes = natural_codes(x, numbers)
        tl.store(scales + row, scale, mask=there)
    elif KIND == "nuqsgd":
        scale, codes = power_codes(x, tl.cast(largest, tl.int32), numbers)
        tl.store(scales + row, scale, mask=there)
    elif KIND == "bf16":
        codes = bf16_codes(x, numbers)
    elif KIND == "fp16":
        codes = fp16_codes(x, numbers)
    elif KIND == "integer" or KIND == "qsgd" or KIND == "terngrad":
        scale, codes = level_codes(x, length, largest, clip, numbers, KIND, STOCHASTIC)
        tl.store(scales + row, scale, mask=there)
        if DUE is not None:
            values = (codes - tl.cast(largest, tl.int32)).to(tl.float32) * scale[:, None]
            sent = values.to(flat.dtype.element_ty).to(tl.float32)
            lost = (due - sent).to(DUE).to(RESIDUAL)
            # Neither NaN nor infinity.
            known = tl.abs(lost.to(tl.float32)) <= 3.4028234663852886e38
            tl.store(residual + at, tl.where(known, lost, 0.0), mask=inside)
    else:
        codes = ((x >= 0) & inside).to(tl.int32)
        largest_here = absmax(x)
        if KIND == "sign":
            # Filled with ones before; of several programs that share a chunk, one may find what the others do not.
            tl.store(scales + row, largest_here, mask=there & (largest_here != largest_here))
        elif KIND == "scaled_sign":
            mean = tl.sum(tl.abs(x).to(tl.float64), axis=1) / tl.maximum(length, 1).to(tl.float64)
            mean = tl.where(largest_here == largest_here, finite(mean.to(tl.float32)), float("nan"))
            tl.store(scales + row, mean, mask=there)
        else:
            high, low = means(x, tl.sum(codes, axis=1), length)
            tl.store(scales + 2 * row, tl.where(largest_here == largest_here, high, largest_here), mask=there)
            tl.store(scales + 2 * row + 1, tl.where(largest_here == largest_here, low, largest_here), mask=there)
    codes = tl.where(inside, codes, 0)
    if BITS == 16:
        wide = codes_at.to(tl.pointer_type(tl.uint16), bitcast=True)
        tl.store(wide + code_start[:, None] // 2 + column[None, :], codes.to(tl.uint16), mask=inside)
    elif BITS == 8:
        tl.store(codes_at + code_start[:, None] + column[None, :], codes.to(tl.uint8), mask=inside)
    elif BITS & (BITS - 1) != 0:
        # Eight codes are one word, of which as many bytes are written as a code has bits.
        eights = tl.reshape(codes, (ROWS, BLOCK // 8, 8)).to(tl.int64) << (tl.arange(0, 8) * BITS)[None, None, :]
        at, due = _bytes_of_words(length, code_start, part, BITS, BLOCK)
        data = tl.sum(eights, axis=2)[:, :, None] >> (tl.arange(0, 8) * 8)[None, None, :]
        tl.store(codes_at + at, (data & 0xFF).to(tl.uint8), mask=due)
    else:
        PER: tl.constexpr = 8 // BITS
        data = packed_bytes(codes, BITS, ROWS, BLOCK)
        byte = part * (BLOCK // PER) + tl.arange(0, BLOCK // PER)
        due = byte[None, :] * PER < length[:, None]
        tl.store(codes_at + code_start[:, None] + byte[None, :], data.to(tl.uint8), mask=due)


@triton.jit
def _values(
    packed,
    scale_bytes,
    row,
    there,
    column,
    length,
    code_start,
    part,
    largest,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The values that the codes of a few chunks stand for, in float32."""
    scales = packed.to(tl.pointer_type(tl.float32), bitcast=True)
    codes_at = packed + scale_bytes
    if BITS == 8:
        codes = tl.load(
            codes_at + code_start[:, None] + column[None, :], mask=column[None, :] < length[:, None], other=0
        )
    elif BITS & (BITS - 1) != 0:
        at, due = _bytes_of_words(length, code_start, part, BITS, BLOCK)
        data = tl.load(codes_at + at, mask=due, other=0).to(tl.int64) << (tl.arange(0, 8) * 8)[None, None, :]
        spread = tl.sum(data, axis=2)[:, :, None] >> (tl.arange(0, 8) * BITS)[None, None, :]
        codes = tl.reshape((spread & ((1 << BITS) - 1)).to(tl.int32), (ROWS, BLOCK))
    else:
        PER: tl.constexpr = 8 // BITS
        byte = part * (BLOCK // PER) + tl.arange(0, BLOCK // PER)
        due = byte[None, :] * PER < length[:, None]
        data = tl.load(codes_at + code_start[:, None] + byte[None, :], mask=due, other=0).to(tl.int32)
        codes = codes_in_bytes(data, BITS)
    if KIND == "levels":
        scale = tl.load(scales + row, mask=there, other=0.0)
        values = (codes.to(tl.int32) - largest).to(tl.float32) * scale[:, None]
    elif KIND == "nuqsgd":
        scale = tl.load(scales + row, mask=there, other=0.0)
        signed = codes.to(tl.int32) - largest
        power = tl.where(signed == 0, 0.0, power_of_two(127 + tl.abs(signed) - largest))
        values = tl.where(signed < 0, -power, power) * scale[:, None]
    elif KIND == "fp8":
        scale = tl.load(scales + row, mask=there, other=0.0)
        values = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
    elif KIND == "natural":
        scale = tl.load(scales + row, mask=there, other=0.0)
        known = tl.where(scale == scale, scale, 0.0)
        below = (codes.to(tl.int32) & 127) - 1
        top = known.to(tl.int32, bitcast=True) >> 23
        power = power_of_two(tl.maximum(top[:, None] - below, 0))
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
    return values


@triton.jit
def _added(before, values, DTYPE: tl.constexpr):
    """The sum, with `values` rounded first and added in float32, as two operations of torch would do it."""
    wide: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32  # noqa: SIM300
    return (before.to(wide) + values.to(DTYPE).to(wide)).to(DTYPE)


@triton.jit
def _decode(
    packed,
    packed_stride,
    num_rows,
    scale_bytes,
    starts,
    code_starts,
    out,
    out_stride,
    num_chunks,
    largest,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTO: tl.constexpr,
):
    """INTO is "each": the second axis of the grid is payloads, each decoded to a row of its own; "added": one payload
    is added to what is there; "sum": one program adds up all payloads.
    """
    row = tl.program_id(0) // PARTS * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(0) % PARTS
    there = row < num_chunks
    start, length, code_start = _places(starts, code_starts, row, there, BITS, ALIGNED)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column[None, :] < length[:, None]
    payload = tl.program_id(1).to(tl.int64)
    packed += payload * packed_stride
    at = out + payload * out_stride + start[:, None] + column[None, :]
    values = _values(
        packed, scale_bytes, row, there, column, length, code_start, part, largest, KIND, BITS, ROWS, BLOCK
    )
    if INTO == "added":
        total = _added(tl.load(at, mask=inside, other=0.0), values, out.dtype.element_ty)
    else:
        total = values.to(out.dtype.element_ty)
    if INTO == "sum":
        for _ in range(1, num_rows):
            packed += packed_stride
            values = _values(
                packed, scale_bytes, row, there, column, length, code_start, part, largest, KIND, BITS, ROWS, BLOCK
            )
            total = _added(total, values, out.dtype.element_ty)
    tl.store(at, total, mask=inside)


def _shape(chunks: Chunks, wanted: _Tile = _READS_ONE) -> tuple[tuple[int], dict[str, int]]:
    """How many programs, and the constants they are compiled for: several chunks a program, or several for a chunk."""
    # Without the functions of Triton for this: they take as long as a launch.
    longest = max(8, 1 << (min(chunks.block, chunks.bucket.numel) - 1).bit_length())
    tile = min(max(wanted.elements, longest), _MOST)
    block, parts = min(longest, tile), max(1, longest // tile)
    rows = tile // block
    constants = {"BITS": chunks.bits, "ROWS": rows, "BLOCK": block, "PARTS": parts, "ALIGNED": chunks.aligned}
    return (-(-chunks.num_chunks // rows) * parts,), constants | {"num_warps": max(1, tile // wanted.per_warp)}


_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_WITHOUT_SCALE = ("sign", "bf16", "fp16")
"""Codes without a scale, on which all programs of a chunk would have to agree first."""


@lru_cache(maxsize=1024)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The addresses as a tensor on the device; residuals never move, so each list of addresses is copied once."""
    return torch.tensor(pointers, dtype=torch.int64, device=device)


def can_encode(kind: str, chunks: Chunks) -> bool:
    """Whether a program can encode its part of a chunk without seeing the rest."""
    return kind in _WITHOUT_SCALE or _shape(chunks)[1]["PARTS"] == 1


class _Encoder:
    """One kind of codes, for one payload, for several, or with a residual."""

    def __init__(self, kind: str, *, largest: str | int = 1, always_random: bool = False) -> None:
        self._kind = kind
        self._largest = largest
        self._always_random = always_random

    def one(
        self, flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int, **settings: float
    ) -> None:
        if can_encode(self._kind, chunks):
            self._launch(flat[None], (), [chunks], packed[None], moment_seed, settings)
        else:
            reference.ENCODERS[self._kind](flat, chunks, packed, moment_seed, **settings)

    def rows(
        self, rows: torch.Tensor, chunks: Sequence[Chunks], packed: torch.Tensor, moment_seed: int, **settings: float
    ) -> None:
        self._launch(rows, (), chunks, packed, moment_seed, settings)

    def keeping(
        self,
        rows: torch.Tensor,
        residuals: Sequence[torch.Tensor],
        chunks: Sequence[Chunks],
        packed: torch.Tensor,
        moment_seed: int,
        **settings: float,
    ) -> None:
        self._launch(rows, residuals, chunks, packed, moment_seed, settings)

    def _launch(
        self,
        rows: torch.Tensor,
        residuals: Sequence[torch.Tensor],
        chunks: Sequence[Chunks],
        packed: torch.Tensor,
        moment_seed: int,
        settings: Mapping[str, float],
    ) -> None:
        first = chunks[0]
        if not first.num_chunks:
            return
        (programs,), constants = _shape(first, _READS_MORE if residuals else _READS_ONE)
        if self._kind == "sign":
            packed[:, : first.scale_bytes].view(torch.float32).fill_(1.0)
        random = self._always_random or bool(settings.get("stochastic", False))
        several = len(rows) > 1
        seeds = torch.stack([each.seeds_tensor for each in chunks]) if random and several else first.seeds_tensor[None]
        # Residuals of several rows are tensors of their own: the kernel gets their addresses.
        kept = (
            _addresses(tuple(each.data_ptr() for each in residuals), rows.device) if residuals else first.seeds_tensor
        )
        residual = residuals[0].dtype if residuals else rows.dtype
        _encode[programs, len(rows)](
            rows,
            # Zero is a multiple of sixteen: the compiler may move sixteen values of a single row at a time.
            rows.stride(0) if several else 0,
            kept,
            first.starts_tensor,
            first.code_starts_tensor,
            seeds,
            seeds.stride(0) if len(seeds) > 1 else 0,
            packed,
            packed.stride(0) if several else 0,
            first.scale_bytes,
            first.num_chunks,
            moment_seed,
            float(settings[self._largest] if isinstance(self._largest, str) else self._largest),
            float(settings.get("clip", 0.0)),
            KIND=self._kind,
            STOCHASTIC=random,
            RESIDUAL=_DTYPES.get(residual),
            DUE=_DTYPES[torch.promote_types(rows.dtype, residual)] if residuals else None,
            **constants,
            # A product that is added must be rounded first, as everywhere else.
            enable_fp_fusion=False,
        )


def _row_decoder(kind: str, into: str) -> Callable[..., None]:
    def decode(rows: torch.Tensor, chunks: Chunks, out: torch.Tensor, **settings: float) -> None:
        if not chunks.num_chunks:
            return
        (programs,), constants = _shape(chunks, _READS_MORE if into == "sum" else _READS_ONE)
        each = into == "each"
        # Zero is a multiple of sixteen: the compiler may move sixteen bytes of a single payload at a time.
        strides = (rows.stride(0), out.stride(0) if each else 0) if len(rows) > 1 else (0, 0)
        _decode[programs, len(rows) if each else 1](
            rows,
            strides[0],
            len(rows),
            chunks.scale_bytes,
            chunks.starts_tensor,
            chunks.code_starts_tensor,
            out,
            strides[1],
            chunks.num_chunks,
            int(settings.get("largest", 0)),
            KIND=kind,
            INTO=into,
            **constants,
            enable_fp_fusion=False,
        )

    return decode


def _decoder(kind: str) -> Callable[..., None]:
    write, add_to = _row_decoder(kind, "each"), _row_decoder(kind, "added")

    def decode(packed: torch.Tensor, chunks: Chunks, out: torch.Tensor, add: bool, **settings: float) -> None:
        (add_to if add else write)(packed[None], chunks, out[None], **settings)

    return decode


_ENCODERS = {
    "integer": _Encoder("integer", largest="largest"),
    "qsgd": _Encoder("qsgd", largest="levels", always_random=True),
    "nuqsgd": _Encoder("nuqsgd", largest="levels", always_random=True),
    "terngrad": _Encoder("terngrad", always_random=True),
    "fp8": _Encoder("fp8", largest=LARGEST_FP8),
    "natural": _Encoder("natural", always_random=True),
    "sign": _Encoder("sign"),
    "scaled_sign": _Encoder("scaled_sign"),
    "onebit": _Encoder("onebit"),
    "bf16": _Encoder("bf16", always_random=True),
    "fp16": _Encoder("fp16", always_random=True),
}

ENCODERS: dict[str, Callable[..., None]] = {name: encoder.one for name, encoder in _ENCODERS.items()}

ROW_ENCODERS: dict[str, Callable[..., None]] = {name: encoder.rows for name, encoder in _ENCODERS.items()}

KEEPING_ENCODERS: dict[str, Callable[..., None]] = {
    name: _ENCODERS[name].keeping for name in ("integer", "qsgd", "terngrad")
}

_DECODED = ("levels", "nuqsgd", "fp8", "natural", "sign", "onebit")

DECODERS: dict[str, Callable[..., None]] = {name: _decoder(name) for name in _DECODED}

ROW_DECODERS: dict[str, Callable[..., None]] = {name: _row_decoder(name, "each") for name in _DECODED}

ROW_SUMS: dict[str, Callable[..., None]] = {name: _row_decoder(name, "sum") for name in _DECODED}
