"""The contract of a compressor.

A method whose payloads can be added up implements `encode`, `decode` and `rounds`; one whose payload is packed bytes
extends `Packed` and implements `pack`, `unpack` and `packed_bytes`; one with several rounds implements `exchange` and
`rounds`. `rounds` predicts the bytes of an exchange without running it; the transport must count the same number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from laconic.compression.traits import REAL_DTYPES, Traits, computed_once
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize
from laconic.core.tensor import TensorSpec
from laconic.errors import StrategyError
from laconic.settings import Method, found


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

    def is_lossless_for(self, dtype: torch.dtype) -> bool:
        """Whether the payload of a tensor of this dtype is the tensor itself."""
        return self.traits.lossless

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

    def sum_decoded_rows(self, payloads: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Fill `out` with the sum of the stacked payloads, added up one after the other."""
        self.decode(payloads.row(0), out, state)
        for number in range(1, len(payloads.tensors[0])):
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


@dataclass(frozen=True, kw_only=True)
class Wrapper(Compressor):
    """Extends any compressor; written after a `+`."""

    family: ClassVar[str] = "wrapper"
    needs_loss: ClassVar[bool] = False
    """The wrapper has no effect on a lossless compressor, so it is refused there."""
    needs_unbiased: ClassVar[bool] = False
    """The wrapper works only around an unbiased compressor, so it is refused elsewhere."""
    needs_scale: ClassVar[bool] = False
    """The wrapper adds decoded values to an estimate that it keeps, or subtracts them from values that are due.
    Directions without magnitudes never bring these nearer to each other, so a compressor that sends only directions is
    refused inside it."""
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
        # These are stated for a method by itself.
        return replace(self.traits_around(self.inner.traits), loss_gap=None, loss_deviation=None, linear=False)

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
