"""The largest entries of the sum, by an all-reduce of sparse vectors that is balanced among the ranks."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch

from laconic.compression.contract import Compressor
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.entries import Entries, num_kept
from laconic.compression.wire.indices import decode_indices, encode_indices, indices_bytes
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.transport import Work
from laconic.settings import share

_BINS = 128
"""Bins of a histogram of magnitudes: eight for each factor of two, so 16 factors of two in all."""
_BIN_SHIFT = 20
"""Bits of a float32 below the three that distinguish the bins of one factor of two."""


@dataclass(frozen=True, kw_only=True)
class OkTopK(Compressor):
    """Send each entry to the rank that sums its region, and gather the k largest sums.

        S_i = topk(g_i),   u = sum_i S_i,   decoded = topk(u), exact to the width of a bin of its histogram

    1. Ranks agree on n regions of the bucket that hold about k/n entries of each rank: the means of their cuts.
    2. Every entry of S_i goes to the rank of its region, which sums them: at most k entries.
    3. A histogram of |u|, summed over all ranks, gives the threshold of each tensor: all entries above its bin are
       taken, and the first ones in the bin, where entries differ by less than an eighth.
    4. Ranks pass on surplus entries until each has k/n of the result: at most k (n-1)/n entries.
    5. All ranks gather these: k (n-1)/n entries.

    In all a rank sends fewer than 3 k entries, 6 k numbers, whatever n is; indices take fewer bytes than numbers do. In
    addition it sends histograms of 512 bytes per tensor. Each rank knows which of its own entries are part of the
    result, so error_feedback keeps the others. The paper reuses thresholds and cuts of earlier steps; here both are
    computed in every step, so no state is kept, exactly k entries arrive, and results do not depend on buckets.

    Reference: Li & Hoefler 2022 (Ok-Topk), arXiv:2201.07598.
    """

    name: ClassVar[str] = "oktopk"
    family: ClassVar[str] = "sparsification"
    good_for: ClassVar[str] = "sparse gradients of many workers where bytes cost more than round trips"

    density: float = share(0.01)
    """Share of the entries of each tensor that a rank sends, and that is in the result; at least one of each."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """The number of entries that a rank sends depends on their positions; no payload can be decoded alone."""
        return replace(
            super().traits,
            density=self.density,
            wants_error_feedback=True,
            decodes_alone=False,
            payloads_add_up=False,
            exact_bytes=False,
            loss_gap=0.212,
            loss_deviation=0.039,
        )

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """Cuts, counts and entries of regions; histograms; counts, surplus and entries of results."""
        n, num_tensors = moment.world_size, len(bucket.tensors)
        if bucket.numel == 0 or n == 1:
            return ()
        kept = self._entries(bucket).num_values
        part = -(-kept // n)
        # In smaller regions no coding needs more bytes but for padding, and none more than four for an index.
        leaving = 4 * kept + min(4 * kept, indices_bytes(bucket.numel, kept) + 8 * n)
        return (
            Round("sum", (8 * (n - 1), 4 * num_tensors)),
            Round("scatter", (4 * n,)),
            # If none of a rank's entries lie in its own region, all of them are sent.
            Round("scatter", (-(-leaving * n // (n - 1)),)),
            Round("sum", (4 * _BINS * num_tensors,)),
            Round("gather", (4 * (num_tensors + 1),)),
            Round("scatter", (8 * part * n,)),
            Round("gather", (max(_part_bytes(bucket.numel, kept, n)),)),
        )

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Regions, histogram, result."""
        if flat.numel() == 0:
            return
        entries = self._entries(state.bucket)
        places = entries.largest(flat)
        mine = result = _Part(places, flat[places].to(torch.float32))
        if group.size > 1:
            cuts, largest = yield from _regions(mine, entries, group)
            summed = yield from _added_up(mine, cuts, group)
            chosen, counts = yield from _selected(summed, largest, entries, group)
            result = yield from _gathered(chosen, counts, cuts, group)
        flat.zero_()
        flat[result.places] = result.values.to(flat.dtype)
        if own is not None:
            arrived = torch.zeros(flat.numel(), dtype=torch.bool, device=flat.device)
            arrived[result.places] = True
            own.zero_()
            own[mine.places] = torch.where(arrived[mine.places], mine.values, 0.0).to(own.dtype)

    def _entries(self, bucket: Bucket) -> Entries:
        return Entries(bucket, tuple(num_kept(self.density, tensor.numel) for tensor in bucket.tensors), "auto")


