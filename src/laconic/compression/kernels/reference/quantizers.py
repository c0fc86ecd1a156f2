"""Quantizers in plain torch, on any device; faster kernels must agree with them.

A method is two functions of rows, where a row is one chunk:

    encode(values, numbers, **settings) -> scales, codes       values float32, numbers() whole random numbers below 2^32
    decode(scales, codes, **settings) -> values                codes whole numbers of `chunks.bits` bits

The rest of this file cuts a bucket into rows and packs the codes. A row that holds a NaN or an infinity gets NaN as its
scale, so that all of it arrives as NaN. Sums are made in float64, so that their order hardly ever shows in a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from laconic.compression.wire.chunks import Chunks
from laconic.compression.wire.seeds import mix_tensor, uniform

SMALLEST_SCALE = 2.0**-117
"""A row with a smaller scale counts as zeros: 448 / scale must stay finite, and scale / 448 must not lose digits."""

LARGEST_FP8 = 448
"""The largest value of e4m3; the codes above it are NaN."""

Numbers = Callable[[], torch.Tensor]
Rows = tuple[torch.Tensor, torch.Tensor]


def _absmax(values: torch.Tensor) -> torch.Tensor:
    return _finite(values.abs().amax(1, keepdim=True))


def _finite(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale.isfinite(), scale, torch.nan)


def _scaled(values: torch.Tensor, scale: torch.Tensor, largest: int) -> torch.Tensor:
    """The values in units of scale / largest; zero where the scale is too small or NaN."""
    # Not largest / scale: torch makes that a reciprocal and a product, which rounds twice.
    inverse = torch.full_like(scale, largest) / scale
    return torch.where(scale >= SMALLEST_SCALE, values * inverse, 0.0)


def _unit(scale: torch.Tensor, largest: int) -> torch.Tensor:
    """The size of one level: scale / largest."""
    return torch.where(scale < SMALLEST_SCALE, 0.0, scale / torch.full_like(scale, largest))


def _up_or_down(magnitudes: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """An integer next to each magnitude, which equals the magnitude on average."""
    lower = magnitudes.floor()
    return lower + (uniform(numbers) < magnitudes - lower)


def _levels(scaled: torch.Tensor, largest: int, numbers: Numbers) -> torch.Tensor:
    """Codes 0 .. 2 * largest of numbers in [-largest, largest], rounded at random."""
    level = _up_or_down(scaled.abs(), numbers()).clamp(max=largest)
    return torch.where(scaled < 0, -level, level) + largest


def encode_integer(values: torch.Tensor, numbers: Numbers, *, largest: int, stochastic: bool) -> Rows:
    """With unit = max |g| / largest:   code = round(g / unit) + largest."""
    scale = _absmax(values)
    scaled = _scaled(values, scale, largest)
    codes = _levels(scaled, largest, numbers) if stochastic else scaled.round() + largest
    return _unit(scale, largest), codes


def decode_levels(scales: torch.Tensor, codes: torch.Tensor, *, largest: int) -> torch.Tensor:
    """Back:   value = (code - largest) * unit."""
    return (codes.to(torch.int16) - largest) * scales


def encode_qsgd(values: torch.Tensor, numbers: Numbers, *, levels: int) -> Rows:
    """With unit = L2(g) / levels:   code = sign(g) * up_or_down(|g| / unit) + levels."""
    norm = _finite(values.double().square().sum(1, keepdim=True).sqrt().float())
    return _unit(norm, levels), _levels(_scaled(values, norm, levels), levels, numbers)


def encode_nuqsgd(values: torch.Tensor, numbers: Numbers, *, levels: int) -> Rows:
    """With a = |g| / L2(g):   a rounded at random to a power of two next to it, 2^(1 - levels) .. 1, or, below, zero.

    code = levels + sign(g) * k, where k = 0 stands for zero and k > 0 for 2^(k - levels).
    """
    norm = _finite(values.double().square().sum(1, keepdim=True).sqrt().float())
    scaled, drawn = _scaled(values, norm, 1), numbers()
    magnitudes = scaled.abs().clamp(max=1.0)
    bits = magnitudes.view(torch.int32).long()
    below = ((bits >> 23) - 127 + levels).clamp(min=0)
    # A float32 that is d / 2^23 of the way from one power of two to the next goes up with this probability.
    rises = (drawn >> 8) < 2 * (bits & 0x7FFFFF)
    starts = uniform(drawn) < magnitudes * 2.0 ** (levels - 1)
    level = (below + torch.where(below > 0, rises, starts)).clamp(max=levels)
    return _unit(norm, 1), torch.where(scaled < 0, -level, level) + levels


def decode_nuqsgd(scales: torch.Tensor, codes: torch.Tensor, *, largest: int) -> torch.Tensor:
    """Back:   value = sign * scale * 2^(k - levels), zero for k = 0."""
    signed = codes.long() - largest
    power = torch.where(signed == 0, 0.0, _power_of_two(127 + signed.abs() - largest))
    return torch.where(signed < 0, -power, power) * scales


def encode_terngrad(values: torch.Tensor, numbers: Numbers, *, clip: float) -> Rows:
    """With unit = min(max |g|, clip * sqrt(mean g^2)):   code = sign(g) * up_or_down(min(|g|, unit) / unit) + 1."""
    sigma = values.double().square().mean(1, keepdim=True).sqrt()
    scale = torch.minimum(_absmax(values), (clip * sigma).float())
    return _unit(scale, 1), _levels(_scaled(values.clamp(-scale, scale), scale, 1), 1, numbers)


def encode_fp8(values: torch.Tensor, numbers: Numbers, *, stochastic: bool) -> Rows:
    """With unit = max |g| / 448:   code = e4m3(g / unit)."""
    scale = _absmax(values)
    scaled = _scaled(values, scale, LARGEST_FP8)
    if not stochastic:
        return _unit(scale, LARGEST_FP8), scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = _draw_float(scaled.abs(), numbers, digits=3, lowest=-6).clamp(max=0x7E)
    return _unit(scale, LARGEST_FP8), codes + 128 * scaled.signbit()


def _draw_float(magnitudes: torch.Tensor, numbers: Numbers, *, digits: int, lowest: int) -> torch.Tensor:
    """Codes in a format of `digits` binary digits and exponents from `lowest` on, rounded at random."""
    exponent = (magnitudes.view(torch.int32).long() >> 23).clamp(min=lowest + 127)
    # Between two powers of two, and below the lowest, such a format has even steps.
    steps = _up_or_down(magnitudes * _power_of_two(254 + digits - exponent), numbers()).long()
    return ((exponent - 127 - lowest) << digits) + steps


def decode_fp8(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Back:   value = e4m3 value of the code * unit."""
    return codes.view(torch.float8_e4m3fn).float() * scales


