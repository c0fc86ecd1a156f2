"""Gossip with any compressor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.architecture.contract import Architecture, Codec, CodecTraits, Scope
from laconic.architecture.graphs.topologies import TOPOLOGIES, Neighbourhood
from laconic.core.exchange import Exchange, Move, Wire
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize
from laconic.settings import choice, number

_PUBLIC = "choco.public"
_AROUND = "choco.around"
_RATE, _DENSE, _EXPONENT = 0.2, 0.1, 0.6
"""The step, the density down to which it works, and the power of the density with which it shrinks below that."""


@dataclass(frozen=True, kw_only=True)
class Choco(Architecture):
    """Neighbours keep public copies of each other's parameters and exchange compressed corrections to them.

        q_i = C(x_i - xh_i),   xh_i <- xh_i + q_i,   x_i <- x_i + gamma sum_j W_ij (xh_j - xh_i)

    Values that a compressor leaves out remain in x - xh and are sent in a later round, so a biased compressor needs no
    error feedback here. The public copies must receive every correction, so neighbours are the same in every round. The
    state per replica is xh_i, and sum_j W_ij xh_j as one tensor, whatever the number of neighbours. No rank could tell
    if the second moved away from the sum of the first, so both are kept in float32 where parameters have 16 bits. With
    asp each pair has public copies of its own, because pairs are not synchronized.

    Reference: Koloskova et al. 2019, arXiv:1902.00340.
    """

    name: ClassVar[str] = "choco"
    scope: ClassVar[Scope] = "neighbours"
    asynchronous: ClassVar[bool] = True
    compensates: ClassVar[bool] = True
    fields: ClassVar[Mapping[str, Resize]] = {_PUBLIC: "reset", _AROUND: "reset"}

    topology: str = choice("ring", "torus")
    """The neighbours of a replica: the two next to it, or the four around it on a grid."""
    gamma: float = number(0.0, at_least=0.0, at_most=1.0)
    """The step towards the neighbours' public copies in a round; 0: chosen for the compressor. The choice
    is 0.2, less for a compressor that sends less than one entry in ten (0.05 for the largest one in a hundred), and
    half of the share of entries sent, at most 0.2, if they are drawn at random. With too large a step replicas diverge;
    with a compressor that loses little, a larger step brings them together sooner."""

    def copy_rate(self, compression: CodecTraits) -> float:
        """The setting, or the step that fits the compressor; the same with a barrier and without."""
        if self.gamma:
            return self.gamma
        if compression.at_random:
            # Until a value is drawn again, on average after 1 / density rounds, it moves on towards an old copy.
            return min(_RATE, compression.density / 2)
        return _RATE * min(1.0, (compression.density / _DENSE) ** _EXPONENT)

    def neighbours(self, moment: Moment) -> Neighbourhood:
        """The neighbours of this rank."""
        return TOPOLOGIES[self.topology].neighbourhood(moment.rank, moment.world_size, 0, 0)

    def begin(self, state: BucketState, parameters: torch.Tensor) -> None:
        """Public copies start from the common initial values."""
        wide = torch.promote_types(parameters.dtype, torch.float32)
        for field in (_PUBLIC, _AROUND):
            state.flat[field] = parameters.to(wide, copy=True)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, own: torch.Tensor | None = None
    ) -> Exchange:
        """Send the correction to the public copy, and apply the neighbours'."""
        around, public, sums = self.neighbours(state.moment), state.flat[_PUBLIC], state.flat[_AROUND]
        payload = compression.encode((flat - public).to(flat.dtype), state)
        received = {peer: Payload(tuple(map(torch.empty_like, payload.tensors))) for peer in around.receives}
        yield wire.transport.send_receive(
            [(peer, tensor) for peer in around.sends for tensor in payload.tensors],
            [(peer, tensor) for peer, theirs in received.items() for tensor in theirs.tensors],
            what=wire.what,
        )
        correction = torch.empty_like(flat)
        for peer, arrived in sorted({**received, state.moment.rank: payload}.items()):
            compression.decode(arrived, correction, state)
            sums.add_(correction, alpha=around.weight)
            if peer == state.moment.rank:
                public += correction
        flat.add_(sums - public, alpha=self.copy_rate(compression.traits))

    def sent_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """One payload per neighbour."""
        return len(self.neighbours(moment).sends) * compression.payload_bytes(bucket, moment)

    def moves(self, bucket: Bucket, compression: Codec, moment: Moment, *, decoupled: bool = False) -> tuple[Move, ...]:
        """A correction, to every neighbour."""
        sizes, peers = (compression.payload_bytes(bucket, moment),), len(self.neighbours(moment).sends)
        return (Move("mix", sizes, peers=peers, topology=self.topology),)
