"""A randomized Hadamard transform across rows, so that a lost row removes a little of many values, none entirely.

    forward(X) = H D X,   backward(Y) = D H Y,   H[i, j] = (-1)^(number of ones in i & j) / sqrt(B),   D random signs

Rows are transformed in blocks of B <= 64, the last ones shorter; value v of every row is mixed with value v of
the other rows in its block. Losing one row of a block removes 1/B of what its values hold together, whichever row it
is. Only sums and differences are used, so equal rows give equal bits on every rank.

Reference: Ailon & Chazelle 2009 (fast Johnson-Lindenstrauss transform); Warraich et al. 2025 (OptiReduce), NSDI.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK = 64
"""Rows that are mixed with each other, at most: 6 passes over the values each way."""
_HALF_PRECISION = (torch.float16, torch.bfloat16)


def spread(table: torch.Tensor, seed: int) -> torch.Tensor:
    """Every row mixed with the others of its block, in the dtype of `table`."""
    return _transformed(_wide(table) * _signs(table, seed)).to(table.dtype)


def gathered(table: torch.Tensor, seed: int) -> torch.Tensor:
    """The inverse of `spread`."""
    return (_transformed(_wide(table)) * _signs(table, seed)).to(table.dtype)


def _wide(table: torch.Tensor) -> torch.Tensor:
    return table.float() if table.dtype in _HALF_PRECISION else table


def _signs(table: torch.Tensor, seed: int) -> torch.Tensor:
    """One random sign for each row, so that what rows have in common is not concentrated in one of them."""
    drawn = torch.randint(0, 2, (len(table), 1), generator=torch.Generator().manual_seed(seed))
    return (2 * drawn - 1).to(table.device, _wide(table[:0]).dtype)


def _blocks(num_rows: int) -> Iterator[tuple[int, int, int]]:
    """The first row and the end of each range of equal blocks, and the length of its blocks."""
    begin, length = 0, BLOCK
    while begin < num_rows:
        end = begin + (num_rows - begin) // length * length
        if end > begin:
            yield begin, end, length
        begin, length = end, length // 2


def _transformed(table: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(table)
    for begin, end, length in _blocks(len(table)):
        rows, half = table[begin:end], 1
        while half < length:
            pairs = rows.reshape(-1, 2, half, table.shape[1])
            rows = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1)
            half *= 2
        out[begin:end] = rows.reshape(end - begin, -1) * length**-0.5
    return out
