"""A bucket cut into blocks whose lengths are powers of two, each rotated by a randomized Hadamard transform.

    forward(x) = H D x,   backward(y) = D H y,   H[i, j] = (-1)^(number of ones in i & j) / sqrt(size),   D random signs

Every parameter is cut into blocks of the given length and, at its end, into ever shorter ones, so that nothing has to
be padded and nothing depends on how parameters were grouped into buckets. The transform uses only sums and differences,
so its bits do not depend on the number of blocks.

Reference: Ailon & Chazelle 2009 (fast Johnson-Lindenstrauss transform).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from laconic.compression.wire.seeds import base_seed, mix_tensor, uniform
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState


@dataclass(frozen=True)
class Rotation:
    """The blocks of one bucket, in order."""

    bucket: Bucket
    longest: int
    """The length of the longest blocks; it is rounded down to a power of two."""

    @cached_property
    def _runs(self) -> list[tuple[int, int]]:
        """Adjacent blocks of one length: their number and length."""
        runs: list[tuple[int, int]] = []
        for tensor in self.bucket.tensors:
            rest, length = tensor.numel, 1 << (self.longest.bit_length() - 1)
            while rest:
                if rest >= length:
                    runs.append((rest // length, length))
                    rest %= length
                length //= 2
        return runs

    @cached_property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return sum(number for number, _ in self._runs)

    @cached_property
    def sizes(self) -> torch.Tensor:
        """The length of each block."""
        sizes = [length for number, length in self._runs for _ in range(number)]
        return torch.tensor(sizes, dtype=torch.int64, device=self.bucket.device)

    @cached_property
    def _numbers(self) -> torch.Tensor:
        """The base seed of each element: from its parameter and its position there."""
        device = self.bucket.device
        parts = [
            torch.arange(tensor.numel, device=device) + base_seed(tensor.name, 0) for tensor in self.bucket.tensors
        ]
        return mix_tensor(torch.cat(parts))

    def each(self, values: torch.Tensor) -> torch.Tensor:
        """Expand a value per block to one per element."""
        return values.repeat_interleave(self.sizes, output_size=self.bucket.numel)

    def random(self, seed: int) -> torch.Tensor:
        """A number in [0, 1) for every element."""
        return uniform(mix_tensor(self._numbers ^ seed))

    def squares(self, flat: torch.Tensor) -> torch.Tensor:
        """The sum of squares of each block, in float64."""
        parts = [rows.double().square().sum(1) for rows in self._rows(flat)]
        return torch.cat(parts) if parts else flat.new_empty(0, dtype=torch.float64)

    def forward(self, flat: torch.Tensor, seed: int) -> torch.Tensor:
        """Every block rotated."""
        return self._transformed(flat * self._signs(seed))

    def backward(self, flat: torch.Tensor, seed: int) -> torch.Tensor:
        """Every block rotated back."""
        return self._transformed(flat) * self._signs(seed)

    def _signs(self, seed: int) -> torch.Tensor:
        return (1 - 2 * (mix_tensor(self._numbers ^ seed) & 1)).float()

    def _rows(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.split([number * length for number, length in self._runs]) if self._runs else ()
        return [part.view(number, length) for part, (number, length) in zip(parts, self._runs, strict=True)]

    def _transformed(self, flat: torch.Tensor) -> torch.Tensor:
        parts = [_hadamard(rows).view(-1) for rows in self._rows(flat)]
        return torch.cat(parts) if parts else flat


def rotation_of(state: BucketState, longest: int) -> Rotation:
    """The blocks of a state's bucket, computed once."""
    key = ("rotation", longest)
    if key not in state.tables:
        state.tables[key] = Rotation(state.bucket, longest)
    found: Rotation = state.tables[key]
    return found


def _hadamard(rows: torch.Tensor) -> torch.Tensor:
    """The orthonormal Hadamard transform of every row."""
    length = rows.shape[1]
    half = 1
    while half < length:
        pairs = rows.view(-1, 2, half)
        rows = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1)
        half *= 2
    return rows.reshape(-1, length) * length**-0.5
