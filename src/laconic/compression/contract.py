"""What a compressor promises.

A method whose payloads can simply be added up writes `encode`, `decode` and `rounds`; one whose payload is a run of
bytes that must be unpacked first extends `Packed` and writes `pack`, `unpack` and `packed_bytes`; one with several
rounds writes `exchange` and `rounds`. `rounds` prices an exchange without running it, and what it says must equal what
the transport counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch

from laconic.compression.wire.shards import Shard, shards_of
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize
from laconic.core.tensor import TensorSpec
from laconic.errors import StrategyError
from laconic.settings import Method, choice, found


@dataclass(frozen=True, kw_only=True)
class Compressor(Method):
    """WHAT goes on the wire."""

    axis: ClassVar[str] = "compression"
    lossless: ClassVar[bool] = False
    """The receiver gets exactly what was sent, so there is no error to feed back."""
    unbiased: ClassVar[bool] = False
    """On average over its random choices, what arrives is what was sent."""
    wants_error_feedback: ClassVar[bool] = False
    """Trains worse, or not at all, without something that sends later what was lost now."""
    keeps_residual: ClassVar[bool] = False
    """Sends later what was lost now."""
    keeps_scale: ClassVar[bool] = True
    """What arrives is as large as what was sent; else it is only a direction, which an optimizer can follow but by
    which no parameter can be moved."""
    loss_gap: ClassVar[float | None] = None
    """By which share the tiny GPT's loss ends above the uncompressed one, with defaults and error feedback where it is
    wanted, as docs/results/convergence.md prints it; None: not measured, or nothing is lost."""
    sees_shapes: ClassVar[bool] = False
    """What it does to a tensor depends on more than its elements, so pieces of one would not do."""
    accumulates: ClassVar[bool] = False
    """What it sends is built up from earlier inputs too, so input minus what was sent is not what was lost."""
    on_resize: ClassVar[Mapping[str, Resize]] = {}
    """What becomes of its fields of state when the number of workers changes; a field not named here is a "sum"."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    """Gradient dtypes it can carry."""

    def check(self, tensors: Sequence[TensorSpec]) -> None:
        """Raise AttachError if a setting can have no effect on a model with these parameters."""

    def init(self, bucket: Bucket) -> BucketState:
        """The state before the first step."""
        return BucketState(bucket)

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """What this rank sends for `flat`; may update `state`, must not change `flat` unless it is the payload."""
        raise NotImplementedError

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Write what `payload` stands for into `out`."""
        raise NotImplementedError

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Replace `flat` by its sum over the group, as seen through this compressor.

        own: filled with what this rank contributed to that sum, for a wrapper that needs to know what was lost.
        As written here: an all-reduce of the payload, whose sum decodes to the sum of the inputs.
        """
        payload = self.encode(flat, state)
        if own is not None:
            self.decode(payload, own, state)
        yield from group.summed(payload.tensors)
        self.decode(payload, flat, state)

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """What one exchange of `bucket` sends, without running it; an upper bound if the method is not `exact`."""
        raise NotImplementedError

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """How often one exchange of `bucket` yields, the same on every rank; several rounds may share one wait."""
        return len(self.rounds(bucket, moment))

    def alone(self) -> bool:
        """Whether one rank's payload can be read without the others': whether `encode` and `decode` are written."""
        return True

    def sums_only(self) -> bool:
        """Whether every round of an exchange is a sum, if payloads cannot be read alone."""
        return False

    def adds_up(self) -> bool:
        """Whether payloads can simply be added up: one sum, which may be formed in two rounds."""
        return True

    def back(self) -> Compressor:
        """How whoever has added up what workers sent sends the sum back: as this does, without what only workers do."""
        return self

    def forgetful(self) -> Compressor:
        """The same without what keeps a residual."""
        return self

    def payload_bytes(self, bucket: Bucket, moment: Moment) -> int:
        """Bytes of what `encode` gives for `bucket`, if it can be read alone."""
        return sum(size for round in self.rounds(bucket, moment) for size in round.sizes)

    def exact(self) -> bool:
        """Whether `rounds` says exactly what is sent; else it depends on the values, and `rounds` is a bound."""
        return True

    def amplifies(self) -> bool:
        """Whether what is sent is enlarged so that it is right on average; a residual of that would grow for ever."""
        return False

    def layers(self) -> Iterator[Compressor]:
        """This compressor, then what it wraps, from the outside in."""
        yield self


def uncompressed(flat: torch.Tensor, group: Group, own: torch.Tensor | None = None) -> Exchange:
    """Replace `flat` by its sum over the group, sent as it is."""
    if own is not None:
        own.copy_(flat)
    yield from group.summed((flat,))


def uncompressed_rounds(bucket: Bucket) -> tuple[Round, ...]:
    """What `uncompressed` sends for the flat tensor of `bucket`."""
    return (Round("sum", (bucket.nbytes,)),)


@dataclass(frozen=True, kw_only=True)
class Uncompressed(Compressor):
    """Every value in its own precision."""

    lossless: ClassVar[bool] = True
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (*Compressor.dtypes, torch.complex64, torch.complex128)

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """The tensor itself."""
        return Payload((flat,))

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Nothing to do if it was summed in place."""
        if payload.tensors[0] is not out:
            out.copy_(payload.tensors[0])

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """One sum of the whole bucket."""
        return uncompressed_rounds(bucket)


