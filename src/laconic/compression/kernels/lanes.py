"""Integers packed into 64-bit words, as `wire.lanes` lays them out, and unpacked again."""

from __future__ import annotations

import torch

from laconic.compression.kernels.loader import load_kernels
from laconic.compression.wire.lanes import Lanes


def new_numbers(lanes: Lanes, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A number for every lane, to be filled and packed: the first `num_values` are uninitialized, the others zero."""
    numbers = torch.empty(lanes.per_word * lanes.num_words, dtype=dtype, device=device)
    numbers[lanes.num_values :].zero_()
    return numbers


def pack(lanes: Lanes, numbers: torch.Tensor, *, reference: bool = False) -> torch.Tensor:
    """The words of numbers from 0 to `lanes.largest`, in a tensor from `new_numbers`; they may share its memory."""
    assert len(numbers) == lanes.per_word * lanes.num_words, "not from new_numbers"
    if lanes.are_bytes:
        return numbers.to(torch.uint8).view(torch.int64)
    words = torch.empty(lanes.num_words, dtype=torch.int64, device=numbers.device)
    if lanes.num_words:
        load_kernels("lanes", numbers.device.type, reference=reference).pack(numbers, words, lanes.bits)
    return words


def unpack(lanes: Lanes, words: torch.Tensor, *, reference: bool = False) -> torch.Tensor:
    """The numbers in words, in the smallest dtype that holds them; for sums of words, the sums of the numbers.

    They may share memory with the words.
    """
    if lanes.are_bytes:
        return words.view(torch.uint8)[: lanes.num_values]
    dtype = torch.uint8 if lanes.bits < 8 else torch.int32 if lanes.bits < 32 else torch.int64
    # All lanes are written, also those that hold nothing: a kernel need not look where the numbers end.
    numbers = torch.empty(lanes.per_word * lanes.num_words, dtype=dtype, device=words.device)
    if lanes.num_words:
        load_kernels("lanes", words.device.type, reference=reference).unpack(words, numbers, lanes.bits)
    return numbers[: lanes.num_values]
