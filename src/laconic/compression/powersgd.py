"""PowerSGD: send two thin matrices whose product approximates a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.low_rank import Layout, LowRank, computed_in, copy_all, layout_of, random_matrix
from laconic.compression.kernels.lowrank import orthonormal, product, times_left, times_right
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.seeds import base_seed
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize

_Q = "powersgd.q"


@dataclass(frozen=True, kw_only=True)
class PowerSgd(LowRank):
    """Send every matrix as the product of two thin ones, found by one step of power iteration per exchange.

        P = orth(sum_i M_i Q),   Q = sum_i M_i^T P,   decoded = P Q^T = P P^T sum_i M_i

    M is a parameter as a matrix: first dimension x all others. Q is kept for the next step, which thus continues the
    iteration (warm start); the first one is random, the same on all ranks. A parameter that is no matrix, or with rank
    (rows + columns) >= rows * columns, is sent uncompressed, in the same round as P. Rank i contributes P (M_i^T P)^T:
    P is common, so these contributions add up to the decoded matrix, and M_i minus its contribution is the loss of rank
    i.

    All is computed and sent in float32, in float64 where gradients are float64; 16-bit gradients are widened. A value
    that is not finite makes its matrix not finite on all ranks, and is not kept in Q.

    Reference: Vogels et al. 2019, arXiv:1905.13727.
    """

    name: ClassVar[str] = "powersgd"
    good_for: ClassVar[str] = "large matrices on slow links, any number of workers"
    # Q is a sum over all ranks. Only the space that it spans matters, so it need not follow a GradScaler.
    on_resize: ClassVar[Mapping[str, Resize]] = {_Q: "copy"}

    def init(self, bucket: Bucket) -> BucketState:
        """A random Q per matrix, drawn from the parameter's name; kept and sent row by row, as Q^T."""
        dtype = computed_in(bucket)
        start = {
            matrix.name: random_matrix(base_seed(matrix.name, 0), (self.rank, matrix.columns), dtype, bucket.device)
            for matrix in layout_of(bucket, self.rank).matrices
        }
        return BucketState(bucket, whole={_Q: start} if start else {})

    @property
    @computed_once
    def traits(self) -> Traits:
        """`loss_gap` was measured with default settings."""
        return replace(super().traits, gives_factors=True, loss_gap=0.006, loss_deviation=0.023)

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """A sum of all P and of the uncompressed parameters, then a sum of all Q."""
        layout, size = layout_of(bucket, self.rank), computed_in(bucket).itemsize
        first = Round("sum", (size * layout.first_numel,))
        return (first, Round("sum", (size * layout.second_numel,))) if layout.matrices else (first,)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Two rounds for all matrices of the bucket together; one if it has none."""
        layout = layout_of(state.bucket, self.rank)
        wide = flat.to(computed_in(state.bucket))
        first, second = wide.new_empty(layout.first_numel), wide.new_empty(layout.second_numel)
        copy_all([(first[sent], wide[place]) for place, sent in layout.plain])
        for matrix in layout.matrices:
            times_right(matrix.values(wide), state.whole[_Q][matrix.name], matrix.p(first))
        yield group.sum((first,))

        if own is not None:
            copy_all([(own[place], flat[place]) for place, _ in layout.plain])
        copy_all([(flat[place], first[sent]) for place, sent in layout.plain])
        if not layout.matrices:
            return
        for tall, rows in layout.talls:
            columns = first[tall].view(-1, rows, self.rank)
            columns.copy_(orthonormal(columns, self.noise(state, rows, first)))
        for matrix in layout.matrices:
            times_left(matrix.values(wide), matrix.p(first), matrix.q(second))
        alone = second.clone() if own is not None else second
        work = group.sum((second,))
        if own is not None:
            self._decode(own, layout, first, alone)
        yield work

        self._decode(flat, layout, first, second)
        for matrix in layout.matrices:
            self.note_factors(state, matrix, matrix.p(first), matrix.q(second))
        # Zeros are as good a start as any: orth replaces them.
        second.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        # In place: on a GPU, memory allocated on another stream must not be freed here.
        copy_all([(state.whole[_Q][matrix.name], matrix.q(second)) for matrix in layout.matrices])

    def _decode(self, out: torch.Tensor, layout: Layout, first: torch.Tensor, second: torch.Tensor) -> None:
        for matrix in layout.matrices:
            product(matrix.p(first), matrix.q(second), matrix.values(out))
