"""One pass that collects keys that reach a bound, and an exact selection among these, in the order of places.

All programs share one table of 32-bit whole numbers, `work`:

    low, high (bounds, from `thresholds`), how many keys reach low, how often programs have arrived at a barrier
    for each round of the search: how many keys reach each of its bounds
    for each program of `finish`: how many it has found of each kind
    for each tile: where its collected keys begin, how many they are, how many of each kind are kept
    places and keys of the collected values

Tiles lie in the table in whatever order they were ready; each knows where, so the result does not depend on it.
Imported only where Triton is installed.
"""

from __future__ import annotations

import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

from laconic.compression.kernels.triton_gpu.grid_barrier import wait_for_all

WAYS = 32
"""Bounds that each round of the search cuts an interval of keys with."""
LOW, HIGH, REACH_LOW, ARRIVED, FIRST_ROUND = 0, 1, 2, 3, 32
"""Where these are in `work`."""
FIRST_FREE = FIRST_ROUND + 9 * WAYS
"""A round for an estimate, one up to `high`, and seven for 31 bits beyond."""

# Triton takes a constant only in this form.
_WAYS, _FIRST_ROUND, _FIRST_FREE = tl.constexpr(WAYS), tl.constexpr(FIRST_ROUND), tl.constexpr(FIRST_FREE)
_LOW, _HIGH, _REACH_LOW, _ARRIVED = (
    tl.constexpr(LOW),
    tl.constexpr(HIGH),
    tl.constexpr(REACH_LOW),
    tl.constexpr(ARRIVED),
)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _num_ones(x):
    """The number of one bits in each 32-bit number."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["num_tiles", "capacity", "begins_at"])
def collect(bits, work, n, num_tiles, capacity, begins_at, LARGEST: tl.constexpr, TILE: tl.constexpr):
    """Write places and keys of values that reach `low`, as many as there is room for, and count all of them."""
    low = tl.load(work + _LOW)
    tile = tl.program_id(0)
    word = tile * (TILE // 32) + tl.arange(0, TILE // 32)
    place = word[:, None] * 32 + tl.arange(0, 32)[None, :]
    # What lies outside is zero, and zero reaches nothing.
    keys = tl.load(bits + place, mask=place < n, other=0).to(tl.int32) & LARGEST
    # A bit for each value: a running count over words costs a thirty-second of one over values.
    marks = tl.sum((keys >= low).to(tl.uint32) << tl.arange(0, 32)[None, :].to(tl.uint32), axis=1)
    each = _num_ones(marks)
    count = tl.sum(each, axis=0)
    begin = tl.atomic_add(work + _REACH_LOW, count, sem="relaxed")
    begins = work + begins_at
    tl.store(begins + tile, begin)
    tl.store(begins + num_tiles + tile, count)
    found = begins + 3 * num_tiles
    slot = begin + tl.cumsum(each, axis=0) - each
    for _ in range(tl.max(each, axis=0)):
        first = word * 32 + _num_ones((marks & (0 - marks)) - 1)
        fits = (marks != 0) & (slot < capacity)
        tl.store(found + slot, first, mask=fits)
        tl.store(found + capacity + slot, tl.load(bits + first, mask=fits, other=0).to(tl.int32) & LARGEST, mask=fits)
        marks = marks & (marks - 1)
        slot += 1


@triton.jit
def _keys(bits, keys_at, place, inside, whole, LARGEST: tl.constexpr):
    """The keys of all values or of the collected ones; zero outside."""
    if whole:
        keys = tl.load(bits + place, mask=inside, other=0).to(tl.int32) & LARGEST
    else:
        keys = tl.load(keys_at + place, mask=inside, other=0)
    return keys


@triton.jit
def _reach_each(bits, keys_at, work, size, bounds, round_number, whole, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys reach each bound, summed over all programs."""
    counts = bounds * 0
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        keys = _keys(bits, keys_at, place, place < size, whole, LARGEST)
        # Bounds are above zero, so what lies outside reaches none.
        counts += tl.sum((keys[:, None] >= bounds[None, :]).to(tl.int32), axis=0)
    table = work + _FIRST_ROUND + round_number * _WAYS + tl.arange(0, _WAYS)
    tl.atomic_add(table, counts, sem="relaxed")
    wait_for_all(work + _ARRIVED, (round_number + 1) * tl.num_programs(0))
    return tl.load(table, cache_modifier=".cg")


