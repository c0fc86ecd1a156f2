"""All ranks average with all ranks, without a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.architecture.contract import Architecture
from laconic.core.exchange import Group, Round
from laconic.core.transport import AllWork, Transport, Work, all_gather_sent, all_reduce_sent, shard_exchange_sent
from laconic.settings import choice


@dataclass(frozen=True, kw_only=True)
class AllReduce(Architecture):
    """Every replica ends with the sum of all contributions.

    native: the backend's own all-reduce, 2 (n-1)/n N bytes per rank.
    """

    name: ClassVar[str] = "all_reduce"
    algorithm: str = choice("native")
    """How the sum is formed; native leaves it to the backend (Gloo, NCCL)."""

    def group(self, transport: Transport, what: str) -> Group:
        """All ranks of the transport."""
        return _Everyone(transport, what)

    def sent_bytes(self, round: Round, world_size: int) -> int:
        """As the backend's ring sends it."""
        if world_size == 1:
            return 0
        price = {"sum": all_reduce_sent, "gather": all_gather_sent, "scatter": shard_exchange_sent, "send": _as_it_is}
        return sum(price[round.kind](size, world_size) for size in round.sizes)


def _as_it_is(nbytes: int, world_size: int) -> int:
    return nbytes


class _Everyone:
    def __init__(self, transport: Transport, what: str) -> None:
        self._transport = transport
        self._what = what

    @property
    def size(self) -> int:
        return self._transport.world_size

    @property
    def rank(self) -> int:
        return self._transport.rank

    def sum(self, tensors: tuple[torch.Tensor, ...]) -> Work:
        works = [self._transport.all_reduce(tensor, what=self._what) for tensor in tensors]
        return works[0] if len(works) == 1 else AllWork(works)

    def gather(self, tensor: torch.Tensor) -> tuple[Work, torch.Tensor]:
        rows = tensor.new_empty((self._transport.world_size, *tensor.shape))
        return self._transport.all_gather(rows, tensor, what=self._what), rows

    def scatter(self, rows: torch.Tensor) -> tuple[Work, torch.Tensor]:
        received = torch.empty_like(rows)
        return self._transport.all_to_all(received, rows, what=self._what), received

    def swap(self, send: torch.Tensor | None, receive: torch.Tensor | None, peer: int) -> Work:
        sends = [] if send is None else [(peer, send)]
        receives = [] if receive is None else [(peer, receive)]
        return self._transport.send_receive(sends, receives, what=self._what)
