"""Count sketches on a GPU: cells and signs are computed where they are needed.

Imported only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

from laconic.compression.kernels.triton_gpu.codes import mix

_TILE = 1024
"""Values of one program."""


@triton.jit
def _hashed(place, seed, columns):
    """The cell in its row, and the sign, of each place."""
    number = mix(place.to(tl.uint32) + seed.to(tl.uint32))
    cell = ((number >> 1).to(tl.int64) * columns) >> 31
    return cell, 1.0 - 2.0 * (number & 1).to(tl.float32)


@triton.jit
def _sketch(values, numel, seeds, columns, cells, ROWS: tl.constexpr, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = tl.load(values + place, mask=place < numel, other=0.0)
    for row in tl.static_range(ROWS):
        cell, sign = _hashed(place, tl.load(seeds + row), columns)
        tl.atomic_add(cells + cell, sign * value, mask=place < numel, sem="relaxed")
        cells += columns


@triton.jit
def _estimate(cells, seeds, columns, values, numel, ROWS: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row = tl.arange(0, WIDE)[None, :].to(tl.int64)
    inside = (place < numel)[:, None] & (row < ROWS)
    cell, sign = _hashed(place[:, None], tl.load(seeds + row, mask=row < ROWS, other=0), columns)
    found = sign * tl.load(cells + row * columns + cell, mask=inside, other=0.0)
    unknown = tl.max((found != found).to(tl.int32), axis=1)
    # Rows that do not exist come last; of an even number of rows, the lower of the two in the middle is taken.
    ordered = tl.sort(tl.where(row < ROWS, tl.where(found == found, found, 0.0), float("inf")))
    middle = tl.sum(tl.where(row == (ROWS - 1) // 2, ordered, 0.0), axis=1)
    tl.store(values + place, tl.where(unknown > 0, float("nan"), middle), mask=place < numel)


def sketch(values: torch.Tensor, seeds: torch.Tensor, cells: torch.Tensor) -> None:
    rows, values = len(seeds), values.contiguous()
    _sketch[(-(-len(values) // _TILE),)](
        values, len(values), seeds, len(cells) // rows, cells, ROWS=rows, TILE=_TILE, num_warps=4
    )


def estimate(cells: torch.Tensor, seeds: torch.Tensor, values: torch.Tensor) -> None:
    rows = len(seeds)
    wide = triton.next_power_of_2(rows)
    tile = max(32, _TILE // wide)
    _estimate[(-(-len(values) // tile),)](
        cells.contiguous(),
        seeds,
        len(cells) // rows,
        values,
        len(values),
        ROWS=rows,
        WIDE=wide,
        TILE=tile,
        num_warps=4,
    )
