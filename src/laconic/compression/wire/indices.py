"""The positions of k of n entries as bytes: the cheapest of four codings.

    int32    4 bytes an index
    int16    2 bytes an index, its position in a block of 65536 entries; before them, for each block, where it ends
    bitmap   1 bit an entry
    packed   Elias-Fano: the low l bits of each index in sequence, then its high bits in unary, in a row of
             k + n / 2^l bits; about k (2 + log2(n / k)) bits in all

The number of bytes follows from n and k alone. None and all of the entries need no bytes.

Reference: Elias 1974; Fano 1971.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from laconic.compression.kernels.indices import decode_bitmap, decode_packed, encode_bitmap, encode_packed
from laconic.errors import MethodError

CODINGS = ("int32", "int16", "bitmap", "packed")
_BLOCK = 1 << 16
_LARGEST = 1 << 31
"""The largest number of entries; no bucket here reaches it."""


@lru_cache(maxsize=4096)
def chosen_coding(coding: str, n: int, k: int) -> str:
    """The choice of "auto": the coding with the fewest bytes."""
    return min(CODINGS, key=lambda name: indices_bytes(n, k, name)) if coding == "auto" else coding


@lru_cache(maxsize=4096)
def indices_bytes(n: int, k: int, coding: str = "auto") -> int:
    """Bytes of k indices below n; a multiple of 4, so that numbers after them are aligned."""
    assert 0 <= k <= n <= _LARGEST, f"{k} of {n} entries"
    if k in (0, n):
        return 0
    match chosen_coding(coding, n, k):
        case "int32":
            size = 4 * k
        case "int16":
            size = 4 * _num_blocks(n) + 2 * k
        case "bitmap":
            size = -(-n // 8)
        case _:
            low_bytes, high_bytes = _packed_bytes(n, k, low_bits(n, k))
            size = low_bytes + high_bytes
    return -(-size // 4) * 4


def encode_indices(indices: torch.Tensor, n: int, coding: str = "auto") -> torch.Tensor:
    """Ascending, distinct int64 indices below n as bytes."""
    k = indices.numel()
    # On a GPU the host would have to wait for the answer.
    if k > n or (indices.device.type == "cpu" and k and not _are_ascending(indices, n)):
        raise MethodError(f"positions of entries must be ascending, distinct and below {n}, got {k} that are not.")
    packed = torch.zeros(indices_bytes(n, k, coding), dtype=torch.uint8, device=indices.device)
    if not packed.numel():
        return packed
    match chosen_coding(coding, n, k):
        case "int32":
            packed.view(torch.int32).copy_(indices)
        case "int16":
            ends = 4 * _num_blocks(n)
            packed[:ends].view(torch.int32).copy_(torch.searchsorted(indices, _block_ends(n, indices.device)))
            # Shifted by half a block, so that it fits a signed number.
            packed[ends : ends + 2 * k].view(torch.int16).copy_(indices % _BLOCK - _BLOCK // 2)
        case "bitmap":
            encode_bitmap(indices, packed)
        case _:
            encode_packed(indices, packed, low_bits(n, k))
    return packed


def decode_indices(packed: torch.Tensor, n: int, k: int, coding: str = "auto") -> torch.Tensor:
    """Decode `packed`, without trailing bytes, into k int64 indices."""
    assert packed.numel() == indices_bytes(n, k, coding), f"{packed.numel()} bytes for {k} of {n} entries"
    if k in (0, n):
        return torch.arange(k, device=packed.device)
    match chosen_coding(coding, n, k):
        case "int32":
            return packed.view(torch.int32).to(torch.int64)
        case "int16":
            split = 4 * _num_blocks(n)
            places = packed[split : split + 2 * k].view(torch.int16).to(torch.int64) + _BLOCK // 2
            if split:
                ends = packed[:split].view(torch.int32).to(torch.int64)
                places += _BLOCK * torch.searchsorted(ends, torch.arange(k, device=packed.device), right=True)
            return places
        case "bitmap":
            return decode_bitmap(packed, k)
        case _:
            return decode_packed(packed, k, low_bits(n, k))


def _are_ascending(indices: torch.Tensor, n: int) -> bool:
    return bool(indices[0] >= 0) and bool(indices[-1] < n) and bool((indices[1:] > indices[:-1]).all())


@lru_cache(maxsize=4096)
def low_bits(n: int, k: int) -> int:
    """The number of low bits of each index that gives the fewest bytes."""
    return min(range(n.bit_length()), key=lambda bits: sum(_packed_bytes(n, k, bits)))


def _packed_bytes(n: int, k: int, bits: int) -> tuple[int, int]:
    return -(-k * bits // 8), -(-(k + ((n - 1) >> bits)) // 8)


def _num_blocks(n: int) -> int:
    """Blocks whose ends are sent: none where there is only one."""
    return 0 if n <= _BLOCK else -(-n // _BLOCK)


def _block_ends(n: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, _num_blocks(n) + 1, device=device) * _BLOCK
