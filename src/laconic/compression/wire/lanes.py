"""Integers packed into 64-bit words, so that one sum of words adds up all of them.

    word w = sum over lanes j of  number[j W + w] * 2^(bits j),   W words,   bits = those of world_size * largest

A lane is wide enough for the sum over all ranks, so nothing is carried into the next one, and the sum of words holds
the sum of every number, in whatever order ranks are added. Words wrap around, so all 64 bits can be used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Lanes:
    """The layout of numbers from 0 to `largest` of each of `world_size` ranks in words."""

    num_values: int
    largest: int
    world_size: int

    @property
    def bits(self) -> int:
        """Bits of one lane."""
        return (self.world_size * self.largest).bit_length()

    @property
    def per_word(self) -> int:
        """Numbers in one word."""
        return 64 // self.bits

    @property
    def num_words(self) -> int:
        """Words for all numbers."""
        return -(-self.num_values // self.per_word)

    @property
    def nbytes(self) -> int:
        """Bytes of all words."""
        return 8 * self.num_words

    def pack(self, numbers: torch.Tensor) -> torch.Tensor:
        """The words of int64 numbers from 0 to `largest`."""
        words = numbers.new_zeros(self.num_words)
        for lane, run in enumerate(numbers.split(self.num_words) if self.num_words else ()):
            words[: run.numel()] += run << (self.bits * lane)
        return words

    def unpack(self, words: torch.Tensor) -> torch.Tensor:
        """The numbers in words; for sums of words, the sums of the numbers."""
        mask = (1 << self.bits) - 1
        lanes = [(words >> (self.bits * lane)) & mask for lane in range(self.per_word)]
        return torch.cat(lanes)[: self.num_values] if self.num_words else words
