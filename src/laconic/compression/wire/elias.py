"""Signed integers, most of them zero or small, in few bits: Elias gamma codes of gaps and magnitudes.

For each nonzero number, two numbers x >= 1 are coded: its distance from the previous one, and its magnitude.
With b = floor(log2 x), the gamma code of x is b zeros, a one, and the low b bits of x: 1 bit for 1, 3 bits for 2 and 3,
5 bits for 4 .. 7. Parts of one kind are stored together, so that reading needs no loop:

    prefixes    b zeros and a one, of all gaps, then of all magnitudes
    remainders  the low b bits, from the lowest up, of all gaps, then of all magnitudes
    signs       a one for each negative number
    padding     zeros up to a multiple of 4 bytes

The receiver knows the number of nonzero numbers.

Reference: Elias 1975; Alistarh et al. 2017, arXiv:1610.02132 (gaps and levels of qsgd).
"""

from __future__ import annotations

import torch

from laconic.compression.wire.bits import bits_of, write_bits


def encode_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Whole numbers (int64, one dimension) as bytes."""
    places = numbers.nonzero().view(-1)
    values = numbers[places]
    gaps = torch.diff(places, prepend=places.new_full((1,), -1))
    coded = torch.cat((gaps, values.abs()))
    num_low = _num_low_bits(coded)
    ends = (num_low + 1).cumsum(0)
    prefixes = torch.zeros(int(ends[-1]) if len(ends) else 0, dtype=torch.uint8, device=numbers.device)
    prefixes[ends - 1] = 1
    owners, inside = _spread(num_low)
    remainders = (coded[owners] >> inside) & 1
    bits = torch.cat((prefixes, remainders.to(torch.uint8), (values < 0).to(torch.uint8)))
    packed = torch.empty(-(-bits.numel() // 32) * 4, dtype=torch.uint8, device=numbers.device)
    write_bits(bits, packed)
    return packed


def decode_numbers(packed: torch.Tensor, num_nonzero: int, numel: int) -> torch.Tensor:
    """Decode `packed` into `numel` integers, of which `count` are not zero."""
    numbers = torch.zeros(numel, dtype=torch.int64, device=packed.device)
    if not num_nonzero:
        return numbers
    bits = bits_of(packed)
    ones = bits.nonzero().view(-1)[: 2 * num_nonzero]
    num_low = torch.diff(ones, prepend=ones.new_full((1,), -1)) - 1
    owners, inside = _spread(num_low)
    begin = int(ones[-1]) + 1
    remainders = bits[begin : begin + owners.numel()].to(torch.int64) << inside
    coded = (1 << num_low).index_add_(0, owners, remainders)
    gaps, magnitudes = coded.split(num_nonzero)
    signs = bits[begin + owners.numel() :][:num_nonzero].to(torch.int64)
    numbers[gaps.cumsum(0) - 1] = magnitudes * (1 - 2 * signs)
    return numbers


def _num_low_bits(coded: torch.Tensor) -> torch.Tensor:
    """floor(log2 x) of each."""
    return torch.frexp(coded.to(torch.float64)).exponent.to(torch.int64) - 1


def _spread(num_low: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each low bit, the number it belongs to, and its position in that."""
    owners = torch.repeat_interleave(torch.arange(num_low.numel(), device=num_low.device), num_low)
    starts = num_low.cumsum(0) - num_low
    return owners, torch.arange(owners.numel(), device=num_low.device) - starts[owners]
