"""Gossip that sends low-rank differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.architecture.contract import Architecture, Codec, Scope
from laconic.architecture.graphs.topologies import TOPOLOGIES, Neighbourhood
from laconic.collectives.execution import WholeExchange, idle, unrolled
from laconic.core.exchange import Exchange, Move, Wire, in_lockstep
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.transport import Transport, Work
from laconic.settings import choice


@dataclass(frozen=True, kw_only=True)
class PowerGossip(Architecture):
    """Each replica moves towards its neighbours by a compressed difference, which neither side has in full.

        x_i <- x_i + sum_j W_ij C(x_j - x_i) - eta g_i      W doubly stochastic, C linear

    C is linear, so each replica sends C of its own parameters and both subtract. With powersgd, as published,
    P = orth(X_i Q - X_j Q), Q <- X_i^T P - X_j^T P, C(X_i - X_j) = P Q^T. Both compute the same difference, so the mean
    of all replicas is preserved. The unsent part of a difference remains for the next round: no residual, no public
    copies and no step size are needed. Every pair keeps a Q of its own.

    Reference: Vogels et al. 2020 (PowerGossip), arXiv:2008.01425.
    """

    name: ClassVar[str] = "power_gossip"
    scope: ClassVar[Scope] = "neighbours"
    adds_differences: ClassVar[bool] = True

    topology: str = choice("ring", "torus")
    """The neighbours of a replica: the two next to it, or the four around it on a grid."""

    def neighbours(self, moment: Moment) -> Neighbourhood:
        """The neighbours of this rank."""
        return TOPOLOGIES[self.topology].neighbourhood(moment.rank, moment.world_size, 0, 0)

    def begin(self, state: BucketState, parameters: torch.Tensor) -> None:
        """The compressor's state, once for each neighbour; only the first time."""
        places = range({"ring": 2, "torus": 4}[self.topology])
        for field in [field for field in state.flat if "|" not in field]:
            values = state.flat.pop(field)
            state.flat |= {f"{field}|{place}": values.clone() for place in places}
        for field in [field for field in state.whole if "|" not in field]:
            by_name = state.whole.pop(field)
            for place in places:
                state.whole[f"{field}|{place}"] = {name: values.clone() for name, values in by_name.items()}

    def exchange(
        self, flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, own: torch.Tensor | None = None
    ) -> Exchange:
        """Find the difference to every neighbour at the same time, and move by a part of it."""
        around, rank = self.neighbours(state.moment), state.moment.rank
        if not around.sends:
            yield from idle(self.num_waits(state.bucket, compression, state.moment))
            return
        # The lower rank's minus the higher one's, on both of them, so that both get the same bits.
        differences = {peer: flat.clone() if rank < peer else -flat for peer in around.sends}
        yield from in_lockstep(
            *(
                unrolled(
                    compression.exchange(difference, edge, _Pair(wire.transport, rank, peer, wire.what)),
                    compression.num_waits(state.bucket, edge.moment),
                )
                for (peer, difference), edge in zip(differences.items(), self._edges(state, around), strict=True)
            )
        )
        for peer, difference in differences.items():
            flat.add_(difference, alpha=-around.weight if rank < peer else around.weight)

    def _edges(self, state: BucketState, around: Neighbourhood) -> Iterator[BucketState]:
        """The compressor's state for each neighbour, in their order."""
        for place, peer in enumerate(around.sends):
            suffix = f"|{place}"
            flat = {key.removesuffix(suffix): value for key, value in state.flat.items() if key.endswith(suffix)}
            whole = {key.removesuffix(suffix): value for key, value in state.whole.items() if key.endswith(suffix)}
            moment = replace(state.moment, rank=int(state.moment.rank > peer), world_size=2)
            yield BucketState(state.bucket, flat=flat, whole=whole, moment=moment, tables=state.tables)

    def sent_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """The bytes of the compressor, once per neighbour."""
        return len(self.neighbours(moment).sends) * sum(map(sum, self._sizes(bucket, compression, moment)))

    def moves(self, bucket: Bucket, compression: Codec, moment: Moment, *, decoupled: bool = False) -> tuple[Move, ...]:
        """Every round of the compressor, to every neighbour."""
        peers = len(self.neighbours(moment).sends)
        sizes = self._sizes(bucket, compression, moment)
        return tuple(Move("mix", size, peers=peers, topology=self.topology) for size in sizes)

    def _sizes(self, bucket: Bucket, compression: Codec, moment: Moment) -> list[tuple[int, ...]]:
        """Bytes of each round between two ranks."""
        return [round.sizes for round in compression.rounds(bucket, replace(moment, rank=0, world_size=2))]

    def num_waits(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """The waits of the compressor: all neighbours at the same time."""
        return compression.num_waits(bucket, replace(moment, rank=0, world_size=2))


class _Pair:
    """Two ranks as a group in which sums are formed, and nothing else."""

    def __init__(self, transport: Transport, rank: int, peer: int, what: str) -> None:
        self._transport, self._peer, self._what = transport, peer, what
        self.size, self.rank = 2, int(rank > peer)

    def sum(self, tensors: tuple[torch.Tensor, ...]) -> Work:
        return WholeExchange(self.summed(tensors))

    def summed(self, tensors: tuple[torch.Tensor, ...]) -> Exchange:
        received = [torch.empty_like(tensor) for tensor in tensors]
        yield self._transport.send_receive(
            [(self._peer, tensor) for tensor in tensors], [(self._peer, tensor) for tensor in received], what=self._what
        )
        for tensor, arrived in zip(tensors, received, strict=True):
            tensor += arrived

    def gather(self, tensor: torch.Tensor) -> tuple[Work, torch.Tensor]:
        raise NotImplementedError("a linear compressor sends sums only")

    def scatter(self, rows: torch.Tensor) -> tuple[Work, torch.Tensor]:
        raise NotImplementedError("a linear compressor sends sums only")

    def scatter_uneven(
        self, messages: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> tuple[Work, list[torch.Tensor]]:
        raise NotImplementedError("a linear compressor sends sums only")

    def swap(self, send: torch.Tensor | None, receive: torch.Tensor | None, peer: int) -> Work:
        raise NotImplementedError("a linear compressor sends sums only")
