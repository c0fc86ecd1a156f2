"""Send a few singular vectors of every matrix, drawn at random without bias."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.low_rank import LowRank, Matrix, computed_in, copy_all, layout_of
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.seeds import base_seed, mix, moment_seed
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState


@dataclass(frozen=True, kw_only=True)
class Atomo(LowRank):
    """Send `rank` singular triples of every matrix, drawn with probabilities that follow the singular values.

        M = sum_i s_i u_i v_i^T,   decoded = sum over drawn i of (s_i / p_i) u_i v_i^T
        p_i = min(1, c s_i),   c such that the p_i add up to `rank`

    Unbiased, with the least variance for this number of triples. Large singular values are always sent, the others with
    probability p_i and scaled up. Triples are drawn together (systematic sampling), so exactly `rank` of them are sent;
    the paper draws each independently and sends `rank` on average. M is a parameter as a matrix: first dimension x all
    others. A parameter that is no matrix, or with rank (rows + columns) >= rows * columns, is sent uncompressed.
    Payloads are gathered. A matrix with a value that is not finite arrives as NaN. error_feedback is refused: drawn
    values are scaled up, so the difference from the input is not what was lost.

    Reference: Wang et al. 2018, arXiv:1806.04090.
    """

    name: ClassVar[str] = "atomo"
    good_for: ClassVar[str] = "low rank without bias or state, if there is time for a decomposition"

    @property
    @computed_once
    def traits(self) -> Traits:
        """Unbiased; a payload is decoded by itself."""
        return replace(
            super().traits,
            unbiased=True,
            amplifies=True,
            wants_error_feedback=False,
            decodes_alone=True,
            sums_only=False,
            linear=False,
            loss_gap=0.039,
            loss_deviation=0.048,
        )

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """One gather of the uncompressed parameters, of all P and of all Q."""
        return (Round("gather", (computed_in(bucket).itemsize * self._numel(bucket),)),)

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """P holds the drawn u_i, times s_i / p_i; Q holds the v_i."""
        layout = layout_of(state.bucket, self.rank)
        wide = flat.to(computed_in(state.bucket))
        sent = wide.new_empty(self._numel(state.bucket))
        copy_all([(sent[there], wide[here]) for here, there in layout.plain])
        second = sent[layout.first_numel :]
        for matrix in layout.matrices:
            p, q = self._drawn(matrix, matrix.values(wide), state.moment)
            matrix.p(sent).copy_(p)
            matrix.q(second).copy_(q)
        return Payload((sent,))

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """The product of P and Q^T."""
        layout, sent = layout_of(state.bucket, self.rank), payload.tensors[0]
        copy_all([(out[here], sent[there]) for here, there in layout.plain])
        second = sent[layout.first_numel :]
        for matrix in layout.matrices:
            matrix.values(out).copy_(matrix.p(sent) @ matrix.q(second))

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Gather the payloads, decode each and add up."""
        payload = self.encode(flat, state)
        if own is not None:
            self.decode(payload, own, state)
        work, rows = group.gather(payload.tensors[0])
        yield work
        # In the order of ranks, so that every rank comes to the same bits.
        one = torch.empty_like(flat)
        for number, row in enumerate(rows):
            self.decode(Payload((row,)), one if number else flat, state)
            if number:
                flat += one

    def _numel(self, bucket: Bucket) -> int:
        layout = layout_of(bucket, self.rank)
        return layout.first_numel + layout.second_numel

    def _drawn(self, matrix: Matrix, values: torch.Tensor, moment: Moment) -> tuple[torch.Tensor, torch.Tensor]:
        """P (rows x rank) and Q^T (rank x columns)."""
        finite = values.isfinite().all()
        # The decomposition fails for values that are not finite, so zeros replace them.
        u, s, vt = torch.linalg.svd(torch.where(finite, values, 0.0), full_matrices=False)
        chances = probabilities(s, self.rank)
        begin = mix(base_seed(matrix.name, 0) ^ moment_seed(moment)) * 2.0**-32
        marks = begin + torch.arange(self.rank, dtype=torch.float64, device=values.device)
        chosen = torch.searchsorted(chances.cumsum(0), marks, right=True).clamp_(max=len(s) - 1)
        weights = s[chosen] / chances[chosen].clamp(min=torch.finfo(torch.float64).tiny).to(s.dtype)
        weights = torch.where(s[chosen] > 0, weights, 0.0)
        return u[:, chosen] * torch.where(finite, weights, torch.nan), vt[chosen]


def probabilities(values: torch.Tensor, total: int) -> torch.Tensor:
    """Probabilities in proportion to descending values, at most 1 each, that add up to `total`; in float64.

    The largest values get 1 as long as the next one's share of the remainder would exceed 1.
    """
    wide = values.double()
    rest = wide.flip(0).cumsum(0).flip(0)
    left = total - torch.arange(len(wide), dtype=torch.float64, device=wide.device)
    # Value i is certain if, with all before it certain, its own share is 1 or more; so is then every larger one.
    certain = (wide * left >= rest) & (left > 0) & (rest > 0)
    number = certain.to(torch.int64).cumprod(0).sum()
    at = number.clamp(max=len(wide) - 1)
    scale = torch.where(rest[at] > 0, left[at] / rest[at], 0.0)
    places = torch.arange(len(wide), device=wide.device)
    return torch.where(places < number, 1.0, wide * scale)
