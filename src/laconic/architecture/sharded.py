"""Each rank owns a shard of every parameter: what FSDP2 (fully_shard) sends, compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.architecture.contract import Architecture, Codec, Scope
from laconic.core.exchange import Exchange, Move, Wire
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket, Plan
from laconic.core.shard_rows import Layout, by_owner, layout_of, row_of
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.core.transport import all_gather_sent, shard_exchange_sent
from laconic.settings import choice


@dataclass(frozen=True, kw_only=True)
class Sharded(Architecture):
    """FSDP2's own traffic: gradients travel to the rank that owns a shard, weights from it to all.

        gradients   of shard r, on rank r:  g <- mean_i(decode(C(g_i)))        one reduce-scatter per part of the model
        weights     on every rank:          x <- decode(W(x_r)), r = 1 ... n   one all-gather per part and pass

    C is the strategy's compression, W the setting `weights`. The shard that the optimizer updates stays exact: what W
    rounds is only what the passes compute with. Parameters are compressed one by one, never across their borders. With
    error_feedback every rank remembers a residual of the whole gradient, not of a shard.

    Reference: Wang et al. 2023, arXiv:2306.10209 (ZeRO++).
    """

    name: ClassVar[str] = "sharded"
    scope: ClassVar[Scope] = "everyone"
    holds_shards: ClassVar[bool] = True

    weights: str = choice("none", "bf16", "fp16", "int8", "int4")
    """How weights travel when they are put together for a pass."""

    @property
    def weights_by(self) -> str:
        """As the setting says."""
        return self.weights

    def cut(self, plan: Plan, world_size: int, *, tensors: bool) -> Plan:
        """One bucket for each part of the model that FSDP handles at once, its pieces in the order of their owners."""
        parts: dict[object, list[TensorSpec]] = {}
        for index, bucket in enumerate(plan.buckets):
            for tensor in bucket.tensors:
                together = (tensor.ready_with or index, tensor.dtype, tensor.device)
                parts.setdefault(together, []).append(tensor)
        buckets = tuple(by_owner(part, world_size) for part in parts.values())
        return replace(plan, buckets=buckets, weights=buckets[::-1])

    def init(self, compression: Codec, bucket: Bucket) -> BucketState:
        """A state for each piece."""
        alone = compression.one_by_one()
        return BucketState(bucket, parts=[alone.init(Bucket((piece,))) for piece in bucket.tensors])

    def exchange(
        self, flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, own: torch.Tensor | None = None
    ) -> Exchange:
        """Replace this rank's shard, which is a run of `flat`, by its mean; the others stay as they are."""
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
        if compression.traits.lossless:
            yield transport.reduce_scatter(out, rows, what=wire.what)
            return
        layout = _layout(state, transport.world_size)
        payloads = [self._encoded(rows, number, layout, state, compression) for number in range(len(rows))]
        # Of the longest row: every rank has pieces of the same lengths.
        width = max(sum(payload.nbytes for payload in row) for row in payloads)
        packed = torch.zeros((len(rows), width), dtype=torch.uint8, device=rows.device)
        for row, payload in zip(packed, payloads, strict=True):
            _write(row, payload)
        received = torch.empty_like(packed)
        yield transport.all_to_all(received, packed, what=wire.what)
        out.zero_()
        pieces = layout.pieces(transport.rank)
        for row in received:  # in the order of ranks, whoever adds up
            for (index, place), payload in zip(pieces, _read(row, payloads[transport.rank]), strict=True):
                one = torch.empty_like(out[place])
                compression.decode(payload, one, state.part(index))
                out[place] += one

    def _encoded(
        self, rows: torch.Tensor, number: int, layout: Layout, state: BucketState, compression: Codec
    ) -> list[Payload]:
        """What this rank sends to the owner of a row."""
        return [compression.encode(rows[number, place], state.part(index)) for index, place in layout.pieces(number)]

    def gather(
        self, row: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, rows: torch.Tensor
    ) -> Exchange:
        """Fill `rows` with what everybody gets of each rank's `row`, of this rank's own too."""
        transport = wire.transport
        if compression.traits.lossless:
            yield transport.all_gather(rows, row, what=wire.what)
            return
        segments = state.bucket.segments()
        mine = [compression.encode(row[place], state.part(column)) for column, (_, place) in enumerate(segments)]
        packed = torch.empty(sum(payload.nbytes for payload in mine), dtype=torch.uint8, device=row.device)
        _write(packed, mine)
        received = packed.new_empty((transport.world_size, packed.numel()))
        yield transport.all_gather(received, packed, what=wire.what)
        for other, filled in zip(rows, received, strict=True):
            for column, ((_, place), payload) in enumerate(zip(segments, _read(filled, mine), strict=True)):
                compression.decode(payload, other[place], state.part(column))

    def init_weights(self, compression: Codec, weights: Bucket, world_size: int) -> BucketState:
        """What compression remembers about this rank's row of weights: nothing that lasts."""
        row = row_of(weights, world_size)
        return BucketState(row, parts=[compression.init(Bucket((tensor,))) for tensor in row.tensors])

    def sent_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """A row for each of the others."""
        (move,) = self.moves(bucket, compression, moment)
        return shard_exchange_sent(move.nbytes, moment.world_size)

    def moves(self, bucket: Bucket, compression: Codec, moment: Moment, *, halves: bool = False) -> tuple[Move, ...]:
        """Sums of shards by the backend, or rows of payloads that the owners add up."""
        layout = layout_of(bucket, moment.world_size)
        if compression.traits.lossless:
            return (Move("scatter_sum", (moment.world_size * layout.width * bucket.dtype.itemsize,)),)
        return (Move("scatter", (moment.world_size * _row_bytes(layout, compression, moment),)),)

    def gathered_bytes(self, weights: Bucket, compression: Codec, moment: Moment) -> int:
        """This rank's row, to each of the others."""
        (move,) = self.gather_moves(weights, compression, moment)
        return all_gather_sent(move.nbytes, moment.world_size)

    def gather_moves(self, weights: Bucket, compression: Codec, moment: Moment) -> tuple[Move, ...]:
        """One all-gather of rows."""
        row = row_of(weights, moment.world_size)
        if compression.traits.lossless:
            return (Move("gather", (row.nbytes,)),)
        sizes = (compression.payload_bytes(Bucket((tensor,)), moment) for tensor in row.tensors)
        return (Move("gather", (sum(sizes),)),)


def _layout(state: BucketState, world_size: int) -> Layout:
    """The same, kept beside the state."""
    key = ("rows", world_size)
    if key not in state.tables:
        state.tables[key] = layout_of(state.bucket, world_size)
    layout: Layout = state.tables[key]
    return layout


def _row_bytes(layout: Layout, compression: Codec, moment: Moment) -> int:
    """Of the longest row of payloads, which all others are padded to."""
    return max(
        sum(compression.payload_bytes(Bucket((piece,)), moment) for piece in pieces if piece.numel)
        for pieces in layout.rows
    )


def _write(row: torch.Tensor, payloads: Sequence[Payload]) -> None:
    """Put payloads side by side into a row of bytes."""
    at = 0
    for payload in payloads:
        for tensor in payload.tensors:
            row[at : at + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
            at += tensor.nbytes


def _read(row: torch.Tensor, like: Sequence[Payload]) -> list[Payload]:
    """Payloads of the same dtypes and shapes as these, from a row of bytes."""
    found: list[Payload] = []
    at = 0
    for payload in like:
        tensors: list[torch.Tensor] = []
        for tensor in payload.tensors:
            tensors.append(row[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            at += tensor.nbytes
        found.append(Payload(tuple(tensors)))
    return found
