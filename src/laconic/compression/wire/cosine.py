"""The cosine transform of the chunks of each tensor."""

from __future__ import annotations

import math

import torch

from laconic.compression.wire.entries import rows_of_chunks
from laconic.core.stateful import BucketState


def cosine_transform(flat: torch.Tensor, state: BucketState, chunk: int, *, inverse: bool = False) -> torch.Tensor:
    """Every chunk by itself, tensor by tensor: the last bits of a product may depend on its number of rows.

        c = D x,   D[i, j] = sqrt((1 or 2) / chunk) cos(pi (2 j + 1) i / (2 chunk)),   1 for i = 0, else 2

    The result is at least as precise as float32. The last chunk of a tensor may be shorter.
    """
    result = torch.empty(flat.numel(), dtype=torch.promote_types(flat.dtype, torch.float32), device=flat.device)
    for rows, place in rows_of_chunks(state.bucket, chunk):
        # A copy: the bits may also depend on the alignment of the input.
        chunks = flat[place].to(result.dtype, copy=True).view(rows)
        result[place] = (chunks @ _matrix(rows[1], state, chunks.dtype, inverse=inverse).T).view(-1)
    return result


def _matrix(size: int, state: BucketState, dtype: torch.dtype, *, inverse: bool) -> torch.Tensor:
    """The transform as a matrix, made once."""
    key = ("cosine", size, dtype, inverse)
    if key not in state.tables:
        # In float64, and rounded once, so that it is the same on every device.
        order = torch.arange(size, dtype=torch.float64)
        matrix = torch.cos(math.pi * torch.outer(order, 2 * order + 1) / (2 * size)) * math.sqrt(2 / size)
        matrix[0] /= math.sqrt(2)
        # A transposed copy: with a view the product takes three times as long on a CPU.
        matrix = matrix.T.contiguous() if inverse else matrix
        state.tables[key] = matrix.to(state.bucket.device, dtype)
    table: torch.Tensor = state.tables[key]
    return table
