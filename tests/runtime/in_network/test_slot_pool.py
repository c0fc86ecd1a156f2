"""Slots by themselves: any order, any number of times, and frames that no honest rank sends."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from laconic.errors import CommunicationError
from laconic.runtime.in_network import frames as wire
from laconic.runtime.in_network.slot_pool import SlotPool

TAG = 7


def parts(rank: int, chunks: list[int], code: int = wire.SUM_I32, nbytes: int = 1440) -> wire.Frames:
    values = (np.arange(nbytes // 4, dtype="<i4") + 1000 * rank + np.array(chunks)[:, None]).astype("<i4")
    (found,) = wire.read(
        wire.write(wire.PART, chunks, values.view(np.uint8), code=code, rank=rank, tag=TAG).reshape(-1),
        24 + nbytes,
        TAG,
    )
    return found


@pytest.mark.parametrize("seed", range(20))
def test_sums_in_any_order(seed: int) -> None:
    """Ranks follow the rule of the window; which of them comes next, and what comes twice, is drawn."""
    random = Random(seed)
    world_size, num_slots = random.randint(1, 4), random.randint(1, 5)
    pool, chunks = SlotPool(num_slots, world_size), 4 * num_slots + 1
    have: list[set[int]] = [set() for _ in range(world_size)]
    sent: list[list[int]] = [[] for _ in range(world_size)]
    sums: dict[int, np.ndarray] = {}
    while any(len(got) < chunks for got in have):
        rank = random.randrange(world_size)
        base = next(chunk for chunk in range(chunks + 1) if chunk not in have[rank])
        may = [chunk for chunk in range(base, min(base + num_slots, chunks)) if chunk not in have[rank]]
        if not may:
            continue
        some = random.sample(may, random.randint(1, len(may)))
        some += random.choices(sent[rank] or some, k=random.randint(0, 2))  # old ones, and some twice
        outcome = pool.add(rank, parts(rank, some))
        sent[rank] += some
        for found in pool.sums(outcome.complete):
            for chunk, row in zip(found.chunks.tolist(), found.values, strict=True):
                assert chunk not in sums, "a chunk is complete once"
                sums[chunk] = row.view("<i4").copy()
                for got in have:
                    got.add(chunk)
        for found in pool.sums(outcome.again):
            for chunk, row in zip(found.chunks.tolist(), found.values, strict=True):
                assert np.array_equal(row.view("<i4"), sums[chunk])
    expected = sum(1000 * rank for rank in range(world_size)) + world_size * np.arange(360)
    for chunk, found in sums.items():
        assert np.array_equal(found, expected + world_size * chunk)


def test_a_rank_that_asks_is_told_what_is_missing_and_gets_what_is_there() -> None:
    pool = SlotPool(4, 2)
    pool.add(0, parts(0, [0, 1, 2]))
    pool.add(1, parts(1, [1]))
    places, lacking = pool.asked(1, 0, 4)
    assert places.tolist() == [1]
    assert lacking == [0, 2, 3]
    assert pool.asked(0, 0, 4)[1] == [3]
    assert pool.waiting_for()[1] == [1]


def test_a_chunk_that_cannot_be_due_is_refused() -> None:
    for first, wrong in (([], 8), ([0], 16), ([0], 8)):
        pool = SlotPool(4, 2)
        if first:
            pool.add(0, parts(0, first))
        with pytest.raises(CommunicationError, match=f"rank 0 has sent chunk {wrong}"):
            pool.add(0, parts(0, [wrong]))


def test_memory_is_bounded_by_the_slots() -> None:
    assert SlotPool(512, 16).nbytes < 2 * 512 * (1440 + 64)


def test_frames_with_any_header_raise_nothing_else() -> None:
    """With the right tag too: whoever has it may be mistaken."""
    random, pool = np.random.default_rng(1), SlotPool(8, 3)
    rows = wire.write(wire.PART, [0] * 20_000, np.zeros((20_000, 40), np.uint8), code=wire.SUM_I32, rank=0, tag=TAG)
    rows[:, 2:4] = random.integers(0, 7, (len(rows), 2))
    rows[:, 8] = random.integers(0, 40, len(rows))
    rows[random.random(len(rows)) < 0.1, 15] = 0xFF
    refused = 0
    for at in range(0, len(rows), 40):
        for frames in wire.read(rows[at : at + 40].reshape(-1), 64, TAG):
            taken = frames.only(frames.headers["kind"] == wire.PART)
            try:
                pool.add(int(random.integers(3)), taken)
            except CommunicationError:
                refused += 1
                pool = SlotPool(8, 3)
    assert refused > 10
