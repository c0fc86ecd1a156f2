"""Zeros and ones as the bits of bytes, from the lowest bit of the first byte on."""

from __future__ import annotations

import torch


def write_bits(bits: torch.Tensor, packed: torch.Tensor) -> None:
    """Pack zeros and ones into the bits of `packed`; remaining bits become zero."""
    row = torch.zeros(packed.numel() * 8, dtype=torch.uint8, device=packed.device)
    row[: bits.numel()] = bits
    packed.copy_((row.view(-1, 8) << _each_bit(packed)).sum(1, dtype=torch.uint8))


def bits_of(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes into zeros and ones, eight for each byte."""
    return ((packed.unsqueeze(1) >> _each_bit(packed)) & 1).view(-1)


def write_numbers(numbers: torch.Tensor, width: int, packed: torch.Tensor) -> None:
    """Pack numbers that are not negative into `width` bits each; remaining bits become zero."""
    each = torch.arange(width, dtype=numbers.dtype, device=numbers.device)
    write_bits((numbers.unsqueeze(1) >> each & 1).view(-1), packed)


def numbers_of(packed: torch.Tensor, width: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Unpack `count` numbers of `width` bits from each row of `packed`; `dtype` must hold them."""
    rows = packed.shape[:-1]
    bits = bits_of(packed.reshape(-1)).view(*rows, 8 * packed.shape[-1])
    bits = bits[..., : count * width].reshape(*rows, count, width)
    each = torch.arange(width, dtype=dtype, device=packed.device)
    return (bits.to(dtype) << each).sum(-1, dtype=torch.int64)


def _each_bit(packed: torch.Tensor) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=packed.device)
