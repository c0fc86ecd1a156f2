"""The layout of integers in 64-bit words, so that one sum of words adds up all of them; kernels/lanes.py packs them.

    word w = sum over lanes j of  number[j W + w] * 2^(bits j),   W words,   bits = those of world_size * largest
    word w = sum over lanes j of  number[8 w + j] * 2^(8 j)       where bits = 8

A lane is wide enough for the sum over all ranks, so nothing is carried into the next one, and the sum of words holds
the sum of every number, in whatever order ranks are added. Words wrap around, so all 64 bits can be used. With 8 bits,
the bytes of the words are the numbers, and nothing has to be packed.
"""

from __future__ import annotations

from dataclasses import dataclass

_MANY = 4096
"""From this number of words on, the count is rounded up to a multiple of 16, which adds less than 0.4%."""


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
    def are_bytes(self) -> bool:
        """Whether the bytes of the words are the numbers."""
        return self.bits == 8

    @property
    def per_word(self) -> int:
        """Numbers in one word."""
        return 64 // self.bits

    @property
    def num_words(self) -> int:
        """Words for all numbers; a multiple of 16 if there are many, so that kernels can load 16 numbers at once."""
        least = -(-self.num_values // self.per_word)
        return least if least < _MANY else -(-least // 16) * 16

    @property
    def nbytes(self) -> int:
        """Bytes of all words."""
        return 8 * self.num_words
