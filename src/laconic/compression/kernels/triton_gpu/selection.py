"""How k of n values are selected on a GPU, and the two passes that do it.

    sample    a few values give two bounds: very likely the k-th largest magnitude lies between them (`thresholds`)
    collect   one pass writes the places of the values that reach the lower bound, and counts them
    finish    finds the k-th largest exactly, among the collected ones, and writes the places in ascending order

Where the sample misleads (many equal values), `finish` looks at all values instead: slower, and as exact. Magnitudes
are compared as whole numbers, their keys: the bits of a value without its sign. For an estimate, `fit` takes the place
of `sample`. Imported only where Triton is installed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from laconic.compression.kernels.triton_gpu.grid_barrier import WARPS
from laconic.compression.kernels.triton_gpu.selection_kernels import FIRST_FREE, collect, finish

MOST = 1 << 30
"""The most values that can be searched; places are 32 bits wide."""
SMALL = 1 << 16
"""Values; up to this number, all are looked at instead of a sample."""
SAMPLE = 8192
"""Values the bounds of an exact search are taken from."""
_TILE = 8192
"""Values of one program that collects; fewer than 2^15, so that two counts fit into one number."""
_SMALL_TILE = 512
_MOST_PROGRAMS = 1024


@dataclass(frozen=True)
class Selection:
    """The plan for selecting k of n values: all that follows from these numbers alone."""

    n: int
    sampled: bool
    rank_low: int
    rank_high: int
    capacity: int
    """Values there is room for between the two passes."""
    tile: int
    rows: int
    programs: int
    """Programs of `finish`; all of them must fit on the device at once, since they wait for each other."""

    @property
    def num_tiles(self) -> int:
        """Tiles that hold all values."""
        return -(-self.n // self.tile)

    @property
    def tiles_each(self) -> int:
        """Tiles of one program of `finish`."""
        return -(-self.num_tiles // (self.programs * self.rows)) * self.rows

    @property
    def tiles_at(self) -> int:
        """Where the entries of tiles begin in the table."""
        return FIRST_FREE + 2 * self.programs

    def table(self, device: torch.device) -> torch.Tensor:
        """The table through which programs share results; only the part that `sample` would clear must be zero."""
        size = self.tiles_at + 3 * self.num_tiles + 2 * self.capacity
        if self.sampled:
            return torch.empty(size, dtype=torch.int32, device=device)
        return torch.zeros(size, dtype=torch.int32, device=device)


@lru_cache(maxsize=4096)
def plan_selection(n: int, k: int, estimate: bool, programs: int) -> Selection:
    """The plan for selecting k of n values by at most `programs` programs that wait for each other."""
    programs = min(programs, _MOST_PROGRAMS)
    if n <= SMALL and not estimate:
        rows = 4
        programs = min(programs, -(-n // (_SMALL_TILE * rows)))
        return Selection(n, False, 0, 0, 0, _SMALL_TILE, rows, programs)
    if estimate:
        # Few fits are so bad that more than this pass; `finish` looks at all values then.
        return Selection(n, True, 0, 0, min(16 * k, n // 3), _TILE, 16, programs)
    expected = k * SAMPLE / n
    rank_low = min(SAMPLE, int(expected + 4 * math.sqrt(expected) + 8))
    rank_high = max(0, int(expected - 4 * math.sqrt(expected) - 8))
    capacity = int((rank_low + 4 * math.sqrt(rank_low) + 8) * n / SAMPLE)
    return Selection(n, True, rank_low, rank_high, capacity, _TILE, 16, programs)


def select(
    bits: torch.Tensor, k: int, seed: int, work: torch.Tensor, selection: Selection, width: int, *, estimate: bool
) -> torch.Tensor:
    """The places of the selected values, in ascending order; `work` holds the bounds from a sample, if there is one."""
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
