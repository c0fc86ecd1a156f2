"""Some ranks of a transport as a group for a compressor, over send and receive alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from laconic.collectives.execution import WholeExchange, run
from laconic.collectives.ring import ring
from laconic.core.exchange import Exchange
from laconic.core.transport import Transport, Work


class Members:
    """A few ranks among which a compressor exchanges; the others take no part in it.

    Sums go around a ring; gathers and scatters send all messages directly, at the same time.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], what: str) -> None:
        self._transport = transport
        self._ranks = ranks
        self._what = what

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def rank(self) -> int:
        return self._ranks.index(self._transport.rank)

    def sum(self, tensors: tuple[torch.Tensor, ...]) -> Work:
        return WholeExchange(run(ring(self.size), self._transport, tensors, what=self._what, members=self._ranks))

    def summed(self, tensors: tuple[torch.Tensor, ...]) -> Exchange:
        yield self.sum(tensors)

    def gather(self, tensor: torch.Tensor) -> tuple[Work, torch.Tensor]:
        rows = tensor.new_empty((self.size, *tensor.shape))
        rows[self.rank] = tensor
        return self._swap_all([tensor.contiguous()] * self.size, rows), rows

    def scatter(self, rows: torch.Tensor) -> tuple[Work, torch.Tensor]:
        received = torch.empty_like(rows)
        received[self.rank] = rows[self.rank]
        return self._swap_all(list(rows), received), received

    def _swap_all(self, sent: Sequence[torch.Tensor], received: torch.Tensor) -> Work:
        others = [(place, rank) for place, rank in enumerate(self._ranks) if place != self.rank]
        if not received.numel():
            others = []
        return self._transport.send_receive(
            [(rank, sent[place]) for place, rank in others],
            [(rank, received[place]) for place, rank in others],
            what=self._what,
        )

    def scatter_uneven(
        self, messages: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> tuple[Work, list[torch.Tensor]]:
        return messages_among(self._transport, self._ranks, messages, lengths, self._what)

    def swap(self, send: torch.Tensor | None, receive: torch.Tensor | None, peer: int) -> Work:
        sends = [] if send is None else [(self._ranks[peer], send)]
        receives = [] if receive is None else [(self._ranks[peer], receive)]
        return self._transport.send_receive(sends, receives, what=self._what)


def messages_among(
    transport: Transport,
    ranks: Sequence[int],
    messages: Sequence[torch.Tensor],
    lengths: Sequence[int],
    what: str,
) -> tuple[Work, list[torch.Tensor]]:
    """Start sending message i to the i-th of `ranks`, and receiving `lengths[i]` bytes from it.

    Empty messages are not sent, and this rank's own message is returned unchanged.
    """
    mine = ranks.index(transport.rank)
    received = [
        messages[mine] if place == mine else messages[mine].new_empty(length) for place, length in enumerate(lengths)
    ]
    others = [(place, rank) for place, rank in enumerate(ranks) if place != mine]
    work = transport.send_receive(
        [(rank, messages[place]) for place, rank in others if messages[place].numel()],
        [(rank, received[place]) for place, rank in others if received[place].numel()],
        what=what,
    )
    return work, received
