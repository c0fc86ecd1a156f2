"""Bitmaps and Elias-Fano codes in plain torch, on any device: the bytes of wire/indices.py."""

from __future__ import annotations

import torch

from laconic.compression.wire.bits import bits_of, write_bits


def encode_bitmap(indices: torch.Tensor, packed: torch.Tensor) -> None:
    """Set bit i of `packed`, which is zero, for every index i."""
    row = torch.zeros(packed.numel() * 8, dtype=torch.uint8, device=packed.device)
    row[indices] = 1
    write_bits(row, packed)


def decode_bitmap(packed: torch.Tensor, k: int) -> torch.Tensor:
    """The positions of the k bits that are set."""
    # The size is known, so there is no synchronization with a GPU.
    return bits_of(packed).nonzero_static(size=k).view(-1)


def encode_packed(indices: torch.Tensor, packed: torch.Tensor, bits: int) -> None:
    """Fill `packed`, which is zero, with `bits` low bits of each index and the rest in unary."""
    k = indices.numel()
    low_bytes = -(-k * bits // 8)
    low = (indices.unsqueeze(1) >> torch.arange(bits, device=packed.device)) & 1
    write_bits(low.view(-1), packed[:low_bytes])
    encode_bitmap((indices >> bits) + torch.arange(k, device=indices.device), packed[low_bytes:])


def decode_packed(packed: torch.Tensor, k: int, bits: int) -> torch.Tensor:
    """Decode the k indices."""
    low_bytes = -(-k * bits // 8)
    each = torch.arange(bits, device=packed.device)
    low = (bits_of(packed[:low_bytes])[: k * bits].view(k, bits).to(torch.int64) << each).sum(1)
    high = decode_bitmap(packed[low_bytes:], k) - torch.arange(k, device=packed.device)
    return (high << bits) | low
