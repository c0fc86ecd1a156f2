"""PowerSGD in one round per step: the two thin matrices are sent in alternate steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.low_rank import (
    Layout,
    LowRank,
    Matrix,
    computed_in,
    copy_all,
    layout_of,
    random_matrix,
)
from laconic.compression.kernels.lowrank import orthonormal, product, times_left, times_right
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.seeds import base_seed
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize

_P = "acpsgd.p"
_Q = "acpsgd.q"


@dataclass(frozen=True, kw_only=True)
class AcpSgd(LowRank):
    """Send the product of every matrix with a basis that all ranks hold, from the right and from the left in turn.

        even rounds:  B = orth(Q),   P = sum_i M_i B,     decoded = P B^T
        odd rounds:   B = orth(P),   Q = sum_i M_i^T B,   decoded = B Q^T

    Two rounds are one step of power iteration. powersgd runs both in every training step, this method only one; so a
    step sends half the bytes in half the rounds, with a basis that is one step older. The first Q is random, the same
    on all ranks. M is a parameter as a matrix: first dimension x all others. A parameter that is no matrix, or with
    rank (rows + columns) >= rows * columns, is sent uncompressed, in the same round. Contributions add up to the
    decoded matrix, so M_i minus its contribution is the loss of rank i. A value that is not finite makes its matrix not
    finite on all ranks, and is not kept in the state.

    Reference: Zhang et al. 2023 (ACP-SGD), arXiv:2306.08881.
    """

    name: ClassVar[str] = "acpsgd"
    good_for: ClassVar[str] = "as powersgd where round trips are long: one round a step"
    # Both are sums over all ranks. Only the space that they span matters, so they need not follow a GradScaler.
    on_resize: ClassVar[Mapping[str, Resize]] = {_P: "copy", _Q: "copy"}

    @property
    @computed_once
    def traits(self) -> Traits:
        """Measured with default settings."""
        return replace(super().traits, gives_factors=True, loss_gap=0.057, loss_deviation=0.018)

    def init(self, bucket: Bucket) -> BucketState:
        """A random Q per matrix, drawn from the parameter's name and kept row by row; a P of zeros."""
        dtype, matrices = computed_in(bucket), layout_of(bucket, self.rank).matrices
        if not matrices:
            return BucketState(bucket)
        q = {
            matrix.name: random_matrix(base_seed(matrix.name, 0), (self.rank, matrix.columns), dtype, bucket.device)
            for matrix in matrices
        }
        p = {
            matrix.name: torch.zeros((matrix.rows, self.rank), dtype=dtype, device=bucket.device) for matrix in matrices
        }
        return BucketState(bucket, whole={_P: p, _Q: q})

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """One sum of the uncompressed parameters and of all P, or of all Q."""
        layout = layout_of(bucket, self.rank)
        numel = layout.plain_numel + layout.second_numel if moment.round % 2 else layout.first_numel
        return (Round("sum", (computed_in(bucket).itemsize * numel,)),)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """One round for all matrices of the bucket together."""
        layout, left = layout_of(state.bucket, self.rank), state.moment.round % 2 == 1
        wide = flat.to(computed_in(state.bucket))
        sent = wide.new_empty(layout.plain_numel + layout.second_numel if left else layout.first_numel)
        copy_all([(sent[there], wide[here]) for here, there in layout.plain])
        bases = {matrix.name: self._basis(matrix, state, left=left) for matrix in layout.matrices}
        for matrix in layout.matrices:
            if left:
                times_left(matrix.values(wide), bases[matrix.name], matrix.q(sent[layout.plain_numel :]))
            else:
                times_right(matrix.values(wide), bases[matrix.name], matrix.p(sent))
        if own is not None:
            copy_all([(own[here], flat[here]) for here, _ in layout.plain])
            self._decode(own, sent, bases, state, left=left)
        yield group.sum((sent,))

        copy_all([(flat[here], sent[there]) for here, there in layout.plain])
        self._decode(flat, sent, bases, state, left=left)
        for matrix in layout.matrices:
            self.note_factors(state, matrix, *self._factors(matrix, sent, bases, layout, left=left))
        # Zeros are as good a start as any: orth replaces them.
        sent.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        if left:
            copy_all([(state.whole[_Q][m.name], m.q(sent[layout.plain_numel :])) for m in layout.matrices])
        else:
            copy_all([(state.whole[_P][m.name], m.p(sent)) for m in layout.matrices])

    def _basis(self, matrix: Matrix, state: BucketState, *, left: bool) -> torch.Tensor:
        """The basis from the last P, rows x rank; or from the last Q, as rank x columns."""
        tall = state.whole[_P][matrix.name] if left else state.whole[_Q][matrix.name].T.contiguous()
        basis = orthonormal(tall.unsqueeze(0), self.noise(state, tall.shape[0], tall))[0]
        return basis if left else basis.T.contiguous()

    def _decode(
        self,
        out: torch.Tensor,
        sent: torch.Tensor,
        bases: Mapping[str, torch.Tensor],
        state: BucketState,
        *,
        left: bool,
    ) -> None:
        layout = layout_of(state.bucket, self.rank)
        for matrix in layout.matrices:
            p, q = self._factors(matrix, sent, bases, layout, left=left)
            product(p, q, matrix.values(out))

    def _factors(
        self, matrix: Matrix, sent: torch.Tensor, bases: Mapping[str, torch.Tensor], layout: Layout, *, left: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """P and Q^T: the basis of this round, and the product with it that was sent."""
        basis = bases[matrix.name]
        return (basis, matrix.q(sent[layout.plain_numel :])) if left else (matrix.p(sent), basis)
