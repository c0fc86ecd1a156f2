"""Find the largest entries of the sum from a sum of small sketches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch

from laconic.compression.families.common_places import Agreement, CommonPlaces
from laconic.compression.kernels import count_sketch
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.seeds import base_seed, mix, moment_seed
from laconic.core.exchange import Group, Round
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.settings import count, share


@dataclass(frozen=True, kw_only=True)
class Sketch(CommonPlaces):
    """Add up count sketches, read the k largest entries of the sum from them, and send these exactly.

        S_i[j, h_j(p)] += s_j(p) g_i[p]   for every row j and place p,   S = sum_i S_i
        estimate[p] = median over j of s_j(p) S[j, h_j(p)],   I = places of the k largest |estimate|
        decoded = sum_i g_i at I

    A sketch is linear: the sketch of a sum is the sum of sketches. So the positions are those of the largest entries of
    the mean, which no rank could find from its own gradient. h_j and s_j are random cells and signs that depend on
    step, parameter and row, the same on every rank. A tensor with no more values than its sketch is summed directly
    instead. An estimate that is not finite counts as largest.

    Reference: Ivkin et al. 2019 (Sketched-SGD), arXiv:1903.04488.
    """

    name: ClassVar[str] = "sketch"
    good_for: ClassVar[str] = "entries that are large only in the sum over all workers"

    width: float = share(0.03)
    """Cells of one row of a sketch, as a share of the tensor's values."""
    rows: int = count(3, at_least=1, at_most=15)
    """Rows of a sketch: more rows make the median more reliable."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """`loss_gap` was measured with default settings."""
        return replace(super().traits, loss_gap=0.239, loss_deviation=0.046)

    def agree(self, flat: torch.Tensor, state: BucketState, group: Group) -> Agreement:
        """The largest estimates of each tensor."""
        plan = self._plan(state.bucket)
        wide = flat.to(torch.float32)
        seed = moment_seed(state.moment, shared=True)
        # All in one copy and before the sum: on a GPU the host waits for such a copy.
        seeds = torch.tensor([part.seeds(seed) for part in plan], device=flat.device)
        cells = torch.cat([part.sketched(wide[part.place], own) for part, own in zip(plan, seeds, strict=True)])
        yield group.sum((cells,))
        sketches = cells.split([part.num_cells for part in plan])
        both = zip(sketches, seeds, strict=True)
        estimates = torch.cat([part.estimated(*own) for part, own in zip(plan, both, strict=True)])
        return self.entries(state.bucket).largest(estimates)

    def agreement_rounds(self, bucket: Bucket) -> tuple[Round, ...]:
        """The cells of all sketches."""
        return (Round("sum", (4 * sum(part.num_cells for part in self._plan(bucket)),)),)

    def _plan(self, bucket: Bucket) -> list[_Part]:
        return [_Part(tensor, place, self.rows, self.width) for tensor, place in bucket.segments()]


@dataclass(frozen=True)
class _Part:
    """The sketch of one tensor."""

    tensor: TensorSpec
    place: slice
    rows: int
    width: float

    @cached_property
    def columns(self) -> int:
        """Cells of a row."""
        return max(1, round(self.width * self.tensor.numel))

    @cached_property
    def is_plain(self) -> bool:
        """Whether a sketch would save nothing."""
        return self.rows * self.columns >= self.tensor.numel

    @property
    def num_cells(self) -> int:
        """The cells of all rows."""
        return self.tensor.numel if self.is_plain else self.rows * self.columns

    def seeds(self, seed: int) -> list[int]:
        """The seed of each row."""
        return [mix(base_seed(self.tensor.name, row) ^ seed) for row in range(self.rows)]

    def sketched(self, values: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        """The cells of the tensor's values."""
        return values if self.is_plain else count_sketch.sketched(values, seeds, self.columns)

    def estimated(self, cells: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        """An estimate of every value."""
        return cells if self.is_plain else count_sketch.estimated(cells, seeds, self.tensor.numel)
