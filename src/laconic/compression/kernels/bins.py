"""Entries that reach the largest magnitude of their bin, as `adacomp` selects them."""

from __future__ import annotations

import torch

from laconic.compression.kernels.loader import load_kernels
from laconic.compression.wire.cuts import Cuts


def take_reaching(
    flat: torch.Tensor, residual: torch.Tensor, bins: Cuts, *, reference: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `flat` to `residual`, and take out the entries that reach the largest magnitude of their bin.

    An entry reaches it if its magnitude would, were `flat` added once more. Returns ascending positions and the values
    there, which are zero in `residual` from now on. Of a bin of zeros nothing is taken, of one with a NaN everything,
    and a value that is not finite is always taken.
    """
    return load_kernels("bins", flat.device.type, reference=reference).take_reaching(flat, residual, bins)
