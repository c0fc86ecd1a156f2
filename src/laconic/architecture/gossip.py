"""Each replica mixes its parameters with those of a few others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.architecture.contract import Architecture, Codec, Scope
from laconic.architecture.graphs.topologies import TOPOLOGIES, Neighbourhood, Topology, check_seed
from laconic.core.exchange import Exchange, Move, Wire
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.settings import choice, count


@dataclass(frozen=True, kw_only=True)
class Gossip(Architecture):
    """Each replica mixes its parameters with those of its neighbours.

        x_i <- sum_j W_ij x_j - eta g_i      W doubly stochastic: rows and columns add up to one

    With bsp and ring this is D-PSGD: parameters travel while gradients are computed. With asp, pairs average in the
    background whenever one of them is ready (AD-PSGD). With local_sgd, mixing happens every so many steps. N bytes per
    neighbour, whatever the number of replicas; these come closer to each other without ever being equal.

    Reference: Lian et al. 2017 (D-PSGD), arXiv:1705.09056; Lian et al. 2018 (AD-PSGD), arXiv:1710.06952; Ying et al.
    2021 (exponential graphs), arXiv:2110.13363.
    """

    name: ClassVar[str] = "gossip"
    scope: ClassVar[Scope] = "neighbours"
    asynchronous: ClassVar[bool] = True

    topology: str = choice("ring", "torus", "exponential", "one_peer_exponential", "random_pairs")
    """Who talks to whom: those next to it, around it on a grid, 1, 2, 4, ... places on, one of these in turn, pairs
    drawn anew."""
    seed: int = count(0, at_most=2**31 - 1)
    """Of what is drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(f"{self.axis}.{self.name}", self.topology, self.seed)

    def graph(self) -> Topology:
        """The topology itself."""
        return TOPOLOGIES[self.topology]

    def meets_the_same(self) -> bool:
        """As the topology says."""
        return self.graph().fixed

    def neighbours(self, moment: Moment) -> Neighbourhood:
        """Whom this rank talks to."""
        return self.graph().neighbourhood(moment.rank, moment.world_size, moment.round, self.seed)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, own: torch.Tensor | None = None
    ) -> Exchange:
        """Send the parameters to some neighbours and mix in those of others, in the order of ranks."""
        around = self.neighbours(state.moment)
        received = {peer: torch.empty_like(flat) for peer in around.receives}
        sends = [(peer, flat) for peer in around.sends]
        yield wire.transport.send_receive(sends, list(received.items()), what=wire.what)
        mixed = torch.zeros_like(flat)
        for _, values in sorted({**received, state.moment.rank: flat}.items()):
            mixed.add_(values, alpha=around.weight)
        flat.copy_(mixed)

    def sent_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """Once per neighbour."""
        return len(self.neighbours(moment).sends) * bucket.nbytes

    def moves(self, bucket: Bucket, compression: Codec, moment: Moment, *, halves: bool = False) -> tuple[Move, ...]:
        """Parameters, to every neighbour."""
        peers = len(self.neighbours(moment).sends)
        return (Move("mix", (bucket.nbytes,), peers=peers, topology=self.topology),)
