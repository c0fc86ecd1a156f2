"""Deep gradient compression: very few entries, with momentum correction, clipping and a warm-up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.contract import Compressor, Uncompressed
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.entries import Entries, num_kept
from laconic.compression.wire.indices import CODINGS
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize
from laconic.core.tensor import TensorSpec
from laconic.settings import choice, count, number, share

_VELOCITY = "dgc.velocity"
_UNSENT = "dgc.unsent"
_STAGES = 4
"""Densities of the warm-up: 25%, 6.25%, 1.5625%, 0.390625%, each for a quarter of its steps."""


@dataclass(frozen=True, kw_only=True)
class Dgc(Compressor):
    """Accumulate velocities on each worker and send the k largest entries of each tensor.

        g = g * min(1, clip_norm / (sqrt(n) |g|)),   u = m u + g,   v = v + u
        M = mask of the k largest |v|,   send M v,   u = (1 - M) u,   v = (1 - M) v

    Unsent entries stay in v, so no error_feedback is needed; v already includes momentum, so the optimizer must be SGD
    without momentum. During warm-up more is sent. The norm is that of each parameter by itself, because a bucket is
    sent before all gradients of the model are known. Values that are not finite are sent, and not kept in the state.

    Reference: Lin et al. 2018, arXiv:1712.01887.
    """

    name: ClassVar[str] = "dgc"
    family: ClassVar[str] = "sparsification"
    good_for: ClassVar[str] = "0.1% of the entries with SGD and momentum"
    # Gradients are scaled by 1/n, so both add up to those of the mean gradient, whichever worker holds them.
    on_resize: ClassVar[Mapping[str, Resize]] = {_VELOCITY: "sum", _UNSENT: "sum"}
    scaled_fields: ClassVar[frozenset[str]] = frozenset({_VELOCITY, _UNSENT})

    density: float = share(0.001)
    """Share of the entries of each tensor that is sent after warm-up; at least one of each."""
    momentum: float = number(0.9, at_least=0.0, at_most=0.999)
    """The share of the last step's velocity that is kept; 0 leaves momentum to the optimizer."""
    clip_norm: float = number(0.0, at_least=0.0)
    """Largest norm of a parameter's mean gradient, of which each of n workers may use 1 / sqrt(n); 0: no clipping."""
    warmup_steps: int = count(0)
    """Steps in which more is sent: 25% of the entries at first, a quarter as many after each quarter of these steps."""
    indices: str = choice("auto", *CODINGS)
    """How the indices of the entries are coded; auto takes the coding with the fewest bytes."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Unsent entries stay in the sum; clip_norm is an absolute magnitude."""
        return replace(
            super().traits,
            density=self.density,
            keeps_residual=True,
            accumulates=True,
            scale_equivariant=not self.clip_norm,
            payloads_add_up=False,
            loss_gap=0.121,
            loss_deviation=0.013,
        )

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Raise if the optimizer has momentum as well."""
        if self.momentum:
            optimizer.check_no_momentum("compression.dgc", 'give dgc none: "dgc(momentum=0)"')

    def init(self, bucket: Bucket) -> BucketState:
        """No velocity, nothing unsent."""
        state = BucketState(bucket)
        for name in (_VELOCITY, _UNSENT):
            state.flat[name] = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        return state

    def density_at(self, step: int) -> float:
        """The share that is sent in this step."""
        if step >= self.warmup_steps:
            return self.density
        return max(self.density, 0.25 ** (1 + step * _STAGES // self.warmup_steps))

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """One gather, of less and less during warm-up."""
        return (Round("gather", (self._entries(bucket, moment).packed_bytes,)),)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Send the largest accumulated entries and remove them from the state."""
        payload = self.encode(flat, state)
        if own is not None:
            self.decode(payload, own, state)
        work, rows = group.gather(payload.tensors[0])
        yield work
        flat.copy_(self._entries(state.bucket, state.moment).sum(rows, flat.dtype))

    def back(self) -> Compressor:
        """Unchanged: momentum is already in the values that were sent."""
        return Uncompressed()

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """The largest accumulated entries, which are then removed from the state."""
        velocity, unsent = state.flat[_VELOCITY], state.flat[_UNSENT]
        entries = self._entries(state.bucket, state.moment)
        if self.clip_norm:
            flat = self._clipped(flat, state.bucket, state.moment.world_size)
        velocity.mul_(self.momentum).add_(flat)
        unsent.add_(velocity)
        indices = entries.largest(unsent)
        packed = entries.pack(indices, unsent[indices])
        for kept in (velocity, unsent):
            kept[indices] = 0
            kept.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return Payload((packed,))

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Zeros, and the values at their positions."""
        indices, values = self._entries(state.bucket, state.moment).unpack(payload.tensors[0])
        out.zero_()
        out[indices] = values.to(out.dtype)

    def _entries(self, bucket: Bucket, moment: Moment) -> Entries:
        density = self.density_at(moment.step)
        return Entries(bucket, tuple(num_kept(density, tensor.numel) for tensor in bucket.tensors), self.indices)

    def _clipped(self, flat: torch.Tensor, bucket: Bucket, world_size: int) -> torch.Tensor:
        flat = flat.clone()
        largest = self.clip_norm / math.sqrt(world_size)
        for _, place in bucket.segments():
            # In float32 at least: a sum of 16-bit squares would overflow.
            norm = torch.linalg.vector_norm(flat[place], dtype=torch.promote_types(flat.dtype, torch.float32))
            factor = torch.where((norm > largest) & norm.isfinite(), largest / norm, 1.0)
            flat[place] *= factor.to(flat.dtype)
        return flat
