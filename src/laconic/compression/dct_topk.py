"""Send the largest coefficients of a cosine transform."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.sparsifier import Sparsifier
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.entries import (
    Entries,
    entries_of_chunks,
    largest_of_chunks,
    num_kept_of_chunks,
    rows_of_chunks,
)
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.settings import count, share


@dataclass(frozen=True, kw_only=True)
class DctTopK(Sparsifier):
    """Transform each chunk of a tensor by a cosine transform and send its k largest coefficients.

        c = D x,   D[i, j] = sqrt((1 or 2) / chunk) cos(pi (2 j + 1) i / (2 chunk)),   1 for i = 0, else 2
        k = ceil(density * chunk),   m = mask of the k largest |c|,   decoded = D^T (m * c)

    D is orthonormal, so only unsent coefficients are lost. The last chunk of a tensor may be shorter. A value that is
    not finite makes its whole chunk not finite.

    Reference: Peng et al. 2024 (DeMo), arXiv:2411.19870.
    """

    name: ClassVar[str] = "dct_topk"
    good_for: ClassVar[str] = "gradients whose adjacent entries change together"

    density: float = share(0.05)
    """Share of the coefficients of each chunk that is sent; at least one of each."""
    chunk: int = count(64, at_least=1, at_most=4096)
    """Adjacent entries that are transformed together."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Measured with default settings."""
        return replace(super().traits, loss_gap=0.141)

    def select(self, flat: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest coefficients of each chunk."""
        coefficients = self._transform(flat, state)
        chosen = largest_of_chunks(coefficients, state.bucket, self.chunk, self.density)
        return chosen, coefficients[chosen]

    def num_entries(self, numel: int) -> int:
        """The number of entries of all chunks."""
        return num_kept_of_chunks(self.density, numel, self.chunk)

    def entries(self, bucket: Bucket) -> Entries:
        """The same number of entries of each chunk, whose positions often take fewer bytes."""
        return entries_of_chunks(super().entries(bucket), self.chunk, self.density)

    def dense(self, values: torch.Tensor, state: BucketState) -> torch.Tensor:
        """Transform back."""
        return self._transform(values, state, inverse=True)

    def _transform(self, flat: torch.Tensor, state: BucketState, *, inverse: bool = False) -> torch.Tensor:
        """Every chunk by itself, tensor by tensor: the last bits of a product may depend on its number of rows."""
        result = torch.empty(flat.numel(), dtype=torch.promote_types(flat.dtype, torch.float32), device=flat.device)
        for rows, place in rows_of_chunks(state.bucket, self.chunk):
            # A copy: they may also depend on the alignment of the input.
            chunks = flat[place].to(result.dtype, copy=True).view(rows)
            result[place] = (chunks @ _dct(rows[1], state, chunks.dtype, inverse=inverse).T).view(-1)
        return result


def _dct(size: int, state: BucketState, dtype: torch.dtype, *, inverse: bool = False) -> torch.Tensor:
    """The transform as a matrix, made once."""
    key = ("dct", size, dtype, inverse)
    if key not in state.tables:
        # In float64, and rounded once, so that it is the same on every device.
        order = torch.arange(size, dtype=torch.float64)
        matrix = torch.cos(math.pi * torch.outer(order, 2 * order + 1) / (2 * size)) * math.sqrt(2 / size)
        matrix[0] /= math.sqrt(2)
        # A transposed copy: with a view the product takes three times as long on a CPU.
        matrix = matrix.T.contiguous() if inverse else matrix
        state.tables[key] = matrix.to(state.bucket.device, dtype)
    table: torch.Tensor = state.tables[key]
    return table
