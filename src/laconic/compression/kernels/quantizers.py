"""Pack a bucket into codes and scales, and unpack it again.

A family of quantizers has two tables, and more on devices where a kernel launch takes long:

    ENCODERS[name](flat, chunks, packed, moment_seed, **settings)     fills `packed` except for its padding
    DECODERS[name](packed, chunks, out, add, **settings)              fills `out`, or adds to it
    ROW_ENCODERS[name](rows, chunks, packed, moment_seed, **settings) the same for rows, of chunks[i] each
    ROW_DECODERS[name](rows, chunks, outs, **settings)                fills each row of `outs`
    ROW_SUMS[name](rows, chunks, out, **settings)                     fills `out` with the sum of all rows
    KEEPING_ENCODERS[name](rows, residuals, chunks, packed, moment_seed, **settings)
                                                                      encodes sums, whose losses replace the residuals

All but the first two tables may lack a name. `can_encode(name, chunks)` says whether ROW_ENCODERS and KEEPING_ENCODERS
can encode these chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from laconic.compression.kernels.loader import load_kernels
from laconic.compression.wire.chunks import Chunks


def encode(
    name: str,
    flat: torch.Tensor,
    chunks: Chunks,
    moment_seed: int,
    *,
    reference: bool = False,
    **settings: float,
) -> torch.Tensor:
    """The packed bytes of `flat`; reference: by plain torch, even where there is something faster."""
    assert flat.numel() == chunks.bucket.numel, f"{flat.numel()} values for a bucket of {chunks.bucket.numel}"
    packed = _packed((), chunks, flat.device)
    if len(packed):
        kernels = load_kernels("quantizers", flat.device.type, reference=reference)
        kernels.ENCODERS[name](flat, chunks, packed, moment_seed, **settings)
    return packed


def encode_rows(
    name: str,
    rows: torch.Tensor,
    chunks: Sequence[Chunks],
    moment_seed: int,
    *,
    reference: bool = False,
    **settings: float,
) -> torch.Tensor:
    """The packed bytes of each row; all rows have chunks of the same lengths, but different random numbers."""
    packed = _packed((len(rows),), chunks[0], rows.device)
    if not packed.numel():
        return packed
    kernels = load_kernels("quantizers", rows.device.type, reference=reference)
    together = getattr(kernels, "ROW_ENCODERS", {}).get(name)
    if together is not None and kernels.can_encode(name, chunks[0]) and rows.stride(1) == 1:
        together(rows, chunks, packed, moment_seed, **settings)
        return packed
    for row, of_row, filled in zip(rows, chunks, packed, strict=True):
        kernels.ENCODERS[name](row, of_row, filled, moment_seed, **settings)
    return packed


def encode_keeping(
    name: str,
    rows: torch.Tensor,
    residuals: Sequence[torch.Tensor],
    chunks: Sequence[Chunks],
    moment_seed: int,
    **settings: float,
) -> torch.Tensor | None:
    """The packed bytes of each row + residual; the residual becomes the error; None: no kernel does both at once."""
    kernels = load_kernels("quantizers", rows.device.type)
    at_once = getattr(kernels, "KEEPING_ENCODERS", {}).get(name)
    if at_once is None or not kernels.can_encode(name, chunks[0]):
        return None
    if rows.stride(1) != 1 or torch.float64 in (rows.dtype, residuals[0].dtype):
        return None
    if any(residual.data_ptr() % 16 or not residual.is_contiguous() for residual in residuals):
        return None
    packed = _packed((len(rows),), chunks[0], rows.device)
    if packed.numel():
        at_once(rows, residuals, chunks, packed, moment_seed, **settings)
    return packed


def _packed(count: tuple[int, ...], chunks: Chunks, device: torch.device) -> torch.Tensor:
    """Memory for the packed bytes, with zeros as padding."""
    packed = torch.empty((*count, chunks.packed_bytes), dtype=torch.uint8, device=device)
    used = chunks.scale_bytes + chunks.code_bytes
    if used < chunks.packed_bytes:
        packed[..., used:] = 0
    return packed


def decode(
    name: str,
    packed: torch.Tensor,
    chunks: Chunks,
    out: torch.Tensor,
    *,
    add: bool = False,
    reference: bool = False,
    **settings: float,
) -> None:
    """Decode `packed` into `out`, or add it: the same bits as decoding, then adding, without memory for a copy."""
    assert len(packed) == chunks.packed_bytes, f"{len(packed)} bytes where {chunks.packed_bytes} are due"
    if len(packed):
        kernels = load_kernels("quantizers", out.device.type, reference=reference)
        kernels.DECODERS[name](packed, chunks, out, add, **settings)


def decode_rows(
    name: str,
    rows: torch.Tensor,
    chunks: Chunks,
    outs: torch.Tensor,
    *,
    reference: bool = False,
    **settings: float,
) -> None:
    """Decode each of `rows` into the same row of `outs`."""
    _check_rows(rows, chunks)
    if not rows.numel():
        return
    kernels = load_kernels("quantizers", outs.device.type, reference=reference)
    together = getattr(kernels, "ROW_DECODERS", {}).get(name)
    if together is not None:
        together(rows, chunks, outs, **settings)
        return
    for packed, out in zip(rows, outs, strict=True):
        kernels.DECODERS[name](packed, chunks, out, False, **settings)


def sum_rows(
    name: str,
    rows: torch.Tensor,
    chunks: Chunks,
    out: torch.Tensor,
    *,
    reference: bool = False,
    **settings: float,
) -> None:
    """Fill `out` with the sum of all of `rows`, of which there is at least one, added up in their order."""
    _check_rows(rows, chunks)
    if not rows.numel():
        return
    kernels = load_kernels("quantizers", out.device.type, reference=reference)
    together = getattr(kernels, "ROW_SUMS", {}).get(name)
    if together is not None:
        together(rows, chunks, out, **settings)
        return
    for number, packed in enumerate(rows):
        kernels.DECODERS[name](packed, chunks, out, number > 0, **settings)


def _check_rows(rows: torch.Tensor, chunks: Chunks) -> None:
    assert rows.shape[1] == chunks.packed_bytes, f"{rows.shape[1]} bytes where {chunks.packed_bytes} are due"
    assert rows.stride(1) == 1, "the bytes of a payload lie one after the other"
