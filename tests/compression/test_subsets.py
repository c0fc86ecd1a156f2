"""Subsets of chunks as numbers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.compression.wire.subsets import LONGEST_CHUNK, SubsetsOfChunks, number_of, positions_of
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec


@pytest.mark.parametrize(("length", "kept"), [(1, 1), (5, 1), (7, 3), (6, 6), (9, 2)])
def test_all_subsets_are_counted_from_zero_on(length: int, kept: int) -> None:
    every = torch.tensor(list(itertools.combinations(range(length), kept)))
    numbers = number_of(every, length)
    assert sorted(numbers.tolist()) == list(range(math.comb(length, kept)))
    assert torch.equal(positions_of(numbers, length, kept), every)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_subset_of_the_longest_chunk_fits(data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, LONGEST_CHUNK))
    chosen = data.draw(st.sets(st.integers(0, LONGEST_CHUNK - 1), min_size=kept, max_size=kept))
    positions = torch.tensor([sorted(chosen)])
    number = number_of(positions, LONGEST_CHUNK)
    assert 0 <= number.item() < math.comb(LONGEST_CHUNK, kept) <= 2**63
    assert torch.equal(positions_of(number, LONGEST_CHUNK, kept), positions)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    chunk=st.integers(1, LONGEST_CHUNK),
    density=st.floats(0.01, 1.0),
    parts=st.integers(1, 5),
)
def test_parts_of_a_bucket_are_packed_and_unpacked(sizes: list[int], chunk: int, density: float, parts: int) -> None:
    bucket = Bucket(tuple(TensorSpec(f"t{number}", (size,)) for number, size in enumerate(sizes)))
    subsets = SubsetsOfChunks(bucket, chunk, density)
    flat = torch.randn(bucket.numel, generator=torch.Generator().manual_seed(0))
    places, share, rows = subsets.places(parts), subsets.share(parts), []
    assert len(set(places.tolist())) == len(places) == sum(-(-size // chunk) for size in sizes)
    for part in range(parts):
        chunks = (places // share == part).nonzero().view(-1)
        numbers = torch.zeros(share, dtype=torch.int64)
        numbers[places[chunks] - part * share] = subsets.largest(flat, subsets.by_kind(chunks))
        rows.append(subsets.pack(numbers, parts))
        assert rows[-1].numel() == subsets.packed_bytes(parts)
    found = subsets.indices(subsets.unpack(torch.stack(rows)).view(-1)[places])
    expected = []
    for _, place in bucket.segments():
        for start in range(place.start, place.stop, chunk):
            piece = flat[start : min(start + chunk, place.stop)].abs()
            expected += sorted((piece.topk(math.ceil(density * piece.numel())).indices + start).tolist())
    assert found.tolist() == expected


@settings(deadline=None, max_examples=60)
@given(content=st.binary(min_size=40, max_size=40))
def test_bytes_that_no_rank_would_send_stay_inside_the_bucket(content: bytes) -> None:
    bucket = Bucket((TensorSpec("weight", (1000,)),))
    subsets = SubsetsOfChunks(bucket, 64, 0.05)
    assert subsets.packed_bytes(1) == 40
    numbers = subsets.unpack(torch.frombuffer(bytearray(content), dtype=torch.uint8).unsqueeze(0))
    found = subsets.indices(numbers.view(-1))
    assert 0 <= found.min() <= found.max() < 1000
