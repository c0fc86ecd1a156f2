"""Entries that reach the largest magnitude of their bin, by plain torch."""

from __future__ import annotations

import torch

from laconic.compression.wire.cuts import Cuts


def take_reaching(flat: torch.Tensor, residual: torch.Tensor, bins: Cuts) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `flat` to `residual`, and take out what reaches the largest magnitude of its bin."""
    residual += flat
    which = bins.chunk_of_element()
    largest = residual.new_zeros(bins.num_chunks).scatter_reduce_(0, which, residual.abs(), "amax")[which]
    # Not ">=", so that NaN is among them.
    indices = (~((residual + flat).abs() < largest) & (largest != 0)).nonzero().view(-1)
    values = residual[indices]
    residual[indices] = 0
    return indices, values