@triton.jit
def _tiles(begins, num_tiles, tile, n, whole, TILE: tl.constexpr):
    """Where the keys of some tiles begin, and how many they are."""
    there = tile < num_tiles
    if whole:
        begin = tile * TILE
        length = tl.where(there, tl.minimum(n - begin, TILE), 0)
    else:
        begin = tl.load(begins + tile, mask=there, other=0)
        length = tl.load(begins + num_tiles + tile, mask=there, other=0)
    return begin, length


@triton.jit(do_not_specialize=["k", "seed", "num_tiles", "capacity", "tiles_each"])
def finish(
    bits,
    work,
    out,
    n,
    k,
    seed,
    num_tiles,
    capacity,
    tiles_each,
    LARGEST: tl.constexpr,
    SAMPLED: tl.constexpr,
    ESTIMATE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST_PROGRAMS: tl.constexpr,
):
    """Write the places of k keys: all above `upper`, and of those from `lower` to `upper` as many as are missing.

    Exactly: `lower` is the k-th largest, and so is `upper` unless no other key is equal; the first are taken.
    Estimated: they are sidco's thresholds; `need` in a row are taken from `turn` on, the first `rest` after the last.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    totals = work + _FIRST_FREE
    begins = totals + 2 * programs
    kept = begins + 2 * num_tiles
    found = kept + num_tiles
    keys_at = found + capacity

    zero = n * 0
    lower, upper, above, size, whole = zero, zero + LARGEST, zero, n, n > 0
    top, turn, rest, is_estimate, num_rounds = upper, zero, zero, n < 0, zero
    if SAMPLED:
        low, high, reach_low = tl.load(work + _LOW), tl.load(work + _HIGH), tl.load(work + _REACH_LOW)
        whole = (reach_low < k) | (reach_low > capacity)
        size = tl.where(whole, n, reach_low)
        lower = tl.where(reach_low < k, 0, low)
        upper = tl.where(reach_low < k, low - 1, LARGEST)
        above = tl.where(reach_low < k, reach_low, 0)
        top = tl.where(reach_low < k, upper, high)
        if ESTIMATE:
            way = tl.arange(0, _WAYS)
            bounds = tl.where(way == 0, high, _INFINITY)
            counts = _reach_each(bits, keys_at, work, size, bounds, num_rounds, whole, LARGEST, BLOCK)
            num_rounds += 1
            reach_high = tl.sum(tl.where(way == 0, counts, 0), axis=0)
            is_estimate = (reach_low >= k) & (tl.sum(tl.where(way == 1, counts, 0), axis=0) == 0)
            if is_estimate:
                lower = tl.where(reach_high < k, low, high)
                upper = tl.where(reach_high < k, high - 1, LARGEST)
                above = tl.where(reach_high < k, reach_high, 0)
                available = tl.where(reach_high < k, reach_low - reach_high, reach_high)
                turn = seed % tl.maximum(available, 1)
                rest = tl.maximum(turn + k - above - available, 0)
    while (lower < upper) & (is_estimate == 0):
        step = tl.maximum(top - lower - 1, 0) // (_WAYS - 1) + 1
        # The first is next to `lower`: many equal keys often are just that. 64 bits wide, since the last ones may lie
        # beyond the largest key before they are cut off.
        bounds = lower.to(tl.int64) + 1 + tl.arange(0, _WAYS) * step.to(tl.int64)
        bounds = tl.minimum(bounds, tl.maximum(top, lower + 1).to(tl.int64)).to(tl.int32)
        counts = _reach_each(bits, keys_at, work, size, bounds, num_rounds, whole, LARGEST, BLOCK)
        num_rounds += 1
        # Bounds ascend and counts descend: the last bound that k keys reach, and the first that they do not.
        enough = counts >= k
        lower = tl.maximum(tl.max(tl.where(enough, bounds, 0), axis=0), lower)
        upper = tl.minimum(tl.min(tl.where(enough, LARGEST, bounds - 1), axis=0), upper)
        above = tl.maximum(tl.max(tl.where(enough, 0, counts), axis=0), above)
        if tl.max((counts == k).to(tl.int32), axis=0) > 0:
            # Those that reach it are the k largest, whatever the k-th is.
            upper = lower - 1
            above = k
        top = upper
    need = k - above

    first = program * tiles_each
    num_above, num_between = zero, zero
    for row in range(first, tl.minimum(first + tiles_each, num_tiles), ROWS):
        tile = row + tl.arange(0, ROWS)
        begin, length = _tiles(begins, num_tiles, tile, n, whole, TILE)
        tile_counts = tile * 0
        for column in range(0, tl.max(length, axis=0), WIDTH):
            at = column + tl.arange(0, WIDTH)
            inside = at[None, :] < length[:, None]
            keys = _keys(bits, keys_at, begin[:, None] + at[None, :], inside, whole, LARGEST)
            is_between = inside & (keys >= lower) & (keys <= upper)
            tile_counts += tl.sum(is_between.to(tl.int32) + ((inside & (keys > upper)).to(tl.int32) << 16), axis=1)
        tl.store(kept + tile, tile_counts, mask=tile < num_tiles)
        num_above += tl.sum(tile_counts >> 16, axis=0)
        num_between += tl.sum(tile_counts & 0xFFFF, axis=0)
    tl.store(totals + program, num_above)
    tl.store(totals + programs + program, num_between)
    wait_for_all(work + _ARRIVED, (num_rounds + 1) * programs)

    others = tl.arange(0, MOST_PROGRAMS)
    earlier = others < program
    above_before = tl.sum(tl.load(totals + others, mask=earlier, other=0, cache_modifier=".cg"), axis=0)
    between_before = tl.sum(tl.load(totals + programs + others, mask=earlier, other=0, cache_modifier=".cg"), axis=0)
    for row in range(first, tl.minimum(first + tiles_each, num_tiles), ROWS):
        tile = row + tl.arange(0, ROWS)
        begin, length = _tiles(begins, num_tiles, tile, n, whole, TILE)
        tile_counts = tl.load(kept + tile, mask=tile < num_tiles, other=0)
        rows_above, rows_between = tile_counts >> 16, tile_counts & 0xFFFF
        above_rank = above_before + tl.cumsum(rows_above, axis=0) - rows_above
        between_rank = between_before + tl.cumsum(rows_between, axis=0) - rows_between
        above_before += tl.sum(rows_above, axis=0)
        between_before += tl.sum(rows_between, axis=0)
        for column in range(0, tl.max(length, axis=0), WIDTH):
            at = column + tl.arange(0, WIDTH)
            inside = at[None, :] < length[:, None]
            place = begin[:, None] + at[None, :]
            keys = _keys(bits, keys_at, place, inside, whole, LARGEST)
            is_above = inside & (keys > upper)
            is_between = inside & (keys >= lower) & (keys <= upper)
            both = is_between.to(tl.int32) + (is_above.to(tl.int32) << 16)
            ranks = tl.cumsum(both, axis=1) - both
            rank = between_rank[:, None] + (ranks & 0xFFFF)
            is_taken = (rank < rest) | ((rank >= turn) & (rank < turn + need - rest))
            taken_before = tl.minimum(rank, rest) + tl.minimum(tl.maximum(rank - turn, 0), need - rest)
            slot = above_rank[:, None] + (ranks >> 16) + taken_before
            is_taken = is_above | (is_between & is_taken)
            if whole:
                index = place
            else:
                index = tl.load(found + place, mask=is_taken, other=0)
            tl.store(out + slot, index.to(tl.int64), mask=is_taken)
            row_counts = tl.sum(both, axis=1)
            above_rank += row_counts >> 16
            between_rank += row_counts & 0xFFFF
