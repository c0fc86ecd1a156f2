"""The base of compressors whose payload is packed bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from laconic.compression.contract import Compressor
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.shards import Shard, shards_of
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.errors import MethodError
from laconic.settings import choice

Route = Literal["gather", "scatter"]
_DUE = "packed bytes"


@dataclass(frozen=True, kw_only=True)
class Packed(Compressor):
    """A compressor whose payload is packed bytes, which cannot be added up.

    gather: every rank gets every payload, (n-1) B bytes per rank; one round, and sums lose nothing.
    scatter: payloads are sent in n shards, each rank adds up one shard, packs it again and sends it to all: about
    2 (n-1)/n B bytes, whatever n is; packing twice loses precision twice, unless the second loss is kept
    (`state.owed`).
    """

    route: str = choice("auto", "gather", "scatter")
    """How payloads are combined; auto takes the route that sends fewer bytes."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Payloads must be unpacked before they can be added up."""
        return replace(super().traits, payloads_add_up=False, sends_sums_back=self.route != "gather")

    def pack(self, flat: torch.Tensor, state: BucketState) -> torch.Tensor:
        """`packed_bytes` bytes that represent `flat`, which is not changed."""
        raise NotImplementedError

    def pack_rows(self, rows: torch.Tensor, states: Sequence[BucketState]) -> torch.Tensor:
        """The packed bytes of each row; there is one state per row, all for tensors of the same shapes."""
        return torch.stack([self.pack(row, state) for row, state in zip(rows, states, strict=True)])

    def unpack(self, packed: torch.Tensor, out: torch.Tensor, state: BucketState) -> None:
        """Unpack `packed` into `out`."""
        raise NotImplementedError

    def add_unpacked(self, packed: torch.Tensor, out: torch.Tensor, state: BucketState) -> None:
        """Unpack `packed` and add it to `out`."""
        one = torch.empty_like(out)
        self.unpack(packed, one, state)
        out += one

    def unpack_rows(self, rows: torch.Tensor, outs: torch.Tensor, state: BucketState) -> None:
        """Unpack each row into the same row of `outs`."""
        for packed, out in zip(rows, outs, strict=True):
            self.unpack(packed, out, state)

    def sum_unpacked_rows(self, rows: torch.Tensor, out: torch.Tensor, state: BucketState) -> None:
        """Fill `out` with the sum of all rows, added up one after the other."""
        self.unpack(rows[0], out, state)
        for packed in rows[1:]:
            self.add_unpacked(packed, out, state)

    def packed_bytes(self, bucket: Bucket) -> int:
        """The number of bytes that `pack` returns; a multiple of 4, so that rows of payloads stay aligned."""
        raise NotImplementedError

    def one_by_one(self) -> Compressor:
        """This compressor with the route gather."""
        return replace(self, route="gather")

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """The packed bytes."""
        return Payload((self._packed(flat, state),))

    def encode_rows(self, rows: torch.Tensor, states: Sequence[BucketState]) -> Payload:
        """The packed bytes of each row."""
        return Payload((self._checked(self.pack_rows(rows, states), (len(rows),), states[0]),))

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Unpack the payload into `out`."""
        self.unpack(payload.tensors[0], out, state)

    def add_decoded(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Unpack the payload and add it to `out`."""
        self.add_unpacked(payload.tensors[0], out, state)

    def decode_rows(self, payloads: Payload, outs: torch.Tensor, state: BucketState) -> None:
        """Unpack each payload into its row of `outs`."""
        self.unpack_rows(payloads.tensors[0], outs, state)

    def sum_decoded_rows(self, payloads: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Fill `out` with the sum of all payloads."""
        self.sum_unpacked_rows(payloads.tensors[0], out, state)

    def payload_bytes(self, bucket: Bucket, moment: Moment) -> int:
        """The packed bytes."""
        return self.packed_bytes(bucket)

    def chosen_route(self, bucket: Bucket, world_size: int) -> Route:
        """Gather or scatter for this bucket."""
        if self.route != "auto":
            return "scatter" if self.route == "scatter" else "gather"
        return "scatter" if 2 * self._row_bytes(bucket, world_size) < self.packed_bytes(bucket) else "gather"

    def _row_bytes(self, bucket: Bucket, world_size: int) -> int:
        # Most of many shards are equal: ranges of one large tensor.
        alike = {shard.bucket.layout: shard.bucket for shard in shards_of(bucket, world_size)}
        return max(map(self.packed_bytes, alike.values()))

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """One gather, or a scatter and a gather of shards."""
        if self.chosen_route(bucket, moment.world_size) == "gather":
            return (Round("gather", (self.packed_bytes(bucket),)),)
        row = self._row_bytes(bucket, moment.world_size)
        return (Round("scatter", (row * moment.world_size,)), Round("gather", (row,)))

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """By the chosen route."""
        if self.chosen_route(state.bucket, group.size) == "scatter":
            yield from self._by_shards(flat, state, group, own)
            return
        packed = self._packed(flat, state)
        if own is not None:
            self.unpack(packed, own, state)
        work, rows = group.gather(packed)
        yield work
        flat.copy_(self._sum(rows, flat, state))

    def _packed(self, flat: torch.Tensor, state: BucketState) -> torch.Tensor:
        return self._checked(self.pack(flat, state), (), state)

    def _checked(self, packed: torch.Tensor, count: tuple[int, ...], state: BucketState) -> torch.Tensor:
        """The result of `pack` or `pack_rows`; raises unless it has the size that all other ranks expect."""
        # Hashing a bucket of many tensors takes as long as a kernel.
        key = (_DUE, self.name)
        due: int = state.tables.get(key) or state.tables.setdefault(key, self.packed_bytes(state.bucket))
        if packed.dtype != torch.uint8 or packed.shape != (*count, due):
            raise MethodError(
                f"compression.{self.name}: pack must return {due} bytes, as packed_bytes says for {state.bucket.numel} "
                f"elements, but returned {packed.dtype} of shape {tuple(packed.shape)}."
            )
        return packed

    def _sum(self, rows: torch.Tensor, like: torch.Tensor, state: BucketState) -> torch.Tensor:
        """The sum of the payloads of all ranks."""
        # In the order of ranks, so that every rank comes to the same bits.
        total = torch.empty_like(like)
        self.sum_unpacked_rows(rows, total, state)
        return total

    def _by_shards(self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None) -> Exchange:
        shards, states = self._shards(state, group.size)
        sizes = [self.packed_bytes(shard.bucket) for shard in shards]
        rows = torch.zeros((group.size, max(sizes)), dtype=torch.uint8, device=flat.device)
        for shard, part, size, row in zip(shards, states, sizes, rows, strict=True):
            row[:size] = self._packed(flat[shard.place], part)
            if own is not None:
                self.unpack(row[:size], own[shard.place], part)
        work, received = group.scatter(rows)
        yield work
        mine, size = shards[group.rank], sizes[group.rank]
        total = self._sum(received[:, :size], flat[mine.place], states[group.rank])
        owed = None if state.owed is None else state.owed[mine.place]
        if owed is not None:
            total += owed
        row = torch.zeros(max(sizes), dtype=torch.uint8, device=flat.device)
        # With the same random numbers, a value rounded up once would be rounded up again, which is biased.
        states[group.rank].moment = replace(state.moment, rank=state.moment.rank + group.size)
        row[:size] = self._packed(total, states[group.rank])
        if owed is not None:
            self.unpack(row[:size], owed, states[group.rank])
            torch.sub(total, owed, out=owed)
        work, gathered = group.gather(row)
        yield work
        for shard, part, size, row in zip(shards, states, sizes, gathered, strict=True):
            self.unpack(row[:size], flat[shard.place], part)

    def _shards(self, state: BucketState, count: int) -> tuple[list[Shard], list[BucketState]]:
        shards, key = shards_of(state.bucket, count), ("shards", count)
        if key not in state.tables:
            state.tables[key] = [self.init(shard.bucket) for shard in shards]
        states: list[BucketState] = state.tables[key]
        for part in states:
            part.moment = state.moment
        return shards, states
