"""A bucket as numba kernels see it: numpy views of neighbouring chunks. Imported only where numba is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.compression.wire.chunks import Chunks

_PIECE = 2**18
"""Elements widened to float32 or copied at a time: no second copy of a whole bucket, and a piece stays in the cache."""

_NO_SEEDS = np.empty(0, np.int64)


@dataclass(frozen=True)
class Block:
    """Neighbouring chunks, with views of what belongs to them; a kernel counts elements from the block's first one."""

    elements: slice
    starts: NDArray[np.int64]
    code_starts: NDArray[np.int64]
    seeds: NDArray[np.int64]
    scales: NDArray[np.float32]


def blocks_of(
    chunks: Chunks, packed: torch.Tensor, dtype: torch.dtype, *, random: bool = False, copied: bool = False
) -> Iterator[Block]:
    """All chunks at once, or as many as hold about `_PIECE` elements where values are widened or copied."""
    scales = packed[: chunks.scale_bytes].view(torch.float32).numpy()
    step = chunks.num_chunks if dtype == torch.float32 and not copied else max(1, _PIECE // chunks.block)
    for first in range(0, chunks.num_chunks, step or 1):
        last = min(first + step, chunks.num_chunks)
        yield Block(
            slice(int(chunks.starts[first]), int(chunks.starts[last])),
            chunks.starts[first : last + 1],
            chunks.code_starts[first : last + 1],
            chunks.seeds[first:last] if random else _NO_SEEDS,
            scales[first * chunks.num_scales : last * chunks.num_scales],
        )


def codes_of(packed: torch.Tensor, chunks: Chunks) -> NDArray[np.uint8]:
    """All codes of a packed bucket."""
    return packed[chunks.scale_bytes :].numpy()


def values_of(flat: torch.Tensor, block: Block) -> NDArray[np.float32]:
    """The values of a block, widened or narrowed to float32."""
    return flat[block.elements].detach().float().contiguous().numpy()


def scratch_for(chunks: Chunks) -> NDArray[np.uint8]:
    """Room for the codes of one chunk, a byte each."""
    return np.empty(-(-chunks.block // 8) * 8, np.uint8)


def write(
    packed: torch.Tensor,
    chunks: Chunks,
    out: torch.Tensor,
    add: bool,
    decode: Callable[[Block, NDArray[np.float32]], None],
) -> None:
    """Let `decode` write each block in float32: straight into `out` where that is float32 and nothing is added."""
    for block in blocks_of(chunks, packed, out.dtype, copied=add):
        place = out[block.elements]
        directly = not add and place.dtype == torch.float32 and place.is_contiguous()
        found = place if directly else torch.empty(len(place), dtype=torch.float32, device="cpu")
        decode(block, found.numpy())
        if add:
            place += found.to(place.dtype)
        elif not directly:
            place.copy_(found)
