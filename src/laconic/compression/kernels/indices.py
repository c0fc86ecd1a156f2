"""Bitmaps and Elias-Fano codes of indices; every kernel gives the same bytes."""

from __future__ import annotations

import torch

from laconic.compression.kernels.loader import load_kernels


def encode_bitmap(indices: torch.Tensor, packed: torch.Tensor) -> None:
    """Set bit i of `packed`, which is zero, for every index i."""
    load_kernels("indices", packed.device.type).encode_bitmap(indices, packed)


def decode_bitmap(packed: torch.Tensor, k: int) -> torch.Tensor:
    """The positions of the k bits that are set."""
    return load_kernels("indices", packed.device.type).decode_bitmap(packed, k)


def encode_packed(indices: torch.Tensor, packed: torch.Tensor, bits: int) -> None:
    """Fill `packed`, which is zero, with `bits` low bits of each index and the rest in unary."""
    load_kernels("indices", packed.device.type).encode_packed(indices, packed, bits)


def decode_packed(packed: torch.Tensor, k: int, bits: int) -> torch.Tensor:
    """Decode the k indices."""
    return load_kernels("indices", packed.device.type).decode_packed(packed, k, bits)
