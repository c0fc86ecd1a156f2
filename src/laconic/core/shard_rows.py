"""Tensors cut into shards in FSDP2's layout: one row for each rank, with a range of every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec


class Layout(NamedTuple):
    """Pieces of tensors in FSDP's layout: a row for each owner, with one range per tensor."""

    rows: tuple[tuple[TensorSpec, ...], ...]
    """For each owner its piece of every tensor; the last ones may be shorter, or empty."""
    places: tuple[int, ...]
    """Where each tensor's range begins in a row; the range is as long as the longest piece."""
    width: int
    """Elements of a row."""

    def pieces(self, owner: int) -> list[tuple[int, slice]]:
        """The pieces of one owner that have any elements: their number in the bucket, and their range in the row."""
        first = owner * len(self.places)
        return [
            (first + column, slice(place, place + piece.numel))
            for column, (piece, place) in enumerate(zip(self.rows[owner], self.places, strict=True))
            if piece.numel
        ]


class Batch(NamedTuple):
    """Pieces of one row that are encoded at once."""

    bucket: Bucket
    places: tuple[slice, ...]
    """Their ranges in the row; pieces without padding between them share one."""

    def taken_from(self, row: torch.Tensor) -> torch.Tensor:
        """The values of the pieces as one tensor: a view of the row where there is no padding between them."""
        return row[self.places[0]] if len(self.places) == 1 else torch.cat([row[place] for place in self.places])

    def placed(self, values: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
        """Contiguous values in pieces, each with its range of the row."""
        sizes = [place.stop - place.start for place in self.places]
        return list(zip(self.places, values.split(sizes), strict=True))


def batches_of(layout: Layout, owner: int, *, together: bool) -> list[Batch]:
    """The pieces of one owner that have any elements, all in one batch or each in one of its own."""
    pieces = [(piece, place) for piece, place in zip(layout.rows[owner], layout.places, strict=True) if piece.numel]
    if not together:
        return [Batch(Bucket((piece,)), (slice(place, place + piece.numel),)) for piece, place in pieces]
    places: list[slice] = []
    for piece, place in pieces:
        first = places.pop().start if places and places[-1].stop == place else place
        places.append(slice(first, place + piece.numel))
    return [Batch(Bucket(tuple(piece for piece, _ in pieces)), tuple(places))] if pieces else []


def num_owners(bucket: Bucket) -> int:
    """The number of ranks that `by_owner` has laid out a bucket for."""
    return len(bucket.tensors) // len({tensor.owner for tensor in bucket.tensors})


def by_owner(tensors: Sequence[TensorSpec], world_size: int) -> Bucket:
    """All pieces of some tensors: first those that rank 0 owns, one of each tensor, then those of rank 1, and so on."""
    return Bucket(tuple(tensor.shard_piece(rank, world_size) for rank in range(world_size) for tensor in tensors))


def layout_of(bucket: Bucket, world_size: int) -> Layout:
    """The rows of a bucket from `by_owner`."""
    count = len(bucket.tensors) // world_size
    assert count * world_size == len(bucket.tensors), "a bucket that was not laid out by owner"
    rows = tuple(bucket.tensors[first : first + count] for first in range(0, len(bucket.tensors), count))
    # The first owner's are the longest.
    ends = [0]
    for piece in rows[0]:
        ends.append(ends[-1] + piece.numel)
    return Layout(rows, tuple(ends[:-1]), ends[-1])


def row_of(weights: Bucket, world_size: int) -> Bucket:
    """The contribution of each rank to an all-gather of `weights`: a range of each tensor, padded to one length."""
    return Bucket(layout_of(weights, world_size).rows[0])
