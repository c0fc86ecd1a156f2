"""Integers in 64-bit words, by plain torch."""

from __future__ import annotations

import torch


def pack(numbers: torch.Tensor, words: torch.Tensor, bits: int) -> None:
    """Fill `words` with all numbers."""
    words.zero_()
    for lane, run in enumerate(numbers.split(len(words))):
        words += run.long() << (bits * lane)


def unpack(words: torch.Tensor, numbers: torch.Tensor, bits: int) -> None:
    """Fill `numbers` with the contents of all lanes."""
    mask = (1 << bits) - 1
    for lane, run in enumerate(numbers.split(len(words))):
        run.copy_((words >> (bits * lane)) & mask)
