"""The largest entries of the sum, found by pairs."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch

from laconic.compression.contract import Compressor
from laconic.compression.kernels.topk import topk_indices
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.bits import bits_of, write_bits
from laconic.compression.wire.entries import Entries, num_kept
from laconic.compression.wire.indices import CODINGS
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.transport import DoneWork, Work
from laconic.settings import choice, share


@dataclass(frozen=True, kw_only=True)
class GTopK(Compressor):
    """Merge the k largest entries of pairs of ranks, then of pairs of pairs, and keep the k largest each time.

        S_r = topk(g_r),   in round j = 0, 1, ...:  S_r = topk(S_r + S_peer),  peer = r xor 2^j

    After log2(n) rounds all ranks have the same k entries of each tensor, for 2 k log2(n) numbers sent where topk
    sends 2 k (n-1). If n is no power of two, each rank r beyond the largest power p first sends its entries to rank r -
    p and in the end gets the result from it. Each rank knows which of its own entries are part of the result, so
    error_feedback keeps the others.

    Reference: Shi et al. 2019, arXiv:1901.04359.
    """

    name: ClassVar[str] = "gtopk"
    family: ClassVar[str] = "sparsification"
    good_for: ClassVar[str] = "sparse gradients of many workers on links with short delays"

    density: float = share(0.01)
    """Share of the entries of each tensor that is sent, and that is in the result; at least one of each."""
    indices: str = choice("auto", *CODINGS)
    """How the indices of the entries are coded; auto takes the coding with the fewest bytes."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Pairs of ranks merge their entries, so no payload can be decoded alone."""
        return replace(
            super().traits,
            density=self.density,
            wants_error_feedback=True,
            decodes_alone=False,
            payloads_add_up=False,
            loss_gap=0.219,
            loss_deviation=0.03,
        )

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """The rounds of this rank: its entries in each merge, and the result to its guest if it has one."""
        if bucket.numel == 0:
            return ()
        entries, seat = self._entries(bucket), _Seat(moment.rank, moment.world_size)
        merge = Round("send", (entries.packed_bytes,))
        if seat.is_guest:
            return (merge,)
        return (merge,) * seat.num_merges + ((Round("send", (_answer_bytes(entries),)),) if seat.has_guest else ())

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """The same number on every rank: a rank without work in a round yields a wait that is already done."""
        seat = _Seat(moment.rank, moment.world_size)
        return seat.num_merges + 2 * seat.guests_exist if bucket.numel else 0

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Merge with all other ranks, in pairs; a rank without a partner is a guest, whose host rank merges for it."""
        if flat.numel() == 0:
            return
        entries, seat = self._entries(state.bucket), _Seat(group.rank, group.size)
        indices = entries.largest(flat)
        mine = _Part(indices, flat[indices].to(torch.float32))
        if seat.is_guest:
            result, counted = yield from _as_guest(mine, entries, seat, group)
        else:
            result, counted = yield from _by_pairs(mine, entries, seat, group)
        flat.zero_()
        flat[result.indices] = result.values.to(flat.dtype)
        if own is not None:
            own.zero_()
            own[mine.indices] = torch.where(counted, mine.values, 0.0).to(own.dtype)

    def _entries(self, bucket: Bucket) -> Entries:
        return Entries(bucket, tuple(num_kept(self.density, tensor.numel) for tensor in bucket.tensors), self.indices)


@dataclass(frozen=True)
class _Seat:
    """The role of a rank: ranks below the largest power of two merge by pairs, the others are guests of one of them."""

    rank: int
    world_size: int

    @property
    def num_merges(self) -> int:
        return self.world_size.bit_length() - 1

    @property
    def num_hosts(self) -> int:
        return 1 << self.num_merges

    @property
    def guests_exist(self) -> bool:
        return self.world_size > self.num_hosts

    @property
    def is_guest(self) -> bool:
        return self.rank >= self.num_hosts

    @property
    def has_guest(self) -> bool:
        return self.rank + self.num_hosts < self.world_size


class _Part(NamedTuple):
    """Entries of a bucket: their positions, in ascending order, and their values."""

    indices: torch.Tensor
    values: torch.Tensor


_Merging = Generator[Work, None, tuple[_Part, torch.Tensor]]
"""Returns the result, and which of this rank's entries are counted in it."""


