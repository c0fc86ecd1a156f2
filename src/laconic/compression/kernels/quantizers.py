"""Pack a bucket into codes and scales, and unpack it again.

A family of quantizers has two tables, and a third on devices where a launch takes long:

    ENCODERS[name](flat, chunks, packed, moment_seed, **settings)     fills `packed` except for its padding
    DECODERS[name](packed, chunks, out, add, **settings)              fills `out`, or adds to it
    ROW_DECODERS[name](rows, chunks, out, add, **settings)            fills each row of `out`, or adds all rows to it
"""

from __future__ import annotations

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
    packed = torch.empty(chunks.packed_bytes, dtype=torch.uint8, device=flat.device)
    used = chunks.scale_bytes + int(chunks.code_starts[-1])
    if used < len(packed):
        packed[used:] = 0
    if len(packed):
        kernels = load_kernels("quantizers", flat.device.type, reference=reference)
        kernels.ENCODERS[name](flat, chunks, packed, moment_seed, **settings)
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
    """Write what `packed` stands for into `out`, or add it: the same bits, without room for a second copy."""
    assert len(packed) == chunks.packed_bytes, f"{len(packed)} bytes where {chunks.packed_bytes} are due"
    if len(packed):
        kernels = load_kernels("quantizers", out.device.type, reference=reference)
        kernels.DECODERS[name](packed, chunks, out, add, **settings)


def decode_rows(
    name: str,
    rows: torch.Tensor,
    chunks: Chunks,
    out: torch.Tensor,
    *,
    add: bool = False,
    reference: bool = False,
    **settings: float,
) -> None:
    """Write what each of `rows` stands for into the same row of `out`, or add all of them, in their order, to `out`."""
    assert rows.shape[1] == chunks.packed_bytes, f"{rows.shape[1]} bytes where {chunks.packed_bytes} are due"
    assert rows.stride(1) == 1, "the bytes of a payload lie one after the other"
    if not rows.numel():
        return
    kernels = load_kernels("quantizers", out.device.type, reference=reference)
    together = getattr(kernels, "ROW_DECODERS", {}).get(name)
    if together is not None:
        together(rows, chunks, out, add, **settings)
        return
    for number, packed in enumerate(rows):
        kernels.DECODERS[name](packed, chunks, out if add else out[number], add, **settings)
