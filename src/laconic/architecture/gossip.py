"""Each replica mixes its parameters with those of a few others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from laconic.architecture.contract import Architecture, Codec, Measure, Scope
from laconic.architecture.graphs.fast_pairs import Partners, fast_pairs, in_words
from laconic.architecture.graphs.topologies import (
    FAST_PAIRS,
    TOPOLOGIES,
    Neighbourhood,
    Topology,
    check_seed,
    cycle_of,
)
from laconic.collectives.placement import groups_in_words, placed
from laconic.core.exchange import Exchange, Move, Wire
from laconic.core.hosts import Hosts
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.errors import InvalidSetting
from laconic.settings import choice, count

_MEASURED = "measured"


@dataclass(frozen=True, kw_only=True)
class Gossip(Architecture):
    """Each replica mixes its parameters with those of its neighbours.

        x_i <- sum_j W_ij x_j - eta g_i      W doubly stochastic: rows and columns add up to one

    With bsp and ring this is D-PSGD: parameters are exchanged while gradients are computed. With asp, pairs average in
    the background whenever one of them is ready (AD-PSGD). With local_sgd, there is one mixing step per period. A
    mixing step sends N bytes per neighbour, whatever the number of replicas; replicas come closer without ever being
    equal.

    Reference: Lian et al. 2017 (D-PSGD), arXiv:1705.09056; Lian et al. 2018 (AD-PSGD), arXiv:1710.06952; Ying et al.
    2021 (exponential graphs), arXiv:2110.13363; Tang et al. 2020 (SAPS-PSGD: fast pairs), arXiv:2002.09692.
    """

    name: ClassVar[str] = "gossip"
    scope: ClassVar[Scope] = "neighbours"
    asynchronous: ClassVar[bool] = True
    mixes_anything: ClassVar[bool] = True
    shows_on_links: ClassVar[tuple[str, ...]] = ("placement",)

    topology: str = choice("ring", "torus", "exponential", "one_peer_exponential", "fast_pairs", "random_pairs")
    """The neighbours of a replica; ring: the two next to it; torus: the four around it on a grid; exponential: those at
    a distance of 1, 2, 4, ...; one_peer_exponential: one of these in turn; fast_pairs: one of those with the fastest
    links (measured when attaching); random_pairs: a random partner for every mixing step."""
    seed: int = count(0, at_most=2**31 - 1)
    """Seed of the random graphs."""
    rounds: tuple[Partners, ...] = ()
    """The partners of fast_pairs in each round of a cycle, once links have been measured; none: all links are equal."""
    placement: str = choice("as_numbered", _MEASURED)
    """Where replicas stand in the graph; measured: next to those they exchange fast with while all others exchange too,
    so that a ring leaves a rack behind a slow uplink only once."""

    hosts: Hosts = field(default=(), kw_only=True)
    """Ranks in their order in the graph, in groups that were measured to exchange fast among themselves; known once
    attached."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(f"{self.axis}.{self.name}", self.topology, self.seed)
        if self.placement == _MEASURED and (self.graph().draws or self.topology == FAST_PAIRS.name):
            how = "draws" if self.graph().draws else "chooses by measured links"
            raise InvalidSetting(
                f"{self.axis}.{self.name}.placement={_MEASURED} has no effect with "
                f"topology={self.topology}, which {how} neighbours itself. Leave it out, or use topology=ring."
            )

    def settled(self, hosts: Callable[[], Hosts], measure: Measure) -> Gossip:
        """This architecture with the measured order of ranks or the fastest pairs, if a setting asks for them."""
        in_pairs = self.topology == FAST_PAIRS.name
        if not (in_pairs or self.placement == _MEASURED) or sum(map(len, where := hosts())) == 1:
            return self
        speeds = measure.pairs()
        if in_pairs:
            return replace(self, rounds=fast_pairs(speeds)) if speeds else self
        return replace(self, hosts=placed(where, speeds))

    def facts(self) -> dict[str, str]:
        """The order in the graph, or the pairs with the fastest links, where it was measured."""
        if self.rounds:
            return {"pairs": in_words(self.rounds)}
        return {"groups": groups_in_words(self.hosts)} if self.hosts else {}

    def graph(self) -> Topology:
        """The topology itself."""
        return cycle_of(self.rounds) if self.rounds else TOPOLOGIES[self.topology]

    def meets_the_same(self) -> bool:
        """As the topology says."""
        return self.graph().fixed

    def neighbours(self, moment: Moment) -> Neighbourhood:
        """The ranks that this rank exchanges with."""
        order = [rank for host in self.hosts for rank in host] or range(moment.world_size)
        return self.graph().placed(moment.rank, order, moment.round, self.seed)

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
        """The bytes of the parameters, once per neighbour."""
        return len(self.neighbours(moment).sends) * bucket.nbytes

    def moves(self, bucket: Bucket, compression: Codec, moment: Moment, *, decoupled: bool = False) -> tuple[Move, ...]:
        """Parameters, to every neighbour."""
        peers = len(self.neighbours(moment).sends)
        return (
            Move(
                "mix",
                (bucket.nbytes,),
                peers=peers,
                topology=self.topology,
                partners=self.rounds,
                groups=self.hosts,
            ),
        )