def _as_guest(mine: _Part, entries: Entries, seat: _Seat, group: Group) -> _Merging:
    host, packed = seat.rank - seat.num_hosts, entries.pack(*mine)
    yield group.swap(packed, None, host)
    for _ in range(seat.num_merges):
        yield DoneWork()
    answer = torch.empty(_answer_bytes(entries), dtype=torch.uint8, device=packed.device)
    yield group.swap(None, answer, host)
    return _Part(*entries.unpack(answer)), bits_of(answer[entries.packed_bytes :])[: entries.num_values].bool()


def _by_pairs(mine: _Part, entries: Entries, seat: _Seat, group: Group) -> _Merging:
    result, guest = mine, mine
    counted = guest_counted = torch.ones_like(mine.indices, dtype=torch.bool)
    received = torch.empty(entries.packed_bytes, dtype=torch.uint8, device=mine.indices.device)
    if seat.has_guest:
        yield group.swap(None, received, seat.rank + seat.num_hosts)
        guest = _Part(*entries.unpack(received))
        result = _merged(mine, guest, entries)
    elif seat.guests_exist:
        yield DoneWork()
    for number in range(seat.num_merges):
        # An entry that one merge has dropped is not counted, even if other ranks bring its position back.
        counted, guest_counted = counted & _is_in(mine, result), guest_counted & _is_in(guest, result)
        packed = entries.pack(*result)
        yield group.swap(packed, received, seat.rank ^ (1 << number))
        result = _merged(result, _Part(*entries.unpack(received)), entries)
    counted, guest_counted = counted & _is_in(mine, result), guest_counted & _is_in(guest, result)
    if seat.has_guest:
        answer = torch.zeros(_answer_bytes(entries), dtype=torch.uint8, device=received.device)
        answer[: entries.packed_bytes] = entries.pack(*result)
        write_bits(guest_counted, answer[entries.packed_bytes :])
        yield group.swap(answer, None, seat.rank + seat.num_hosts)
    elif seat.guests_exist:
        yield DoneWork()
    return result, counted


def _answer_bytes(entries: Entries) -> int:
    """Bytes of the result, and of one bit for each of the guest's entries that says whether it is counted."""
    return entries.packed_bytes + -(-entries.num_values // 32) * 4


def _is_in(part: _Part, result: _Part) -> torch.Tensor:
    near = torch.searchsorted(result.indices, part.indices).clamp_(max=result.indices.numel() - 1)
    return result.indices[near] == part.indices


def _merged(first: _Part, second: _Part, entries: Entries) -> _Part:
    """The largest entries of the sum, as many of each tensor as before."""
    indices, order = torch.cat((first.indices, second.indices)).sort()
    is_new = torch.ones_like(indices, dtype=torch.bool)
    is_new[1:] = indices[1:] != indices[:-1]
    # A position occurs at most twice, and the sum of two does not depend on their order: both sides get the same bits.
    values = torch.cat((first.values, second.values))[order]
    sums = values.new_zeros(values.numel()).index_add_(0, is_new.cumsum(0) - 1, values)
    indices = indices[is_new]
    stops = torch.tensor([place.stop for _, place in entries.bucket.segments()], device=indices.device)
    ends: list[int] = torch.searchsorted(indices, stops).tolist()
    kept = [
        topk_indices(sums[begin:end], count) + begin
        for begin, end, count in zip([0, *ends], ends, entries.counts, strict=False)
    ]
    chosen = torch.cat(kept)
    return _Part(indices[chosen], sums[chosen])