def encode_natural(values: torch.Tensor, numbers: Numbers) -> Rows:
    """With top = 2 * (largest power of two <= max |g|):   code = 1 + log2(top / the power of two chosen), 0 for zero.

    Codes reach down to top / 2^126; below that, |g| becomes this lowest power with probability |g| / lowest, else zero.
    """
    largest, magnitudes, drawn = _absmax(values), values.abs(), numbers()
    bits = magnitudes.view(torch.int32).long()
    # Exponents as float32 has them: 1 .. 254, so that no power is subnormal or infinite.
    top = ((largest.nan_to_num().view(torch.int32).long() >> 23) + 1).clamp(max=254)
    lowest = (top - 126).clamp(min=1)
    # A float32 that is d / 2^23 of the way from one power of two to the next goes up with this probability.
    exponent = torch.minimum((bits >> 23) + ((drawn >> 8) < 2 * (bits & 0x7FFFFF)), top)
    kept = uniform(drawn) < magnitudes * _power_of_two(254 - lowest)
    codes = torch.where((bits >> 23) >= lowest, 1 + top - exponent, (1 + top - lowest) * kept)
    codes = torch.where((largest > 0) & (codes > 0), codes + 128 * values.signbit(), 0)
    return torch.where(largest > 0, _power_of_two(top), largest), codes


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return (exponent << 23).to(torch.int32).view(torch.float32)


