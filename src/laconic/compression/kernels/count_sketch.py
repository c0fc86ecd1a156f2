"""Count sketches: every value is added, with a sign, to one cell of each row, and the median over rows estimates it.

number = mix(place + seed of the row),   sign = 1 - 2 (number mod 2),   cell = floor((number >> 1) * columns / 2^31)
"""

from __future__ import annotations

import torch

from laconic.compression.kernels.loader import load_kernels


def sketched(values: torch.Tensor, seeds: torch.Tensor, columns: int, *, reference: bool = False) -> torch.Tensor:
    """The cells of float32 values, row after row; `seeds` has a whole number of 32 bits, as int64, for each row.

    On a GPU sums are formed in any order, unless torch.use_deterministic_algorithms() forbids it.
    """
    cells = torch.zeros(len(seeds) * columns, dtype=torch.float32, device=values.device)
    reference = reference or (values.is_cuda and torch.are_deterministic_algorithms_enabled())
    if values.numel():
        load_kernels("count_sketch", values.device.type, reference=reference).sketch(values, seeds, cells)
    return cells


def estimated(cells: torch.Tensor, seeds: torch.Tensor, numel: int, *, reference: bool = False) -> torch.Tensor:
    """An estimate of each of so many values; of an even number of rows, the lower median. NaN where a row has NaN."""
    values = torch.empty(numel, dtype=torch.float32, device=cells.device)
    if numel:
        load_kernels("count_sketch", cells.device.type, reference=reference).estimate(cells, seeds, values)
    return values
