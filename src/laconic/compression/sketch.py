"""Find the largest entries of the sum from a sum of small sketches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch

from laconic.compression.families.common_places import Agreement, CommonPlaces
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.seeds import base_seed, mix, mix_tensor, moment_seed
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
        return replace(super().traits, loss_gap=0.252, loss_deviation=0.018)

    def agree(self, flat: torch.Tensor, state: BucketState, group: Group) -> Agreement:
        """The largest estimates of each tensor."""
        plan = self._plan(state.bucket)
        wide = flat.to(torch.float32)
        seed = moment_seed(state.moment, shared=True)
        tables = [part.hashed(seed) for part in plan]
        cells = torch.cat([part.sketched(wide, table) for part, table in zip(plan, tables, strict=True)])
        yield group.sum((cells,))
        begins = cells.split([part.num_cells for part in plan])
        estimates = torch.cat(
            [part.estimated(own, table) for part, own, table in zip(plan, begins, tables, strict=True)]
        )
        return self.entries(state.bucket).largest(estimates)

    def agreement_rounds(self, bucket: Bucket) -> tuple[Round, ...]:
        """The cells of all sketches."""
        return (Round("sum", (4 * sum(part.num_cells for part in self._plan(bucket)),)),)

    def _plan(self, bucket: Bucket) -> list[_Part]:
        return [_Part(tensor, place, self.rows, self.width) for tensor, place in bucket.segments()]


_Table = tuple[torch.Tensor, torch.Tensor] | None
"""For each row and value, its cell and its sign; None where values are summed directly."""


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

    def hashed(self, seed: int) -> _Table:
        if self.is_plain:
            return None
        device = self.tensor.device
        seeds = torch.tensor([mix(base_seed(self.tensor.name, row) ^ seed) for row in range(self.rows)], device=device)
        numbers = mix_tensor(torch.arange(self.tensor.numel, device=device) + seeds[:, None])
        # The lowest bit is the sign; the others are the cell.
        cells = ((numbers >> 1) * self.columns >> 31) + torch.arange(self.rows, device=device)[:, None] * self.columns
        return cells, (1 - 2 * (numbers & 1)).float()

    def sketched(self, wide: torch.Tensor, table: _Table) -> torch.Tensor:
        values = wide[self.place]
        if table is None:
            return values
        cells, signs = table
        return wide.new_zeros(self.num_cells).index_add_(0, cells.view(-1), (signs * values).view(-1))

    def estimated(self, cells: torch.Tensor, table: _Table) -> torch.Tensor:
        if table is None:
            return cells
        places, signs = table
        return (signs * cells[places]).median(0).values
