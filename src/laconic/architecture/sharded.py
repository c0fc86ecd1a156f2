"""Each rank owns a shard of every parameter: compresses the traffic of FSDP2 (fully_shard)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from laconic.architecture.contract import Architecture, Codec, Measure, Scope
from laconic.architecture.shards.coded_rows import (
    AllRanks,
    added_up,
    coded_rows,
    packed_row,
    read_payloads,
    row_batches,
    rows_bytes,
    shares_added_up,
)
from laconic.collectives.members import Members
from laconic.core.exchange import Exchange, Move, Wire
from laconic.core.hosts import Hosts, hosts_alone
from laconic.core.moment import Moment
from laconic.core.plan import Bucket, Plan
from laconic.core.sent_bytes import all_gather_sent, shard_exchange_sent
from laconic.core.shard_rows import Layout, by_owner, layout_of, num_owners, row_of
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError
from laconic.settings import choice

_OFF = "off"
_BETWEEN = "sharded.between"


@dataclass(frozen=True, kw_only=True)
class Sharded(Architecture):
    """Compress FSDP2's own traffic: gradients go to the rank that owns a shard, weights from it to all ranks.

        gradients   of shard r, on rank r:  g <- mean_i(decode(C(g_i)))        one reduce-scatter per part of the model
        weights     on every rank:          x <- decode(W(x_r)), r = 1 ... n   one all-gather per part and pass

    C is the strategy's compression, W the setting `weights`. With `between`, ranks of a host add up gradients first,
    and each host sends one sum to each owner, by that compression B:

        gradients   of shard r, on rank r:  g <- sum over hosts(decode(B(sum_i(decode(C(g_i / n))))))

    The shard that the optimizer updates stays exact: W rounds only the weights that the passes compute with. Values of
    two parameters are never compressed together. With error_feedback every rank keeps a residual of the whole gradient,
    not of a shard; the loss of B is not kept.

    Reference: Wang et al. 2023, arXiv:2306.10209 (ZeRO++).
    """

    name: ClassVar[str] = "sharded"
    scope: ClassVar[Scope] = "everyone"
    holds_shards: ClassVar[bool] = True

    weights: str = choice("none", "bf16", "fp16", "int8", "int4")
    """The compression of weights when they are gathered for a pass."""
    between: str = choice(_OFF, "none", "bf16", "fp16", "int8", "int4")
    """The compression of gradients between hosts, where the ranks of a host add up theirs first; off: each rank sends
    to each owner directly."""

    hosts: Hosts = field(default=(), kw_only=True)
    """The ranks of each host; known once attached."""

    @property
    def weights_by(self) -> str:
        """As the setting says."""
        return self.weights

    @property
    def between_by(self) -> str | None:
        """As the setting says."""
        return None if self.between == _OFF else self.between

    def settled(self, hosts: Callable[[], Hosts], measure: Measure) -> Sharded:
        """This architecture with its hosts; raises AttachError if hosts have nothing to add up, or differ in size."""
        if self.between == _OFF or sum(map(len, where := hosts())) == 1:
            return self
        sizes = sorted({len(host) for host in where})
        reason = ""
        if len(where) == 1:
            reason = "all ranks share one host"
        elif sizes == [1]:
            reason = "every rank has a host of its own"
        elif len(sizes) > 1:
            reason = f"hosts have {sizes[0]} to {sizes[-1]} ranks, and all must have the same number"
        if reason:
            raise AttachError(f'architecture "{self}" cannot work here: {reason}. Leave out between={self.between}.')
        return replace(self, hosts=where)

    def tells_hosts_apart(self) -> bool:
        """Whether gradients are compressed differently between hosts."""
        return self.between != _OFF

    def cut(self, plan: Plan, world_size: int, *, tensors: bool) -> Plan:
        """One bucket for each part of the model that FSDP exchanges at once, with pieces in the order of owners."""
        parts: dict[object, list[TensorSpec]] = {}
        for index, bucket in enumerate(plan.buckets):
            for tensor in bucket.tensors:
                together = (tensor.ready_with or index, tensor.dtype, tensor.device)
                parts.setdefault(together, []).append(tensor)
        buckets = tuple(by_owner(part, world_size) for part in parts.values())
        return replace(plan, buckets=buckets, weights=buckets[::-1])

    def init(self, compression: Codec, bucket: Bucket) -> BucketState:
        """A state for each batch of pieces that is encoded at once."""
        alone = compression.one_by_one()
        rows = row_batches(layout_of(bucket, num_owners(bucket)), compression)
        return BucketState(bucket, parts=[alone.init(batch.bucket) for row in rows for batch in row])

    def exchange(
        self, flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, own: torch.Tensor | None = None
    ) -> Exchange:
        """Replace this rank's shard, which is a range of `flat`, by its mean; the others do not change."""
        assert own is None, "refused by the rules of legality: nobody asks what arrived"
        transport, layout = wire.transport, _layout(state, wire.transport.world_size)
        segments = state.bucket.segments()
        rows = flat.new_zeros((transport.world_size, layout.width))
        for owner, row in enumerate(rows):
            for index, place in layout.pieces(owner):
                row[place] = flat[segments[index][1]]
        mine = flat.new_empty(layout.width)
        yield from self.scatter(rows, state, compression, wire, mine)
        for index, place in layout.pieces(transport.rank):
            flat[segments[index][1]] = mine[place]

    def scatter(
        self, rows: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, out: torch.Tensor
    ) -> Exchange:
        """Fill `out` with the sum over all ranks of this rank's row of `rows`, which has one row per owner."""
        transport = wire.transport
        if compression.between_hosts is not None and transport.world_size > 1:
            yield from self._by_hosts(rows, state, compression, wire, out)
            return
        if compression.traits.lossless:
            yield transport.reduce_scatter(out, rows, what=wire.what)
            return
        yield from added_up(rows, state, compression, AllRanks(transport, wire.what), out)

    def _by_hosts(
        self, rows: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, out: torch.Tensor
    ) -> Exchange:
        """Each rank sums, inside its host, the shards of all owners with its position, then sends the sums to them."""
        transport, between = wire.transport, compression.between_hosts
        assert between is not None
        assert self.hosts, "attaching has settled it"
        levels = _Levels(self.hosts, transport.rank)
        coded = coded_rows(state, compression, transport.world_size)
        shares = [[coded[owner] for owner in column] for column in levels.columns]
        sums = rows.new_empty((len(levels.column), rows.shape[1]))
        inside = Members(transport, levels.host, wire.what)
        yield from shares_added_up(rows, shares, compression, inside, list(sums))
        if _BETWEEN not in state.tables:
            state.tables[_BETWEEN] = self.init(between, state.bucket)
        beside: BucketState = state.tables[_BETWEEN]
        # With the same random numbers, a value rounded up once would be rounded up again, which is biased.
        beside.moment = replace(state.moment, rank=state.moment.rank + transport.world_size)
        coded = coded_rows(beside, between, transport.world_size)
        mine = dict(zip(levels.column, sums, strict=True))
        shares = [[coded[owner]] for owner in levels.column]
        yield from shares_added_up(mine, shares, between, Members(transport, levels.column, wire.what), [out])

    def gather(
        self, row: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, rows: torch.Tensor
    ) -> Exchange:
        """Fill `rows` with the decoded `row` of each rank, including this rank's own."""
        transport = wire.transport
        (coded,) = coded_rows(state, compression, 1)
        as_they_are = compression.is_lossless_for(row.dtype) and coded.covers(row)
        if compression.traits.lossless or as_they_are:
            yield transport.all_gather(rows, row, what=wire.what)
            return
        mine = [compression.encode(taken, part) for taken, part in coded.values(row)]
        packed = packed_row(mine, row.device)
        received = packed.new_empty((transport.world_size, packed.numel()))
        yield transport.all_gather(received, packed, what=wire.what)
        coded.write_to(rows, iter(read_payloads(received, mine)), compression)

    def init_weights(self, compression: Codec, weights: Bucket, world_size: int) -> BucketState:
        """The compressor's state for this rank's row of weights; nothing is kept between steps."""
        row = row_of(weights, world_size)
        (batches,) = row_batches(layout_of(row, 1), compression)
        return BucketState(row, parts=[compression.init(batch.bucket) for batch in batches])

    def sent_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """Bytes of a row for each of the others, or of two levels; before attaching, for ranks on two hosts."""
        levels = self._levels(moment)
        sizes = {"scatter_inside": len(levels.host), "scatter_between": len(levels.column)}
        return sum(
            shard_exchange_sent(move.nbytes, sizes.get(move.kind, moment.world_size))
            for move in self.moves(bucket, compression, moment)
        )

    def sent_between(self, bucket: Bucket, compression: Codec, moment: Moment) -> int | None:
        """Bytes of the sums to the ranks with the same position on other hosts."""
        moves, count = self.moves(bucket, compression, moment), len(self._levels(moment).column)
        found = [shard_exchange_sent(move.nbytes, count) for move in moves if move.kind == "scatter_between"]
        return sum(found) if found else None

    def moves(self, bucket: Bucket, compression: Codec, moment: Moment, *, decoupled: bool = False) -> tuple[Move, ...]:
        """Sums of shards by the backend, or rows of payloads that the owners add up, at once or on two levels."""
        layout, between = layout_of(bucket, moment.world_size), compression.between_hosts
        if compression.traits.lossless and between is None:
            return (Move("scatter_sum", (moment.world_size * layout.width * bucket.dtype.itemsize,)),)
        inside = rows_bytes(layout, compression, moment)
        if between is None or moment.world_size == 1:
            return (Move("scatter", (moment.world_size * max(inside),)),)
        levels, sums = self._levels(moment), rows_bytes(layout, between, moment)
        longest = max(sum(inside[owner] for owner in column) for column in levels.columns)
        return (
            Move("scatter_inside", (len(levels.host) * longest,)),
            Move("scatter_between", (len(levels.column) * max(sums[owner] for owner in levels.column),)),
        )

    def _levels(self, moment: Moment) -> _Levels:
        return _Levels(self.hosts or _likely_hosts(moment.world_size), moment.rank)

    def num_waits(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """One wait for each level."""
        return len(self.moves(bucket, compression, moment))

    def gathered_bytes(self, weights: Bucket, compression: Codec, moment: Moment) -> int:
        """This rank's row, to each of the others."""
        (move,) = self.gather_moves(weights, compression, moment)
        return all_gather_sent(move.nbytes, moment.world_size)

    def gather_moves(self, weights: Bucket, compression: Codec, moment: Moment) -> tuple[Move, ...]:
        """One all-gather of rows."""
        row = row_of(weights, moment.world_size)
        if compression.traits.lossless:
            return (Move("gather", (row.nbytes,)),)
        return (Move("gather", tuple(rows_bytes(layout_of(row, 1), compression, moment))),)


def _layout(state: BucketState, world_size: int) -> Layout:
    """The layout of the bucket of a state, cached with the state."""
    key = ("rows", world_size)
    if key not in state.tables:
        state.tables[key] = layout_of(state.bucket, world_size)
    layout: Layout = state.tables[key]
    return layout


def _likely_hosts(world_size: int) -> Hosts:
    """Two hosts, as long as hosts are unknown, if each can have the same number of ranks."""
    half, rest = divmod(world_size, 2)
    return hosts_alone(world_size) if rest or half < 2 else (tuple(range(half)), tuple(range(half, world_size)))


class _Levels:
    """A rank's host, and the ranks with its position on all hosts."""

    def __init__(self, hosts: Hosts, rank: int) -> None:
        self.host = next(host for host in hosts if rank in host)
        self.columns = list(zip(*hosts, strict=True))
        """For each position on a host, the ranks that have it, host after host."""
        self.column = self.columns[self.host.index(rank)]
