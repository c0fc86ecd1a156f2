"""Integers in 64-bit words on a GPU: each word is written, or read, once. Imported only where Triton is installed."""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

_TILE = 1024
"""Words of one program."""


@triton.jit
def _pack(numbers, words, num_words, BITS: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    word = tl.zeros([TILE], tl.int64)
    for lane in tl.static_range(LANES):
        number = tl.load(numbers + at, mask=at < num_words, other=0)
        numbers += num_words
        word |= number.to(tl.int64) << (BITS * lane)
    tl.store(words + at, word, mask=at < num_words)


@triton.jit
def _unpack(words, num_words, numbers, BITS: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    word = tl.load(words + at, mask=at < num_words, other=0)
    for lane in tl.static_range(LANES):
        number = (word >> (BITS * lane)) & ((1 << BITS) - 1)
        tl.store(numbers + at, number.to(numbers.dtype.element_ty), mask=at < num_words)
        numbers += num_words


def pack(numbers: torch.Tensor, words: torch.Tensor, bits: int) -> None:
    """Fill `words` with all numbers."""
    _pack[(-(-len(words) // _TILE),)](numbers, words, len(words), BITS=bits, LANES=64 // bits, TILE=_TILE)


def unpack(words: torch.Tensor, numbers: torch.Tensor, bits: int) -> None:
    """Fill `numbers` with the contents of all lanes."""
    _unpack[(-(-len(words) // _TILE),)](words, len(words), numbers, BITS=bits, LANES=64 // bits, TILE=_TILE)
