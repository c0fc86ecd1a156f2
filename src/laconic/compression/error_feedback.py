"""Remember what compression lost and add it to the next step's gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.contract import Wrapper
from laconic.compression.traits import Traits
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
    """Keep what compression lost and send it with the next step.

        p = g + e,   send C(p),   e = p - decode(C(p))

    Where ranks add up a part of all payloads each and send the sum compressed again, the one that does so keeps what
    this loses in the same way.

    A residual takes as much memory as the gradient; in bfloat16 half of that, and its own rounding is lost.

    An error that is not finite (an overflow) is forgotten: the receivers have seen the infinity itself.
    g is already divided by the number of workers, so residuals of several workers add up to the update still owed.

    Reference: Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019, arXiv:1901.09847.
    """

    name: ClassVar[str] = "error_feedback"
    needs_loss: ClassVar[bool] = True
    # Updates still owed: whoever owes them, they add up. What sums have lost is kept by the rank that sends them back,
    # which is another one when the number of ranks changes.
    on_resize: ClassVar[Mapping[str, Resize]] = {_RESIDUAL: "sum", _OWED: "reset"}
    scaled_fields: ClassVar[frozenset[str]] = frozenset({_RESIDUAL, _OWED})

    residual: str = choice("gradient", "float32", "bfloat16")
    """The dtype in which the residual is kept; gradient: that of the gradients."""

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Raise if gradients have that dtype anyway."""
        if self.residual != "gradient" and all(tensor.dtype == _DTYPES[self.residual] for tensor in tensors):
            raise AttachError(
                f"compression.{self.name}.residual={self.residual} has no effect: all parameters are {self.residual}. "
                "Leave it out."
            )
        super().check(tensors, optimizer)

    def traits_around(self, inner: Traits) -> Traits:
        """What is lost is sent later."""
        return replace(inner, keeps_residual=True, wants_error_feedback=False, unbiased=False)

    def init(self, bucket: Bucket) -> BucketState:
        """A residual of zero per element, beside the inner state."""
        state = self.inner.init(bucket)
        dtype = _DTYPES.get(self.residual, bucket.dtype)
        state.flat[_RESIDUAL] = torch.zeros(bucket.numel, dtype=dtype, device=bucket.device)
        if self.inner.traits.sends_sums_back:
            state.flat[_OWED] = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        return state

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """What the inner compressor sends for the corrected gradient; the new error is kept."""
        residual = state.flat[_RESIDUAL]
        due = _due(residual, flat)
        payload = self.inner.encode(due.to(flat.dtype, copy=True), state)
        sent = torch.empty_like(flat)
        self.inner.decode(payload, sent, state)
        _keep(residual, due, sent)
        _forget_infinities(residual)
        return payload

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Exchange the corrected gradient and keep the new error; if asked, measure it against what was to be sent."""
        residual = state.flat[_RESIDUAL]
        due = _due(residual, flat)
        flat.copy_(due)
        before = _norm(due) if state.measure else None
        sent = torch.empty_like(flat) if own is None else own
        state.owed = owed = state.flat.get(_OWED)
        yield from self.inner.exchange(flat, state, group, sent)
        state.owed = None
        _keep(residual, due, sent)
        if before is not None:
            after = _norm(residual)
            state.metrics["residual_norm"] = after
            state.metrics["relative_error"] = torch.where(before == 0, 0.0, after / before)
        _forget_infinities(residual)
        if owed is not None:
            _forget_infinities(owed)


def _due(residual: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """What is to be sent: the gradient and what is left from before; in the place of the latter, where that can be."""
    if residual.dtype == flat.dtype:
        residual += flat
        return residual
    return residual + flat


def _keep(residual: torch.Tensor, due: torch.Tensor, sent: torch.Tensor) -> None:
    """Remember what was due and has not been sent."""
    if due is residual:
        residual -= sent
    else:
        residual.copy_(due.sub_(sent))


def _forget_infinities(values: torch.Tensor) -> None:
    # They have been sent as they are, for everyone to see; remembering them would spoil all later steps.
    values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _norm(flat: torch.Tensor) -> torch.Tensor:
    # A sum of 16-bit squares would overflow.
    return torch.linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
