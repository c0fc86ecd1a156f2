"""The k largest magnitudes on a GPU, in one read of the values and without the host waiting for anything.

    sample    a few values give two bounds: very likely the k-th largest magnitude lies between them
    collect   one pass writes where those are that reach the lower bound, and counts how many reach each
    finish    finds the k-th largest exactly, among those collected, and writes the places in ascending order

Where the sample misleads (many equal values), `finish` looks at all values instead: slower, and as exact. Magnitudes
are compared as whole numbers, their keys: the bits of a value without its sign. For an estimate, `fit` takes the place
of `sample`. Imported only where Triton is installed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from laconic.compression.kernels import sidco_reference, topk_reference
from laconic.compression.kernels.bounds_triton import fit, sample
from laconic.compression.kernels.meeting_triton import WARPS, num_programs
from laconic.compression.kernels.select_triton import FIRST_FREE, collect, finish

_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32}
_MOST = 1 << 30
"""Values; places are 32 bits wide."""
_SMALL = 1 << 16
"""Values; of fewer all are looked at."""
_SHARE = 4
"""Where more than one of so many is wanted, what would be collected takes as much memory as the values."""
_TILE = 8192
"""Values of one program that collects; fewer than 2^15, so that two counts fit into one number."""
_SMALL_TILE = 512
_SAMPLE = 8192
_DIGITS = 16
"""Bits of a bound that are looked for in the sample: it need not be near."""
_MOST_PROGRAMS = 1024

topk_of_rows = topk_reference.topk_of_rows


def topk_indices(values: torch.Tensor, k: int) -> torch.Tensor:
    """Where the k largest magnitudes of `values` (one dimension) are, in ascending order; of equals the first."""
    n = values.numel()
    if k in (0, n):
        return torch.arange(k, device=values.device)
    if values.dtype.itemsize not in _WHOLE_NUMBERS or n > _MOST or (n > _SMALL and k > n // _SHARE):
        return topk_reference.topk_indices(values, k)
    bits = values.contiguous().view(_WHOLE_NUMBERS[values.dtype.itemsize])
    selection = _selection(n, k, False, num_programs(values.device))
    work = selection.table(values.device)
    width = 8 * values.dtype.itemsize - 1
    if selection.sampled:
        constants = {"LARGEST": 2**width - 1, "WIDTH": width, "REST": max(0, width - _DIGITS), "SIZE": _SAMPLE}
        sample[(1,)](bits, work, n, selection.rank_low, selection.rank_high, **constants, num_warps=8)
    return _collected(bits, k, 0, work, selection, width, estimate=False)


def about_largest(values: torch.Tensor, k: int, seed: int) -> torch.Tensor:
    """See `sidco_reference.about_largest`."""
    n = values.numel()
    if values.dtype.itemsize > 4 or n > _MOST:
        return sidco_reference.about_largest(values, k, seed)
    if not sidco_reference.is_estimated(n, k):
        return topk_indices(values, k)
    values = values.to(torch.float32).contiguous()
    selection = _selection(n, k, True, num_programs(values.device))
    work = selection.table(values.device)
    fit[(1,)](values, work, n, k, SIZE=sidco_reference.SAMPLE, num_warps=16)
    return _collected(values.view(torch.int32), k, seed, work, selection, 31, estimate=True)


@dataclass(frozen=True)
class _Selection:
    """How k of n values are looked for: all that follows from these numbers alone."""

    n: int
    sampled: bool
    rank_low: int
    rank_high: int
    capacity: int
    """Values there is room for between the two passes."""
    tile: int
    rows: int
    programs: int
    """That finish together; all of them must fit on the device at once, since they wait for each other."""

    @property
    def num_tiles(self) -> int:
        return -(-self.n // self.tile)

    @property
    def tiles_each(self) -> int:
        """Tiles of one program that finishes."""
        return -(-self.num_tiles // (self.programs * self.rows)) * self.rows

    @property
    def tiles_at(self) -> int:
        """Where what is known of tiles begins in the table."""
        return FIRST_FREE + 2 * self.programs

    def table(self, device: torch.device) -> torch.Tensor:
        """Where programs leave what others need; only what `sample` would clear must be zero."""
        size = self.tiles_at + 3 * self.num_tiles + 2 * self.capacity
        if self.sampled:
            return torch.empty(size, dtype=torch.int32, device=device)
        return torch.zeros(size, dtype=torch.int32, device=device)


@lru_cache(maxsize=4096)
def _selection(n: int, k: int, estimate: bool, programs: int) -> _Selection:
    programs = min(programs, _MOST_PROGRAMS)
    if n <= _SMALL and not estimate:
        rows = 4
        programs = min(programs, -(-n // (_SMALL_TILE * rows)))
        return _Selection(n, False, 0, 0, 0, _SMALL_TILE, rows, programs)
    if estimate:
        # Few fits are so bad that more than this pass; `finish` looks at all values then.
        return _Selection(n, True, 0, 0, min(16 * k, n // 3), _TILE, 16, programs)
    expected = k * _SAMPLE / n
    rank_low = min(_SAMPLE, int(expected + 4 * math.sqrt(expected) + 8))
    rank_high = max(0, int(expected - 4 * math.sqrt(expected) - 8))
    capacity = int((rank_low + 4 * math.sqrt(rank_low) + 8) * n / _SAMPLE)
    return _Selection(n, True, rank_low, rank_high, capacity, _TILE, 16, programs)


def _collected(
    bits: torch.Tensor, k: int, seed: int, work: torch.Tensor, selection: _Selection, width: int, *, estimate: bool
) -> torch.Tensor:
    n, num_tiles, capacity = selection.n, selection.num_tiles, selection.capacity
    constants = {"LARGEST": 2**width - 1, "TILE": selection.tile}
    if selection.sampled:
        collect[(num_tiles,)](bits, work, n, num_tiles, capacity, selection.tiles_at, **constants, num_warps=8)
    out = torch.empty(k, dtype=torch.int64, device=bits.device)
    finish[(selection.programs,)](
        bits,
        work,
        out,
        n,
        k,
        seed,
        num_tiles,
        capacity,
        selection.tiles_each,
        **constants,
        SAMPLED=selection.sampled,
        ESTIMATE=estimate,
        ROWS=selection.rows,
        WIDTH=128 if selection.sampled else selection.tile,
        BLOCK=512,
        MOST_PROGRAMS=_MOST_PROGRAMS,
        num_warps=WARPS,
        launch_cooperative_grid=True,
    )
    return out
