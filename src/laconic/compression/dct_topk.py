"""Send the largest coefficients of a cosine transform."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.sparsifier import Sparsifier
from laconic.compression.kernels.topk import topk_of_rows
from laconic.compression.traits import Traits
from laconic.compression.wire.entries import Entries, EntriesOfChunks, num_kept
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.settings import count, share


@dataclass(frozen=True, kw_only=True)
class DctTopK(Sparsifier):
    """Transform each chunk of a tensor by a cosine transform and send its k largest coefficients.

        c = D x,   D[i, j] = sqrt((1 or 2) / chunk) cos(pi (2 j + 1) i / (2 chunk)),   1 for i = 0, else 2
        k = ceil(density * chunk),   m = mask of the k largest |c|,   decoded = D^T (m * c)

    D is orthonormal, so what is lost is what is not sent. The last chunk of a tensor is as short as what is left. One
    value that is not finite makes its whole chunk so.

    Reference: Peng et al. 2024 (DeMo), arXiv:2411.19870.
    """

    name: ClassVar[str] = "dct_topk"

    density: float = share(0.05)
    """Share of the coefficients of each chunk that is sent; at least one of each."""
    chunk: int = count(64, at_least=1, at_most=4096)
    """Neighbouring entries that are transformed together."""

    @property
    def traits(self) -> Traits:
        """Measured with default settings."""
        return replace(super().traits, loss_gap=0.141)

    def select(self, flat: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest coefficients of each chunk."""
        coefficients = self._transform(flat, state)
        indices = [torch.empty(0, dtype=torch.int64, device=flat.device)]
        for rows, place in _joined(self._rows(state.bucket)):
            chosen = topk_of_rows(coefficients[place].view(rows), num_kept(self.density, rows[1]))
            begins = torch.arange(place.start, place.stop, rows[1], device=flat.device)
            indices.append((chosen + begins.unsqueeze(1)).view(-1))
        chosen = torch.cat(indices)
        return chosen, coefficients[chosen]

    def num_entries(self, numel: int) -> int:
        """Those of each chunk."""
        return numel // self.chunk * num_kept(self.density, self.chunk) + num_kept(self.density, numel % self.chunk)

    def entries(self, bucket: Bucket) -> Entries:
        """As many of each chunk, which often takes fewer bytes to say."""
        plain = super().entries(bucket)
        chunks = tuple((*rows, num_kept(self.density, rows[1])) for rows, _ in _joined(self._rows(bucket)))
        chunked = EntriesOfChunks(bucket, plain.counts, plain.coding, chunks)
        return chunked if self.indices == "auto" and chunked.indices_bytes < plain.indices_bytes else plain

    def dense(self, values: torch.Tensor, state: BucketState) -> torch.Tensor:
        """Transform back."""
        return self._transform(values, state, inverse=True)

    def _transform(self, flat: torch.Tensor, state: BucketState, *, inverse: bool = False) -> torch.Tensor:
        """Every chunk by itself, tensor by tensor: a product's last bits may depend on how many rows it has."""
        result = torch.empty(flat.numel(), dtype=torch.promote_types(flat.dtype, torch.float32), device=flat.device)
        for rows, place in self._rows(state.bucket):
            # A copy: they may also depend on where its input lies in memory.
            chunks = flat[place].to(result.dtype, copy=True).view(rows)
            result[place] = (chunks @ _dct(rows[1], state, chunks.dtype, inverse=inverse).T).view(-1)
        return result

    def _rows(self, bucket: Bucket) -> list[tuple[tuple[int, int], slice]]:
        """The chunks of each tensor as rows of a matrix, and the rest as a matrix of one row; none that is empty."""
        found: list[tuple[tuple[int, int], slice]] = []
        for tensor, place in bucket.segments():
            whole, rest = divmod(tensor.numel, self.chunk)
            split = place.stop - rest
            if whole:
                found.append(((whole, self.chunk), slice(place.start, split)))
            if rest:
                found.append(((1, rest), slice(split, place.stop)))
        return found


def _joined(parts: list[tuple[tuple[int, int], slice]]) -> list[tuple[tuple[int, int], slice]]:
    """The same chunks in as few matrices as possible: those that follow each other and are as long are one."""
    found: list[tuple[tuple[int, int], slice]] = []
    for rows, place in parts:
        if found and found[-1][0][1] == rows[1]:
            (before, length), start = found[-1][0], found[-1][1].start
            found[-1] = ((before + rows[0], length), slice(start, place.stop))
        else:
            found.append((rows, place))
    return found


def _dct(size: int, state: BucketState, dtype: torch.dtype, *, inverse: bool = False) -> torch.Tensor:
    """The transform as a matrix, made once."""
    key = ("dct", size, dtype, inverse)
    if key not in state.tables:
        # In float64, and rounded once, so that it is the same on every device.
        order = torch.arange(size, dtype=torch.float64)
        matrix = torch.cos(math.pi * torch.outer(order, 2 * order + 1) / (2 * size)) * math.sqrt(2 / size)
        matrix[0] /= math.sqrt(2)
        # A transposed copy, not a view: with that the product takes three times as long on a CPU.
        matrix = matrix.T.contiguous() if inverse else matrix
        state.tables[key] = matrix.to(state.bucket.device, dtype)
    table: torch.Tensor = state.tables[key]
    return table
