"""All ranks average with all ranks, without a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.architecture.contract import Architecture, Codec, Scope
from laconic.core.exchange import Exchange, Round, Wire
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.transport import (
    AllWork,
    Transport,
    Work,
    all_gather_sent,
    all_reduce_sent,
    as_it_is_sent,
    shard_exchange_sent,
)
from laconic.settings import choice

_PRICES = {
    "sum": all_reduce_sent,
    "gather": all_gather_sent,
    "scatter": shard_exchange_sent,
    "send": as_it_is_sent,
}


@dataclass(frozen=True, kw_only=True)
class AllReduce(Architecture):
    """Every replica ends with the mean of all contributions.

    native: the backend's own all-reduce, 2 (n-1)/n N bytes per rank.
    """

    name: ClassVar[str] = "all_reduce"
    scope: ClassVar[Scope] = "everyone"

    algorithm: str = choice("native")
    """How the sum is formed; native leaves it to the backend (Gloo, NCCL)."""

    def exchange(
        self, flat: torch.Tensor, state: BucketState, compression: Codec, wire: Wire, own: torch.Tensor | None = None
    ) -> Exchange:
        """As the compressor does it in a group of all ranks."""
        return compression.exchange(flat, state, Everyone(wire.transport, wire.what), own)

    def sent_bytes(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """All rounds of the compressor."""
        return sum(round_sent(round, moment.world_size) for round in compression.rounds(bucket, moment))

    def num_waits(self, bucket: Bucket, compression: Codec, moment: Moment) -> int:
        """As often as the compressor."""
        return compression.num_waits(bucket, moment)


def round_sent(round: Round, world_size: int) -> int:
    """Bytes one of n ranks sends for `round`, as the backend's ring sends it."""
    return sum(_PRICES[round.kind](size, world_size) for size in round.sizes) if world_size > 1 else 0


class Everyone:
    """All ranks of a transport, as a Group."""

    def __init__(self, transport: Transport, what: str) -> None:
        self._transport = transport
        self._what = what

    @property
    def size(self) -> int:
        """See Group."""
        return self._transport.world_size

    @property
    def rank(self) -> int:
        """See Group."""
        return self._transport.rank

    def sum(self, tensors: tuple[torch.Tensor, ...]) -> Work:
        """See Group."""
        works = [self._transport.all_reduce(tensor, what=self._what) for tensor in tensors]
        return works[0] if len(works) == 1 else AllWork(works)

    def gather(self, tensor: torch.Tensor) -> tuple[Work, torch.Tensor]:
        """See Group."""
        rows = tensor.new_empty((self._transport.world_size, *tensor.shape))
        return self._transport.all_gather(rows, tensor, what=self._what), rows

    def scatter(self, rows: torch.Tensor) -> tuple[Work, torch.Tensor]:
        """See Group."""
        received = torch.empty_like(rows)
        return self._transport.all_to_all(received, rows, what=self._what), received

    def swap(self, send: torch.Tensor | None, receive: torch.Tensor | None, peer: int) -> Work:
        """See Group."""
        sends = [] if send is None else [(peer, send)]
        receives = [] if receive is None else [(peer, receive)]
        return self._transport.send_receive(sends, receives, what=self._what)
