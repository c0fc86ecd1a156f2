"""Keep the values that compression lost and add them to the next step's gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.contract import Wrapper
from laconic.compression.traits import Traits
from laconic.core.eight_bits import EightBits
from laconic.core.exchange import Exchange, Group
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError
from laconic.settings import choice

_RESIDUAL = "error_feedback.residual"
_OWED = "error_feedback.owed"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Wrapper):
    """Keep the values that compression lost and add them to the next gradient.

        p = g + e,   send C(p),   e = p - decode(C(p))

    Where each rank adds up a shard of all payloads and sends the sum compressed again, it keeps the loss of this second
    compression in the same way, in the dtype of the gradients.

    A residual takes as much memory as the gradient; in bfloat16 half of that, in int8 a quarter, and the rounding of
    the residual itself is lost. int8 rounds to multiples of a power of two, one for each block of 256 values, so the
    error of a value is at most 1/127 of the largest in its block.

    An error that is not finite (an overflow) is dropped: the receivers have got the infinity itself.
    g is already divided by the number of workers, so residuals of several workers add up to the update still to be
    sent.

    Reference: Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019, arXiv:1901.09847.
    """

    name: ClassVar[str] = "error_feedback"
    good_for: ClassVar[str] = "every biased method, with SGD"
    needs_loss: ClassVar[bool] = True
    needs_scale: ClassVar[bool] = True
    # Residuals of any workers can be added up. The loss of sums is kept by the rank that sends them back, which is
    # another one when the number of ranks changes.
    on_resize: ClassVar[Mapping[str, Resize]] = {_RESIDUAL: "sum", _OWED: "reset"}
    scaled_fields: ClassVar[frozenset[str]] = frozenset({_RESIDUAL, _OWED})
    owed_fields: ClassVar[frozenset[str]] = frozenset({_RESIDUAL, _OWED})

    residual: str = choice("gradient", "float32", "bfloat16", "int8")
    """The dtype of the residual; gradient: that of the gradients; int8: with a unit for each block of 256 values."""

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Raise if gradients already have the dtype of the residual."""
        if self.residual in _DTYPES and all(tensor.dtype == _DTYPES[self.residual] for tensor in tensors):
            raise AttachError(
                f"compression.{self.name}.residual={self.residual} has no effect: all parameters are {self.residual}. "
                "Leave it out."
            )
        super().check(tensors, optimizer)

    def traits_around(self, inner: Traits) -> Traits:
        """Lost values are sent later."""
        return replace(inner, keeps_residual=True, wants_error_feedback=False, unbiased=False)

    def init(self, bucket: Bucket) -> BucketState:
        """A residual of zero per element, and the inner state."""
        state = self.inner.init(bucket)
        if self.residual == "int8":
            state.packed[_RESIDUAL] = EightBits(bucket)
        else:
            dtype = _DTYPES.get(self.residual, bucket.dtype)
            state.flat[_RESIDUAL] = torch.zeros(bucket.numel, dtype=dtype, device=bucket.device)
        if self.inner.traits.sends_sums_back:
            state.flat[_OWED] = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        return state

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """The inner compressor's payload for the corrected gradient; the new error is kept."""
        if _RESIDUAL not in state.packed:
            return self.inner.encode_keeping(flat, state.flat[_RESIDUAL], state)
        residual = state.packed[_RESIDUAL].read()
        payload = self.inner.encode_keeping(flat, residual, state)
        state.packed[_RESIDUAL].write(residual)
        return payload

    def encode_rows(self, rows: torch.Tensor, states: Sequence[BucketState]) -> Payload:
        """The inner compressor's payloads for the corrected rows."""
        if any(_RESIDUAL in state.packed for state in states):
            return super().encode_rows(rows, states)
        return self.inner.encode_rows_keeping(rows, [state.flat[_RESIDUAL] for state in states], states)

    def decode_rows(self, payloads: Payload, outs: torch.Tensor, state: BucketState) -> None:
        """As the inner compressor."""
        self.inner.decode_rows(payloads, outs, state)

    def sum_decoded_rows(self, payloads: Payload, out: torch.Tensor, state: BucketState) -> None:
        """As the inner compressor."""
        self.inner.sum_decoded_rows(payloads, out, state)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Exchange the corrected gradient and keep the new error; on request, measure it relative to the input."""
        due = _due(state, flat)
        flat.copy_(due)
        before = _norm(due) if state.measure else None
        sent = torch.empty_like(flat) if own is None else own
        state.owed = owed = state.flat.get(_OWED)
        yield from self.inner.exchange(flat, state, group, sent)
        state.owed = None
        error = due.sub_(sent)
        if before is not None:
            after = _norm(error)
            state.metrics["residual_norm"] = after
            state.metrics["relative_error"] = torch.where(before == 0, 0.0, after / before)
        _keep(state, error)
        if owed is not None:
            _forget_infinities(owed)


def _due(state: BucketState, flat: torch.Tensor) -> torch.Tensor:
    """The sum of gradient and residual; in the memory of the residual, where possible."""
    if _RESIDUAL in state.packed:
        return state.packed[_RESIDUAL].read().add_(flat)
    residual = state.flat[_RESIDUAL]
    if residual.dtype == flat.dtype:
        residual += flat
        return residual
    return residual + flat


def _keep(state: BucketState, error: torch.Tensor) -> None:
    """Keep the difference between the input and the values sent."""
    if _RESIDUAL in state.packed:
        _forget_infinities(error)
        state.packed[_RESIDUAL].write(error)
        return
    residual = state.flat[_RESIDUAL]
    if error is not residual:
        residual.copy_(error)
    _forget_infinities(residual)


def _forget_infinities(values: torch.Tensor) -> None:
    # They have been sent, so all ranks have them; keeping them would spoil all later steps.
    values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _norm(flat: torch.Tensor) -> torch.Tensor:
    # A sum of 16-bit squares would overflow.
    return torch.linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
