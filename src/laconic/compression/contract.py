"""The contract of a compressor.

A method whose payloads can be added up implements `encode`, `decode` and `rounds`; one whose payload is packed bytes
extends `Packed` and implements `pack`, `unpack` and `packed_bytes`; one with several rounds implements `exchange` and
`rounds`. `rounds` predicts the bytes of an exchange without running it; the transport must count the same number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch

from laconic.compression.traits import REAL_DTYPES, Traits, computed_once
from laconic.compression.wire.shards import Shard, shards_of
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize
from laconic.core.tensor import TensorSpec
from laconic.errors import MethodError, StrategyError
from laconic.settings import Method, choice, found


@dataclass(frozen=True, kw_only=True)
class Compressor(Method):
    """WHAT goes on the wire."""

    axis: ClassVar[str] = "compression"
    on_resize: ClassVar[Mapping[str, Resize]] = {}
    """How its fields of state are converted when the number of workers changes; a field not named here is a "sum"."""
    scaled_fields: ClassVar[frozenset[str]] = frozenset()
    """Its fields of state in the unit of the gradients, which are rescaled when a GradScaler changes its scale."""
    owed_fields: ClassVar[frozenset[str]] = frozenset()
    """Its fields of state that hold unsent gradients, in the form in which they would be exchanged: another strategy
    can add them to its next gradients."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """The facts about this compressor, with its settings and with everything that it wraps."""
        return Traits()

    @property
    def own_traits(self) -> Traits:
        """The facts about this layer alone: of a wrapper, without those of the compressor that it wraps."""
        return self.traits

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Raise AttachError if this cannot work, or a setting has no effect, on these parameters or this optimizer."""

    def check_length(self, total_steps: int) -> None:
        """Raise AttachError if training ends before this compressor would start."""

    def init(self, bucket: Bucket) -> BucketState:
        """The state before the first step."""
        return BucketState(bucket)

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """The payload of this rank for `flat`; may update `state`, must not change `flat` unless it is the payload."""
        raise NotImplementedError

    def encode_rows(self, rows: torch.Tensor, states: Sequence[BucketState]) -> Payload:
        """Stacked payloads, one per row; there is one state per row, all for tensors of the same shapes."""
        payloads = [self.encode(row, state).tensors for row, state in zip(rows, states, strict=True)]
        return Payload(tuple(torch.stack(tensors) for tensors in zip(*payloads, strict=True)))

    def encode_keeping(self, flat: torch.Tensor, residual: torch.Tensor, state: BucketState) -> Payload:
        """The payload for `flat` + `residual`; `residual` becomes the compression error, 0 where that is not finite."""
        due = residual
        if residual.dtype == flat.dtype:
            residual += flat
        else:
            due = residual + flat
        payload = _apart(self.encode(due.to(flat.dtype), state), due)
        sent = torch.empty_like(flat)
        self.decode(payload, sent, state)
        due -= sent
        if due is not residual:
            residual.copy_(due)
        # An infinity has been sent, so all ranks have it; keeping it would spoil all later steps.
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return payload

    def encode_rows_keeping(
        self, rows: torch.Tensor, residuals: Sequence[torch.Tensor], states: Sequence[BucketState]
    ) -> Payload:
        """Stacked payloads, as `encode_keeping` returns them; each row has its own residual and state."""
        each = zip(rows, residuals, states, strict=True)
        payloads = [self.encode_keeping(row, residual, state).tensors for row, residual, state in each]
        return Payload(tuple(torch.stack(tensors) for tensors in zip(*payloads, strict=True)))

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Write the decoded `payload` into `out`."""
        raise NotImplementedError

    def add_decoded(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Add the decoded `payload` to `out`: the same bits as decoding and adding."""
        one = torch.empty_like(out)
        self.decode(payload, one, state)
        out += one

    def decode_rows(self, payloads: Payload, outs: torch.Tensor, state: BucketState) -> None:
        """Decode stacked payloads, one into each row of `outs`."""
        for number, out in enumerate(outs):
            self.decode(payloads.row(number), out, state)

    def add_decoded_rows(self, payloads: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Add all of the stacked payloads to `out`, one after the other."""
        for number in range(len(payloads.tensors[0])):
            self.add_decoded(payloads.row(number), out, state)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Replace `flat` by its sum over the group, as seen through this compressor.

        own: filled with this rank's contribution to the sum, from which a wrapper computes what was lost.
        By default one all-reduce of the payload, whose sum decodes to the sum of the inputs.
        """
        payload = self.encode(flat, state)
        if own is not None:
            self.decode(payload, own, state)
        yield from group.summed(payload.tensors)
        self.decode(payload, flat, state)

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """The rounds of one exchange of `bucket`, without running it; an upper bound unless `traits.exact_bytes`."""
        raise NotImplementedError

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """How often one exchange of `bucket` yields, the same on every rank; several rounds may share one wait."""
        return len(self.rounds(bucket, moment))

    def back(self) -> Compressor:
        """The compressor for sums that a server sends back: this one, without wrappers that only workers use."""
        return self

    def forgetful(self) -> Compressor:
        """This compressor without wrappers that keep a residual."""
        return self

    def one_by_one(self) -> Compressor:
        """This compressor with payloads gathered, so that no sum is compressed and sent back."""
        return self

    @property
    def between_hosts(self) -> Compressor | None:
        """The compressor for sums sent between hosts, where each host adds up its ranks first; None: hosts do not."""
        return None

    def payload_bytes(self, bucket: Bucket, moment: Moment) -> int:
        """Bytes of the payload that `encode` returns for `bucket`, if it can be decoded alone."""
        return sum(size for round in self.rounds(bucket, moment) for size in round.sizes)

    def layers(self) -> Iterator[Compressor]:
        """This compressor, then what it wraps, from the outside in."""
        yield self


def _apart(payload: Payload, due: torch.Tensor) -> Payload:
    """The payload in memory of its own, because that of `due` is overwritten before the payload is sent."""
    memory = due.untyped_storage().data_ptr()
    shared = [tensor.untyped_storage().data_ptr() == memory for tensor in payload.tensors]
    tensors = zip(payload.tensors, shared, strict=True)
    return Payload(tuple(tensor.clone() if is_shared else tensor for tensor, is_shared in tensors))


def uncompressed(flat: torch.Tensor, group: Group, own: torch.Tensor | None = None) -> Exchange:
    """Replace `flat` by its sum over the group, uncompressed."""
    if own is not None:
        own.copy_(flat)
    yield from group.summed((flat,))


def uncompressed_rounds(bucket: Bucket) -> tuple[Round, ...]:
    """The rounds of `uncompressed` for the flat tensor of `bucket`."""
    return (Round("sum", (bucket.nbytes,)),)


@dataclass(frozen=True, kw_only=True)
class Uncompressed(Compressor):
    """Every value in its own precision."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Lossless, and complex numbers can be sent too."""
        dtypes = (*REAL_DTYPES, torch.complex64, torch.complex128)
        return replace(super().traits, lossless=True, tensor_by_tensor=True, dtypes=dtypes)

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """The tensor itself."""
        return Payload((flat,))

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Copy the payload, unless it was summed in place."""
        if payload.tensors[0] is not out:
            out.copy_(payload.tensors[0])

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """One sum of the whole bucket."""
        return uncompressed_rounds(bucket)


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

    def add_unpacked_rows(self, rows: torch.Tensor, out: torch.Tensor, state: BucketState) -> None:
        """Unpack all rows and add them to `out`, one after the other."""
        for packed in rows:
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

    def add_decoded_rows(self, payloads: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Unpack all payloads and add them to `out`."""
        self.add_unpacked_rows(payloads.tensors[0], out, state)

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
        self.unpack(rows[0], total, state)
        self.add_unpacked_rows(rows[1:], total, state)
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


@dataclass(frozen=True, kw_only=True)
class Wrapper(Compressor):
    """Extends any compressor; written after a `+`."""

    family: ClassVar[str] = "wrapper"
    needs_loss: ClassVar[bool] = False
    """The wrapper has no effect on a lossless compressor, so it is refused there."""
    needs_unbiased: ClassVar[bool] = False
    """The wrapper works only around an unbiased compressor, so it is refused elsewhere."""
    needs_scale: ClassVar[bool] = False
    """The wrapper adds decoded values to an estimate that it keeps. Directions without magnitudes never bring that
    nearer to the input, so a compressor that sends only directions is refused inside it."""
    gathers: ClassVar[bool] = False
    """The payloads of the wrapped compressor are gathered, whatever its `route` is; so setting `route` is refused."""
    wraps: ClassVar[type[Compressor]] = Compressor
    """The kind of compressor it can wrap."""
    inner: Compressor = field(kw_only=False)
    """The wrapped compressor."""

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise StrategyError(
                f"compression.{self.name} wraps a Compressor object, got {found(self.inner)}. "
                f"Write e.g. {type(self).__name__}(Fp16())."
            )
        super().__post_init__()

    def traits_around(self, inner: Traits) -> Traits:
        """The traits of this wrapper around a compressor with traits `inner`."""
        return inner

    @property
    @computed_once
    def traits(self) -> Traits:
        """The traits of the inner compressor, as far as the wrapper does not change them."""
        # Both are stated for a method by itself.
        return replace(self.traits_around(self.inner.traits), loss_gap=None, linear=False)

    @property
    def own_traits(self) -> Traits:
        """The traits that the wrapper adds by itself."""
        return self.traits_around(Traits())

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """As the inner compressor."""
        self.inner.check(tensors, optimizer)

    def check_length(self, total_steps: int) -> None:
        """As the inner compressor."""
        self.inner.check_length(total_steps)

    def init(self, bucket: Bucket) -> BucketState:
        """The inner state; a wrapper adds its own fields."""
        return self.inner.init(bucket)

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """As the inner compressor."""
        return self.inner.encode(flat, state)

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """As the inner compressor."""
        self.inner.decode(payload, out, state)

    def add_decoded(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """As the inner compressor does; a wrapper that overrides `decode` overrides `add_decoded` too."""
        self.inner.add_decoded(payload, out, state)

    def back(self) -> Compressor:
        """This wrapper around the inner compressor's `back()`; that alone if it is lossless and `needs_loss` is set."""
        inner = self.inner.back()
        return inner if inner.traits.lossless and self.needs_loss else replace(self, inner=inner)

    def forgetful(self) -> Compressor:
        """The inner compressor's `forgetful()`, in this wrapper unless the wrapper keeps a residual."""
        inner = self.inner.forgetful()
        return inner if self.own_traits.keeps_residual else replace(self, inner=inner)

    def one_by_one(self) -> Compressor:
        """This wrapper around the inner compressor's `one_by_one()`."""
        return replace(self, inner=self.inner.one_by_one())

    def payload_bytes(self, bucket: Bucket, moment: Moment) -> int:
        """As the inner compressor."""
        return self.inner.payload_bytes(bucket, moment)

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """The rounds of the inner compressor."""
        return self.inner.rounds(bucket, moment)

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """As many waits as the inner compressor has."""
        return self.inner.num_waits(bucket, moment)

    def layers(self) -> Iterator[Compressor]:
        """This wrapper, then the layers it wraps."""
        yield self
        yield from self.inner.layers()

    def __str__(self) -> str:
        return f"{self.inner} + {self.call_text()}"
