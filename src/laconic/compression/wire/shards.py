"""A bucket cut into n pieces of nearly equal size, each a bucket of its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec

_ALIGNMENT = 256
"""Elements between possible cuts; a cut inside a block of values would give both sides a scale of their own."""


@dataclass(frozen=True)
class Shard:
    """One piece: its range in the flat tensor, and its tensors."""

    place: slice
    bucket: Bucket


@lru_cache(maxsize=1024)
def shards_of(bucket: Bucket, count: int) -> list[Shard]:
    """`count` pieces in order; the last ones may be empty. Pieces of tensors are named after their ranges."""
    size = -(-bucket.numel // (count * _ALIGNMENT)) * _ALIGNMENT
    first = bucket.tensors[0]
    # An empty piece still knows its dtype and device.
    nothing = Bucket((TensorSpec(f"{first.name}[0:0]", (0,), first.dtype, first.device),))
    shards: list[Shard] = []
    segments = deque(bucket.segments())
    for number in range(count):
        begin, end = min(number * size, bucket.numel), min((number + 1) * size, bucket.numel)
        pieces: list[TensorSpec] = []
        while segments and segments[0][1].start < end:
            tensor, place = segments[0]
            if begin < place.stop:
                pieces.append(tensor.piece(max(begin, place.start) - place.start, min(end, place.stop) - place.start))
            if place.stop > end:
                break
            segments.popleft()
        shards.append(Shard(slice(begin, end), Bucket(tuple(pieces)) if pieces else nothing))
    return shards