Route = Literal["gather", "scatter"]


@dataclass(frozen=True, kw_only=True)
class Packed(Compressor):
    """A compressor whose payload is a run of bytes that only makes sense unpacked.

    gather: everyone gets every payload, (n-1) B bytes per rank; one round, and nothing is lost on the way.
    scatter: payloads travel in n shards, each rank adds up one shard, packs it again and sends it to all: about
    2 (n-1)/n B bytes, whatever n is; what is packed twice loses twice.
    """

    route: str = choice("auto", "gather", "scatter")
    """How payloads meet; auto takes what sends fewer bytes."""

    def pack(self, flat: torch.Tensor, state: BucketState) -> torch.Tensor:
        """`packed_bytes` bytes that stand for `flat`, which is left as it is."""
        raise NotImplementedError

    def unpack(self, packed: torch.Tensor, out: torch.Tensor, state: BucketState) -> None:
        """Write what `packed` stands for into `out`."""
        raise NotImplementedError

    def packed_bytes(self, bucket: Bucket) -> int:
        """How many bytes `pack` gives; a multiple of 4, so that numbers in them stay aligned in a row of payloads."""
        raise NotImplementedError

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """The packed bytes."""
        return Payload((self.pack(flat, state),))

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Unpack them."""
        self.unpack(payload.tensors[0], out, state)

    def adds_up(self) -> bool:
        """Never: they must be unpacked first."""
        return False

    def payload_bytes(self, bucket: Bucket, moment: Moment) -> int:
        """The packed bytes."""
        return self.packed_bytes(bucket)

    def chosen_route(self, bucket: Bucket, world_size: int) -> Route:
        """Gather or scatter for this bucket."""
        if self.route != "auto":
            return "scatter" if self.route == "scatter" else "gather"
        return "scatter" if 2 * self._row_bytes(bucket, world_size) < self.packed_bytes(bucket) else "gather"

    def _row_bytes(self, bucket: Bucket, world_size: int) -> int:
        return max(self.packed_bytes(shard.bucket) for shard in shards_of(bucket, world_size))

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
        packed = self.pack(flat, state)
        if own is not None:
            self.unpack(packed, own, state)
        work, rows = group.gather(packed)
        yield work
        flat.copy_(self._sum(rows, flat, state))

    def _sum(self, rows: torch.Tensor, like: torch.Tensor, state: BucketState) -> torch.Tensor:
        """What the payloads of all ranks add up to."""
        # In the order of ranks, so that every rank comes to the same bits.
        total, one = torch.empty_like(like), torch.empty_like(like)
        self.unpack(rows[0], total, state)
        for row in rows[1:]:
            self.unpack(row, one, state)
            total += one
        return total

    def _by_shards(self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None) -> Exchange:
        shards, states = self._shards(state, group.size)
        sizes = [self.packed_bytes(shard.bucket) for shard in shards]
        rows = torch.zeros((group.size, max(sizes)), dtype=torch.uint8, device=flat.device)
        for shard, part, size, row in zip(shards, states, sizes, rows, strict=True):
            row[:size] = self.pack(flat[shard.place], part)
            if own is not None:
                self.unpack(row[:size], own[shard.place], part)
        work, received = group.scatter(rows)
        yield work
        mine, size = shards[group.rank], sizes[group.rank]
        total = self._sum(received[:, :size], flat[mine.place], states[group.rank])
        row = torch.zeros(max(sizes), dtype=torch.uint8, device=flat.device)
        # Rounded with the same random numbers, what went up once would go up again, and nothing be right on average.
        states[group.rank].moment = replace(state.moment, rank=state.moment.rank + group.size)
        row[:size] = self.pack(total, states[group.rank])
        work, gathered = group.gather(row)
        yield work
        for shard, part, size, row in zip(shards, states, sizes, gathered, strict=True):
            self.unpack(row[:size], flat[shard.place], part)

    def _shards(self, state: BucketState, count: int) -> tuple[list[Shard], list[BucketState]]:
        shards = shards_of(state.bucket, count)
        states: list[BucketState] = state.tables.setdefault(
            ("shards", count), [self.init(shard.bucket) for shard in shards]
        )
        for part in states:
            part.moment = state.moment
        return shards, states


@dataclass(frozen=True, kw_only=True)
class Wrapper(Compressor):
    """Adds something to any compressor; written after a `+`."""

    needs_loss: ClassVar[bool] = False
    """Without effect on a compressor that loses nothing, so it is refused there."""
    wraps: ClassVar[type[Compressor]] = Compressor
    """What kind of compressor it can wrap."""
    inner: Compressor = field(kw_only=False)
    """What it wraps."""

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise StrategyError(
                f"compression.{self.name} wraps a Compressor object, got {found(self.inner)}. "
                f"Write e.g. {type(self).__name__}(Fp16())."
            )
        super().__post_init__()

    def check(self, tensors: Sequence[TensorSpec]) -> None:
        """As the inner compressor."""
        self.inner.check(tensors)

    def init(self, bucket: Bucket) -> BucketState:
        """The inner state; a wrapper adds its own fields."""
        return self.inner.init(bucket)

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """As the inner compressor."""
        return self.inner.encode(flat, state)

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """As the inner compressor."""
        self.inner.decode(payload, out, state)

    def alone(self) -> bool:
        """If the inner compressor's can."""
        return self.inner.alone()

    def sums_only(self) -> bool:
        """If the inner compressor's are."""
        return self.inner.sums_only()

    def adds_up(self) -> bool:
        """If the inner compressor's do."""
        return self.inner.adds_up()

    def back(self) -> Compressor:
        """Around what the inner compressor sends back, if that loses something."""
        inner = self.inner.back()
        return inner if inner.lossless and self.needs_loss else replace(self, inner=inner)

    def forgetful(self) -> Compressor:
        """The inner compressor's, in this wrapper unless it keeps the residual."""
        inner = self.inner.forgetful()
        return inner if self.keeps_residual else replace(self, inner=inner)

    def payload_bytes(self, bucket: Bucket, moment: Moment) -> int:
        """As the inner compressor."""
        return self.inner.payload_bytes(bucket, moment)

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """What the inner compressor sends."""
        return self.inner.rounds(bucket, moment)

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """As often as the inner compressor yields."""
        return self.inner.num_waits(bucket, moment)

    def exact(self) -> bool:
        """As exact as the inner compressor."""
        return self.inner.exact()

    def amplifies(self) -> bool:
        """As the inner compressor does."""
        return self.inner.amplifies()

    def layers(self) -> Iterator[Compressor]:
        """This wrapper, then what it wraps."""
        yield self
        yield from self.inner.layers()

    def __str__(self) -> str:
        return f"{self.inner} + {self.call_text()}"
