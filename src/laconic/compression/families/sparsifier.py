"""What sparsifiers share: a few entries of each tensor are sent, where they are and what they are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from laconic.compression.contract import Packed
from laconic.compression.traits import Traits
from laconic.compression.wire.entries import Entries, num_kept
from laconic.compression.wire.indices import CODINGS
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.errors import MethodError
from laconic.settings import Setting, choice, share


@dataclass(frozen=True, kw_only=True)
class Sparsifier(Packed):
    """A compressor that sends k entries of each tensor; the others arrive as zero.

    A method writes `select`, and `num_entries` or `dense` where the defaults do not fit. A wrapper that codes the
    values in another way uses `selected`, `pack_indices`, `unpack_indices`, `place` and the sizes.
    """

    density: float = share(0.01)
    """Share of the entries of each tensor that is sent; at least one of each."""
    route: str = choice("gather", "scatter")
    """How payloads meet. scatter adds up shards and selects again from the sums: fewer bytes, more loss."""
    indices: str = choice("auto", *CODINGS)
    """How the places of the entries are coded; auto takes what needs the fewest bytes."""

    @property
    def traits(self) -> Traits:
        """Entries that are not sent are lost."""
        return replace(super().traits, wants_error_feedback=True)

    @classmethod
    def declared(cls) -> dict[str, Setting]:
        """The density first, so that topk(0.01) means what it says."""
        declared = super().declared()
        return {"density": declared.pop("density"), **declared}

    def select(self, flat: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        """What to send of `flat`: ascending places in the bucket, and their values."""
        raise NotImplementedError

    def selected(self, flat: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        """What `select` gives, if there are as many entries as all other ranks expect."""
        indices, values = self.select(flat, state)
        due = self.num_values(state.bucket)
        if not indices.numel() == values.numel() == due:
            raise MethodError(
                f"compression.{self.name}: select must give {due} entries of {flat.numel()}, as num_entries says, and "
                f"gave {indices.numel()} places and {values.numel()} values."
            )
        return indices, values

    def num_entries(self, numel: int) -> int:
        """How many entries of a tensor are sent."""
        return num_kept(self.density, numel)

    def dense(self, values: torch.Tensor, state: BucketState) -> torch.Tensor:
        """What selected values, each in its place and zeros elsewhere, stand for."""
        return values

    def entries(self, bucket: Bucket) -> Entries:
        """How many entries of each tensor are sent, and how they are packed."""
        return Entries(bucket, tuple(self.num_entries(tensor.numel) for tensor in bucket.tensors), self.indices)

    def num_values(self, bucket: Bucket) -> int:
        """How many values `select` gives."""
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
        """How many bytes `pack_indices` gives; a multiple of 4."""
        return self.entries(bucket).indices_bytes

    def pack_indices(self, indices: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """The places that `select` gives, as bytes."""
        return self.entries(bucket).encode(indices)

    def unpack_indices(self, packed: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """The places again, from exactly `indices_bytes` bytes."""
        return self.entries(bucket).decode(packed)

    def place(self, indices: torch.Tensor, values: torch.Tensor, out: torch.Tensor, state: BucketState) -> None:
        """Write what values at these places stand for into `out`."""
        scattered = torch.zeros(out.numel(), dtype=torch.promote_types(out.dtype, torch.float32), device=out.device)
        scattered[indices] = values.to(scattered.dtype)
        out.copy_(self.dense(scattered, state))

    def pack(self, flat: torch.Tensor, state: BucketState) -> torch.Tensor:
        """Coded places, then values."""
        return self.entries(state.bucket).pack(*self.selected(flat, state))

    def unpack(self, packed: torch.Tensor, out: torch.Tensor, state: BucketState) -> None:
        """Zeros, and the values in their places."""
        self.place(*self.entries(state.bucket).unpack(packed), out, state)

    def packed_bytes(self, bucket: Bucket) -> int:
        """Those of the places, and four for each value."""
        return self.entries(bucket).packed_bytes

    def _sum(self, rows: torch.Tensor, like: torch.Tensor, state: BucketState) -> torch.Tensor:
        """Entry by entry: what is zero costs nothing."""
        return self.dense(self.entries(state.bucket).sum(rows, like.dtype), state)
