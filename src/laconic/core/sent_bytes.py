"""Bytes that one rank sends in an operation among all ranks: those that the transport counts, as functions of sizes.

They are the bytes of ring, pairwise and tree algorithms (core/transport.py). This module does not import torch, so
that clusters and commands that only calculate need not import torch either.
"""

from __future__ import annotations


def all_reduce_sent(nbytes: int, world_size: int) -> int:
    """Bytes one rank sends in an all-reduce of `nbytes`."""
    return -(-2 * (world_size - 1) * nbytes // world_size)


def all_gather_sent(nbytes: int, world_size: int) -> int:
    """Bytes one rank sends when each contributes `nbytes`."""
    return (world_size - 1) * nbytes


def shard_exchange_sent(nbytes: int, world_size: int) -> int:
    """Bytes one rank sends when it keeps one of n equal shards of `nbytes` and sends the others."""
    return nbytes - nbytes // world_size if world_size > 1 else 0


def as_it_is_sent(nbytes: int, world_size: int) -> int:
    """Bytes one rank sends when its `nbytes` go to one other."""
    return nbytes


def broadcast_sent(nbytes: int, world_size: int, distance: int) -> int:
    """Bytes the rank `distance` places after the source sends in a binomial-tree broadcast."""
    children = sum(
        1 for level in range(world_size.bit_length()) if 2**level > distance and distance + 2**level < world_size
    )
    return children * nbytes
