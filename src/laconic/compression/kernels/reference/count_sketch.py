"""Count sketches by plain torch."""

from __future__ import annotations

import torch

from laconic.compression.wire.seeds import mix_tensor


def table(seeds: torch.Tensor, numel: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row and value, its cell among those of all rows, and its sign."""
    rows = torch.arange(len(seeds), device=seeds.device)
    numbers = mix_tensor(torch.arange(numel, device=seeds.device) + seeds[:, None])
    return ((numbers >> 1) * columns >> 31) + rows[:, None] * columns, (1 - 2 * (numbers & 1)).float()


def sketch(values: torch.Tensor, seeds: torch.Tensor, cells: torch.Tensor) -> None:
    """Add all values to `cells`, which are zero."""
    places, signs = table(seeds, len(values), len(cells) // len(seeds))
    cells.index_add_(0, places.view(-1), (signs * values).view(-1))


def estimate(cells: torch.Tensor, seeds: torch.Tensor, values: torch.Tensor) -> None:
    """Fill `values` with estimates."""
    places, signs = table(seeds, len(values), len(cells) // len(seeds))
    values.copy_((signs * cells[places]).median(0).values)
