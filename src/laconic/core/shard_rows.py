"""Tensors cut into shards as FSDP2 lays them out: one row for each rank, with a stretch of every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec


class Layout(NamedTuple):
    """Pieces of tensors as FSDP lays them out: a row for each owner, of which each tensor has one stretch."""

    rows: tuple[tuple[TensorSpec, ...], ...]
    """For each owner its piece of every tensor; the last ones may be shorter, or empty."""
    places: tuple[int, ...]
    """Where each tensor's stretch begins in a row; it is as long as the longest piece."""
    width: int
    """Elements of a row."""

    def pieces(self, owner: int) -> list[tuple[int, slice]]:
        """The pieces of one owner that have any elements: their number in the bucket, and where in the row they lie."""
        first = owner * len(self.places)
        return [
            (first + column, slice(place, place + piece.numel))
            for column, (piece, place) in enumerate(zip(self.rows[owner], self.places, strict=True))
            if piece.numel
        ]


def by_owner(tensors: Sequence[TensorSpec], world_size: int) -> Bucket:
    """All pieces of some tensors: first those that rank 0 owns, one of each tensor, then those of rank 1, and so on."""
    return Bucket(tuple(tensor.shard_piece(rank, world_size) for rank in range(world_size) for tensor in tensors))


def layout_of(bucket: Bucket, world_size: int) -> Layout:
    """The rows of what `by_owner` gives."""
    count = len(bucket.tensors) // world_size
    assert count * world_size == len(bucket.tensors), "a bucket that was not laid out by owner"
    rows = tuple(bucket.tensors[first : first + count] for first in range(0, len(bucket.tensors), count))
    # The first owner's are the longest.
    ends = [0]
    for piece in rows[0]:
        ends.append(ends[-1] + piece.numel)
    return Layout(rows, tuple(ends[:-1]), ends[-1])


def row_of(weights: Bucket, world_size: int) -> Bucket:
    """What each rank contributes when these are put together: a stretch of each tensor, padded to one length."""
    return Bucket(layout_of(weights, world_size).rows[0])
