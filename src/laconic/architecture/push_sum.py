"""Gossip on directed graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.architecture.contract import Architecture, Codec, Scope
from laconic.architecture.graphs.topologies import TOPOLOGIES, Neighbourhood, check_seed
from laconic.core.exchange import Exchange, Move, Wire
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize
from laconic.settings import choice, count

_WEIGHT = "push_sum.weight"
_HELD = "push_sum.held"


@dataclass(frozen=True, kw_only=True)
class PushSum(Architecture):
    """Each replica pushes equal shares of its parameters to others, which need not push back.

        x_i <- sum_j P_ij x_j,   w_i <- sum_j P_ij w_j,   z_i = x_i / w_i      columns of P add up to one

    The model holds z; gradients are computed at z and added to x. The weight w compensates for replicas that receive
    more or less than they send, so any directed graph works.

    Reference: Assran et al. 2019 (stochastic gradient push), arXiv:1811.10792.
    """

    name: ClassVar[str] = "push_sum"
    scope: ClassVar[Scope] = "neighbours"
    fields: ClassVar[Mapping[str, Resize]] = {_WEIGHT: "reset", _HELD: "reset"}
    follows_steps: ClassVar[bool] = True
    weight_field: ClassVar[str | None] = _WEIGHT

    topology: str = choice("one_peer_exponential", "exponential", "ring", "random_targets")
    """The targets of a replica; one_peer_exponential: one of those at a distance of 1, 2, 4, ... in turn; exponential:
    all of these; ring: the two next to it; random_targets: a random one for every mixing step."""
    seed: int = count(0, at_most=2**31 - 1)
    """Seed of the random graphs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(f"{self.axis}.{self.name}", self.topology, self.seed)

    def neighbours(self, moment: Moment) -> Neighbourhood:
        """The neighbours of this rank."""
        return TOPOLOGIES[self.topology].neighbourhood(moment.rank, moment.world_size, moment.round, self.seed)

    def begin(self, state: BucketState, parameters: torch.Tensor) -> None:
        """A weight of one, and the current z."""
        state.flat[_HELD] = parameters.clone()
        # One number for all elements, kept per parameter because state is saved so.
        state.whole[_WEIGHT] = {
            tensor.name: torch.ones(1, dtype=torch.float64, device=parameters.device) for tensor in state.bucket.tensors
        }

    def follow_step(self, state: BucketState, parameters: torch.Tensor) -> None:
        """The optimizer has applied to z the update of x = w z: replace it by z + update / w."""
        held, weight = state.flat[_HELD], next(iter(state.whole[_WEIGHT].values()))
        parameters.sub_(held).div_(weight.to(parameters.dtype)).add_(held)
        held.copy_(parameters)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, own: torch.Tensor | None = None
    ) -> Exchange:
        """Push parts of x and w; z replaces the parameters."""
        around, weights = self.neighbours(state.moment), state.whole[_WEIGHT]
        weight = next(iter(weights.values()))
        part = 1.0 / (1 + len(around.sends))
        pushed = weight * part
        flat.mul_(pushed.to(flat.dtype))
        received = {peer: (torch.empty_like(flat), torch.empty_like(pushed)) for peer in around.receives}
        yield wire.transport.send_receive(
            [(peer, tensor) for peer in around.sends for tensor in (flat, pushed)],
            [(peer, tensor) for peer, pair in received.items() for tensor in pair],
            what=wire.what,
        )
        total, total_weight = torch.zeros_like(flat), torch.zeros_like(pushed)
        for _, (values, share) in sorted({**received, state.moment.rank: (flat, pushed)}.items()):
            total += values
            total_weight += share
        torch.div(total, total_weight.to(total.dtype), out=flat)
        state.flat[_HELD].copy_(flat)
        for old in weights.values():
            old.copy_(total_weight)

    def sent_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """The parameters and one weight, once per neighbour."""
        return len(self.neighbours(moment).sends) * (bucket.nbytes + 8)

    def moves(self, bucket: Bucket, compression: Codec, moment: Moment, *, decoupled: bool = False) -> tuple[Move, ...]:
        """Parameters and a weight, to every neighbour."""
        peers = len(self.neighbours(moment).sends)
        return (Move("mix", (bucket.nbytes + 8,), peers=peers, topology=self.topology),)