def decode_natural(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Back:   value = sign * top / 2^(code - 1)."""
    below = (codes & 127).long() - 1
    top = scales.nan_to_num().view(torch.int32).long() >> 23
    values = torch.where(below >= 0, _power_of_two((top - below).clamp(min=0)), 0.0)
    return torch.where(scales.isnan(), scales, torch.where(codes >= 128, -values, values))


def encode_sign(values: torch.Tensor, numbers: Numbers) -> Rows:
    """With scale = 1:   code = 1 where g >= 0."""
    return torch.where(_absmax(values).isnan(), torch.nan, 1.0), values >= 0


def encode_scaled_sign(values: torch.Tensor, numbers: Numbers) -> Rows:
    """With scale = mean |g|:   code = 1 where g >= 0."""
    return _finite(values.double().abs().mean(1, keepdim=True).float()), values >= 0


def decode_sign(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Back:   value = scale where the code is 1, -scale elsewhere."""
    return torch.where(codes == 1, scales, -scales)


def encode_onebit(values: torch.Tensor, numbers: Numbers) -> Rows:
    """With scales = mean of g where g >= 0 and where g < 0:   code = 1 where g >= 0."""
    positive = values >= 0
    wide = values.double()
    high = torch.where(positive, wide, 0.0).sum(1) / positive.sum(1).clamp(min=1)
    low = torch.where(positive, 0.0, wide).sum(1) / (~positive).sum(1).clamp(min=1)
    scales = torch.stack([high, low], 1).float()
    return torch.where(_absmax(values).isnan(), torch.nan, scales), positive


def decode_onebit(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Back:   value = the first scale where the code is 1, the second elsewhere."""
    return torch.where(codes == 1, scales[:, :1], scales[:, 1:])


def encode_bf16(values: torch.Tensor, numbers: Numbers) -> Rows:
    """The bf16 below or above each value in magnitude, at random; infinities and NaN stay as they are."""
    bits = values.view(torch.int32).long() & 0xFFFFFFFF
    rounded = torch.where(values.isfinite(), bits + (numbers() >> 16), bits)
    # A NaN whose upper half says infinity would become one.
    codes = torch.where(values.isnan(), 0x7FC0, rounded >> 16)
    return values.new_empty(len(values), 0), codes


def encode_fp16(values: torch.Tensor, numbers: Numbers) -> Rows:
    """The fp16 below or above each value in magnitude, at random; infinities and NaN stay as they are."""
    # 2^17 is as infinite as anything larger.
    codes = _draw_float(values.abs().nan_to_num().clamp(max=2.0**17), numbers, digits=10, lowest=-14).clamp(max=0x7C00)
    codes = torch.where(values.isnan(), 0x7E00, codes + 0x8000 * values.signbit())
    return values.new_empty(len(values), 0), codes


@dataclass(frozen=True)
class _Piece:
    """Neighbouring chunks of one length: rows of a matrix."""

    elements: slice
    chunks: slice
    codes: slice


def _pieces(chunks: Chunks) -> Iterator[_Piece]:
    """The whole blocks of each parameter, then what is left of it."""
    chunk = byte = 0
    for _, place in chunks.bucket.segments():
        whole = place.stop - (place.stop - place.start) % chunks.block
        for begin, end, width in ((place.start, whole, chunks.block), (whole, place.stop, place.stop - whole)):
            if begin < end:
                rows = (end - begin) // width
                size = rows * _code_bytes(width, chunks.bits)
                yield _Piece(slice(begin, end), slice(chunk, chunk + rows), slice(byte, byte + size))
                chunk, byte = chunk + rows, byte + size


def _code_bytes(width: int, bits: int) -> int:
    return -(-width * bits // 8)


def _scales_and_codes(packed: torch.Tensor, chunks: Chunks) -> tuple[torch.Tensor, torch.Tensor]:
    scales = packed[: chunks.scale_bytes].view(torch.float32).view(chunks.num_chunks, chunks.num_scales)
    return scales, packed[chunks.scale_bytes :]


def _pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of codes as rows of bytes, from the lowest bit up."""
    if bits == 16:
        return codes.to(torch.int16).view(torch.uint8)
    if bits == 8:
        return codes.to(torch.uint8)
    rows, width = codes.shape
    eights = torch.nn.functional.pad(codes.to(torch.uint8), (0, -width % 8)).view(rows, -1, 8)
    # Eight codes of up to 7 bits fit into one word.
    words = eights[..., 0].long()
    for place in range(1, 8):
        words |= eights[..., place].long() << (bits * place)
    data = torch.stack([(words >> (8 * place)) & 0xFF for place in range(bits)], -1)
    return data.to(torch.uint8).view(rows, -1)[:, : _code_bytes(width, bits)]


def _unpack_bits(data: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """The codes that `_pack_bits` packed, as uint8."""
    if bits == 8:
        return data
    rows = len(data)
    groups = torch.nn.functional.pad(data, (0, -data.shape[1] % bits)).view(rows, -1, bits)
    words = groups[..., 0].long()
    for place in range(1, bits):
        words |= groups[..., place].long() << (8 * place)
    codes = torch.stack([(words >> (bits * place)) & (2**bits - 1) for place in range(8)], -1)
    return codes.to(torch.uint8).view(rows, -1)[:, :width]


def _encoder(encode_rows: Callable[..., Rows]) -> Callable[..., None]:
    def encode(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int, **settings: float) -> None:
        scales, codes = _scales_and_codes(packed, chunks)
        for piece in _pieces(chunks):
            rows = piece.chunks.stop - piece.chunks.start
            values = flat[piece.elements].float().view(rows, -1)

            def numbers(piece: _Piece = piece, values: torch.Tensor = values) -> torch.Tensor:
                seeds = mix_tensor(chunks.seeds_tensor[piece.chunks] ^ moment_seed)
                return mix_tensor(torch.arange(values.shape[1], device=values.device) + seeds[:, None])

            found, levels = encode_rows(values, numbers, **settings)
            scales[piece.chunks] = found
            codes[piece.codes] = _pack_bits(levels, chunks.bits).reshape(-1)

    return encode


def _decoder(decode_rows: Callable[..., torch.Tensor]) -> Callable[..., None]:
    def decode(packed: torch.Tensor, chunks: Chunks, out: torch.Tensor, add: bool, **settings: float) -> None:
        scales, codes = _scales_and_codes(packed, chunks)
        for piece in _pieces(chunks):
            place = out[piece.elements]
            rows = piece.chunks.stop - piece.chunks.start
            levels = _unpack_bits(codes[piece.codes].view(rows, -1), chunks.bits, len(place) // rows)
            values = decode_rows(scales[piece.chunks], levels, **settings).view(-1).to(place.dtype)
            place.copy_(place + values if add else values)

    return decode


ENCODERS: dict[str, Callable[..., None]] = {
    "integer": _encoder(encode_integer),
    "qsgd": _encoder(encode_qsgd),
    "nuqsgd": _encoder(encode_nuqsgd),
    "terngrad": _encoder(encode_terngrad),
    "fp8": _encoder(encode_fp8),
    "natural": _encoder(encode_natural),
    "sign": _encoder(encode_sign),
    "scaled_sign": _encoder(encode_scaled_sign),
    "onebit": _encoder(encode_onebit),
    "bf16": _encoder(encode_bf16),
    "fp16": _encoder(encode_fp16),
}
"""kernel name -> encode(flat, chunks, packed, moment_seed, **settings), which fills `packed` except for its padding"""

DECODERS: dict[str, Callable[..., None]] = {
    "levels": _decoder(decode_levels),
    "nuqsgd": _decoder(decode_nuqsgd),
    "fp8": _decoder(decode_fp8),
    "natural": _decoder(decode_natural),
    "sign": _decoder(decode_sign),
    "onebit": _decoder(decode_onebit),
}
"""kernel name -> decode(packed, chunks, out, add, **settings), which fills `out` or adds to it"""
