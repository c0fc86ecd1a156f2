"""Send the entries that are largest on one rank, a different rank in every round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.common_places import Agreement, CommonPlaces
from laconic.compression.traits import Traits, computed_once
from laconic.core.exchange import Group, Round
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState


@dataclass(frozen=True, kw_only=True)
class ScaleCom(CommonPlaces):
    """One rank after the other chooses the positions of its k largest magnitudes, and all ranks send those entries.

        leader = round mod n,   I = places of the k largest |g_leader| of each tensor,   decoded = sum_i g_i at I

    This is CLT-k (cyclic local top-k). Residuals of the ranks become similar, so entries that are large on one rank are
    large on most. Unlike those of topk, its bytes do not grow with the number of ranks. The leader's positions are sent
    as a sum to which all others add zeros, so an ordinary all-reduce, or a server that only adds, carries both rounds.

    The paper also filters the residual (a share beta of each new error is kept); error_feedback keeps all of it. A
    value that is not finite reaches all ranks if the leader has it, or if it is at a position that the leader has
    chosen.

    Reference: Chen et al. 2020, arXiv:2104.11125.
    """

    name: ClassVar[str] = "scalecom"
    good_for: ClassVar[str] = "sparse sums over many workers: bytes do not grow with them"

    @property
    @computed_once
    def traits(self) -> Traits:
        """`loss_gap` was measured with default settings."""
        return replace(super().traits, loss_gap=0.226, loss_deviation=0.048)

    def agree(self, flat: torch.Tensor, state: BucketState, group: Group) -> Agreement:
        """The positions that the leader of this round has chosen."""
        entries = self.entries(state.bucket)
        packed = torch.zeros(entries.indices_bytes, dtype=torch.uint8, device=flat.device)
        if group.rank == state.moment.round % group.size:
            packed.copy_(entries.encode(entries.largest(flat)))
        # As signed integers, which everything that forms sums can add; one rank's bytes and zeros stay those bytes.
        yield group.sum((packed.view(torch.int8),))
        return entries.decode(packed)

    def agreement_rounds(self, bucket: Bucket) -> tuple[Round, ...]:
        """Coded positions."""
        return (Round("sum", (self.entries(bucket).indices_bytes,)),)
