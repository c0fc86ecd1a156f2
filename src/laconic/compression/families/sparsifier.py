"""The base of sparsifiers: a few entries of each tensor are sent, with their positions and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.packed import Packed
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.entries import Entries, num_kept
from laconic.compression.wire.indices import CODINGS
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.errors import MethodError
from laconic.settings import choice, share


@dataclass(frozen=True, kw_only=True)
class Sparsifier(Packed):
    """A compressor that sends k entries of each tensor; the others arrive as zero.

    A method implements `select`, and `num_entries` or `dense` where the defaults do not fit. A wrapper that codes the
    values in another way uses `selected`, `pack_indices`, `unpack_indices`, `place` and the sizes.
    """

    family: ClassVar[str] = "sparsification"
    first_setting: ClassVar[str] = "density"

    density: float = share(0.01)
    """Share of the entries of each tensor that is sent; at least one of each."""
    route: str = choice("gather", "scatter")
    """How payloads are combined. scatter adds up shards and selects again from the sums: fewer bytes, more loss."""
    indices: str = choice("auto", *CODINGS)
    """How the indices of the entries are coded; auto takes the coding with the fewest bytes."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Entries that are not sent are lost."""
        return replace(super().traits, wants_error_feedback=True, density=self.density)

    def select(self, flat: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries of `flat` to send: ascending positions among `entries`, and their values."""
        raise NotImplementedError

    def selected(self, flat: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        """The result of `select`, if it has the number of entries that all other ranks expect."""
        indices, values = self.select(flat, state)
        due = self.num_values(state.bucket)
        if not indices.numel() == values.numel() == due:
            raise MethodError(
                f"compression.{self.name}: select must return {due} entries of {flat.numel()}, as num_entries says, "
                f"but returned {indices.numel()} positions and {values.numel()} values."
            )
        return indices, values

    def num_entries(self, numel: int) -> int:
        """The number of entries of a tensor that are sent."""
        return num_kept(self.density, numel)

    def dense(self, values: torch.Tensor, state: BucketState) -> torch.Tensor:
        """The gradient for selected values at their positions and zeros elsewhere."""
        return values

    def entries(self, bucket: Bucket) -> Entries:
        """The number of entries of each tensor that are sent, and their packing.

        Positions refer to the bucket; where they do not, `dense` maps them to it.
        """
        return Entries(bucket, tuple(self.num_entries(tensor.numel) for tensor in bucket.tensors), self.indices)

    def num_values(self, bucket: Bucket) -> int:
        """The number of values that `select` returns."""
        return self.entries(bucket).num_values

    def values_bucket(self, bucket: Bucket) -> Bucket:
        """The selected values as a bucket of their own: k float32 values of each tensor, in order."""
        return Bucket(
            tuple(
                TensorSpec(tensor.name, (self.num_entries(tensor.numel),), torch.float32, tensor.device)
                for tensor in bucket.tensors
            )
        )

    def indices_bytes(self, bucket: Bucket) -> int:
        """The number of bytes that `pack_indices` returns; a multiple of 4."""
        return self.entries(bucket).indices_bytes

    def pack_indices(self, indices: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """The positions from `select`, as bytes."""
        return self.entries(bucket).encode(indices)

    def unpack_indices(self, packed: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """Decode the positions from exactly `indices_bytes` bytes."""
        return self.entries(bucket).decode(packed)

    def place(self, indices: torch.Tensor, values: torch.Tensor, out: torch.Tensor, state: BucketState) -> None:
        """Write the gradient for values at these positions into `out`."""
        num_places = self.entries(state.bucket).numel
        scattered = torch.zeros(num_places, dtype=torch.promote_types(out.dtype, torch.float32), device=out.device)
        scattered[indices] = values.to(scattered.dtype)
        out.copy_(self.dense(scattered, state))

    def pack(self, flat: torch.Tensor, state: BucketState) -> torch.Tensor:
        """Coded positions, then values."""
        return self.entries(state.bucket).pack(*self.selected(flat, state))

    def unpack(self, packed: torch.Tensor, out: torch.Tensor, state: BucketState) -> None:
        """Zeros, and the values at their positions."""
        self.place(*self.entries(state.bucket).unpack(packed), out, state)

    def packed_bytes(self, bucket: Bucket) -> int:
        """Bytes of the positions, and four for each value."""
        return self.entries(bucket).packed_bytes

    def _sum(self, rows: torch.Tensor, like: torch.Tensor, state: BucketState) -> torch.Tensor:
        """Add entry by entry; zeros cost nothing."""
        return self.dense(self.entries(state.bucket).sum(rows, like.dtype), state)