@dataclass(frozen=True)
class _Part:
    """Entries of a bucket: their positions, in ascending order, and their values."""

    places: torch.Tensor
    values: torch.Tensor

    def between(self, begin: int, end: int) -> _Part:
        """The entries numbered from `begin` up to `end`."""
        return _Part(self.places[begin:end], self.values[begin:end])

    def packed(self, region: range) -> torch.Tensor:
        """The entries as bytes, for a receiver that knows their number and region."""
        return torch.cat((encode_indices(self.places - region.start, len(region)), self.values.view(torch.uint8)))


def _unpacked(packed: torch.Tensor, count: int, region: range) -> _Part:
    split = indices_bytes(len(region), count)
    places = decode_indices(packed[:split], len(region), count) + region.start
    values = packed[split : split + 4 * count]
    return _Part(places, values.view(torch.float32) if count else values.to(torch.float32))


def _regions(mine: _Part, entries: Entries, group: Group) -> Generator[Work, None, tuple[list[range], torch.Tensor]]:
    """Regions with about the same number of entries, and for each tensor a bound on the sums of entries."""
    device, kept, n = mine.places.device, entries.num_values, group.size
    cuts = mine.places[torch.arange(1, n, device=device) * kept // n]
    owners = _owners(mine.places, entries)
    largest = torch.zeros(len(entries.counts), device=device).scatter_reduce_(0, owners, mine.values.abs(), "amax")
    yield group.sum((cuts, largest))
    # On a GPU the host waits here: it must know how much each rank gets.
    ends = [0, *(cuts // n).tolist(), entries.numel]
    return [range(begin, end) for begin, end in pairwise(ends)], largest


def _added_up(mine: _Part, regions: Sequence[range], group: Group) -> Generator[Work, None, _Part]:
    """The sum of the entries of all ranks in this rank's region."""
    device, region = mine.places.device, regions[group.rank]
    stops = torch.tensor([region.stop for region in regions], device=device)
    ends: list[int] = torch.searchsorted(mine.places, stops).tolist()
    parts = [mine.between(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    counts = torch.tensor([[part.places.numel()] for part in parts], dtype=torch.int32, device=device)
    work, received = group.scatter(counts)
    yield work
    coming: list[int] = received.view(-1).tolist()
    work, messages = group.scatter_uneven(
        [part.packed(region) for part, region in zip(parts, regions, strict=True)],
        [indices_bytes(len(region), count) + 4 * count for count in coming],
    )
    yield work
    total = torch.zeros(len(region), device=device)
    touched = torch.zeros(len(region), dtype=torch.bool, device=device)
    # In the order of ranks, so that the sum does not depend on which rank forms it.
    for message, count in zip(messages, coming, strict=True):
        part = _unpacked(message, count, range(len(region)))
        total[part.places] += part.values
        touched[part.places] = True
    places = touched.nonzero().view(-1)
    return _Part(places + region.start, total[places])


def _selected(
    summed: _Part, largest: torch.Tensor, entries: Entries, group: Group
) -> Generator[Work, None, tuple[_Part, list[int]]]:
    """This rank's part of the result, and the number of entries of each rank."""
    device, num_tensors = largest.device, len(entries.counts)
    wanted = torch.tensor(entries.counts, device=device)
    owners = _owners(summed.places, entries)
    # Bin 0 holds the largest. NaN has larger bits than infinity, so it is among them.
    bins = (_bits(largest)[owners] - _bits(summed.values)).clamp(0, _BINS - 1)
    histogram = torch.zeros(num_tensors * _BINS, dtype=torch.int32, device=device)
    histogram.index_add_(0, owners * _BINS + bins, torch.ones_like(owners, dtype=torch.int32))
    yield group.sum((histogram,))
    below = histogram.view(num_tensors, _BINS).cumsum(1)
    edge = (below < wanted.unsqueeze(1)).sum(1).clamp(max=_BINS - 1)
    above = torch.where(edge > 0, below.gather(1, (edge - 1).clamp(min=0).unsqueeze(1)).view(-1), 0)
    sure, unsure = bins < edge[owners], bins == edge[owners]
    at_edge = torch.zeros(num_tensors + 1, dtype=torch.int32, device=device)
    at_edge.index_add_(0, owners, unsure.to(torch.int32))
    at_edge[-1] = sure.sum()
    work, rows = group.gather(at_edge)
    yield work
    # Of those at the edge the first are taken; regions are in order, and so are the ranks that have them.
    waiting = rows[:, :-1].long()
    before = waiting.cumsum(0) - waiting
    taken = torch.minimum(waiting, (wanted - above - before).clamp(min=0))
    mine = waiting[group.rank]
    numbers = unsure.cumsum(0) - 1 - (mine.cumsum(0) - mine)[owners]
    kept = (sure | (unsure & (numbers < taken[group.rank][owners]))).nonzero().view(-1)
    counts: list[int] = (rows[:, -1] + taken.sum(1)).tolist()
    return _Part(summed.places[kept], summed.values[kept]), counts


def _gathered(
    chosen: _Part, counts: Sequence[int], regions: Sequence[range], group: Group
) -> Generator[Work, None, _Part]:
    """The whole result, after ranks have balanced their parts."""
    n, total, numel = group.size, sum(counts), regions[-1].stop
    size = -(-total // n)
    held, ends = [], 0
    for count in counts:
        held.append(range(ends, ends + count))
        ends += count
    due = [range(min(rank * size, total), min((rank + 1) * size, total)) for rank in range(n)]
    begin = held[group.rank].start
    leaving = [_common(held[group.rank], part) for part in due]
    coming = [_common(part, due[group.rank]) for part in held]
    work, messages = group.scatter_uneven(
        [chosen.between(run.start - begin, run.stop - begin).packed(regions[group.rank]) for run in leaving],
        [indices_bytes(len(region), len(run)) + 4 * len(run) for region, run in zip(regions, coming, strict=True)],
    )
    yield work
    parts = [
        _unpacked(message, len(run), region) for message, run, region in zip(messages, coming, regions, strict=True)
    ]
    mine = _Part(torch.cat([part.places for part in parts]), torch.cat([part.values for part in parts]))
    sizes = _part_bytes(numel, total, n)
    row = torch.zeros(max(sizes), dtype=torch.uint8, device=mine.places.device)
    row[: sizes[group.rank]] = mine.packed(range(numel))
    work, rows = group.gather(row)
    yield work
    whole = [_unpacked(packed, len(run), range(numel)) for packed, run in zip(rows, due, strict=True)]
    return _Part(torch.cat([part.places for part in whole]), torch.cat([part.values for part in whole]))


def _part_bytes(numel: int, total: int, n: int) -> list[int]:
    """Bytes of each rank's part of a result; the last ones may have fewer entries."""
    size = -(-total // n)
    counts = [min(size, max(0, total - rank * size)) for rank in range(n)]
    return [indices_bytes(numel, count) + 4 * count for count in counts]


def _owners(places: torch.Tensor, entries: Entries) -> torch.Tensor:
    """The tensor that each position belongs to."""
    stops = torch.tensor([place.stop for _, place in entries.bucket.segments()], device=places.device)
    return torch.searchsorted(stops, places, right=True)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Magnitudes as whole numbers in their order, eight for each factor of two."""
    return (values.abs().view(torch.int32) >> _BIN_SHIFT).long()


def _common(first: range, second: range) -> range:
    """The intersection of two ranges; an empty range inside the first if there is none."""
    begin = min(max(first.start, second.start), first.stop)
    return range(begin, max(begin, min(first.stop, second.stop)))
