"""The k largest magnitudes of every row, many short rows at a time: each program reads some rows once.

Imported only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

from laconic.compression.kernels.reference import topk as reference

_TILE = 4096
"""Values that one program reads."""
_MOST_TAKEN = 64
"""The largest k: values are taken one after the other, and for a larger k sorting is faster."""
_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32}


@triton.jit
def _largest(
    bits,
    found,
    num_rows,
    LENGTH: tl.constexpr,
    K: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (rows[:, None] < num_rows) & (columns[None, :] < LENGTH)
    values = tl.load(bits + rows[:, None] * LENGTH + columns[None, :], mask=inside, other=0)
    # Larger magnitudes first, of equals the first: no two keys of a row are the same.
    keys = (values.to(tl.int64) & LARGEST) * COLUMNS + (COLUMNS - 1 - columns[None, :])
    keys = tl.where(inside, keys, -1)
    taken = tl.zeros([ROWS, COLUMNS], tl.int32)
    for _ in range(K):
        best = tl.max(keys, axis=1)
        is_best = keys == best[:, None]
        taken = tl.where(is_best, 1, taken)
        keys = tl.where(is_best, -1, keys)
    places = tl.cumsum(taken, axis=1) - 1
    tl.store(found + rows[:, None] * K + places, columns[None, :].to(tl.int64), mask=inside & (taken == 1))


def topk_of_rows(values: torch.Tensor, k: int) -> torch.Tensor:
    """For every row of `values`, the ascending indices of its k largest magnitudes; of equal ones, the first."""
    count, length = values.shape
    if values.dtype.itemsize not in _WHOLE_NUMBERS or length > _TILE or not 0 < k <= _MOST_TAKEN or not count:
        return reference.topk_of_rows(values, k)
    bits = values.contiguous().view(_WHOLE_NUMBERS[values.dtype.itemsize])
    found = torch.empty(count, k, dtype=torch.int64, device=values.device)
    columns = triton.next_power_of_2(length)
    rows = max(1, _TILE // columns)
    largest = 2 ** (8 * values.dtype.itemsize - 1) - 1
    grid = (triton.cdiv(count, rows),)
    _largest[grid](bits, found, count, LENGTH=length, K=k, LARGEST=largest, ROWS=rows, COLUMNS=columns, num_warps=8)
    return found
