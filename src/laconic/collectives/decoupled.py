"""Sums in two rounds, so that the second can wait: each rank sums one share, later all ranks get all shares."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from laconic.core.exchange import Exchange, Group
from laconic.core.transport import AllWork, Transport, Work

_ALIGNMENT = 8
"""Bytes: a share holds a whole number of elements of any type, so its size follows from bytes alone."""


def decoupled_sent(nbytes: int, world_size: int) -> int:
    """Bytes one rank sends for both rounds of a sum of `nbytes`."""
    return 2 * (world_size - 1) * share_bytes(nbytes, world_size) if world_size > 1 else 0


def share_bytes(nbytes: int, world_size: int) -> int:
    """Bytes of each rank's share of `nbytes`, the last one padded."""
    return -(-nbytes // (world_size * _ALIGNMENT)) * _ALIGNMENT


class DecoupledSums:
    """A group with sums in two rounds; otherwise like the group it is made from."""

    def __init__(self, transport: Transport, group: Group, what: str) -> None:
        self._transport = transport
        self._group = group
        self._what = what

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def rank(self) -> int:
        return self._group.rank

    def summed(self, tensors: tuple[torch.Tensor, ...]) -> Exchange:
        rows = [self._in_rows(tensor) for tensor in tensors]
        # In place: until the second round comes, nothing but the tensors themselves is kept.
        shares = [row[self.rank] for row in rows]
        scattered = [
            self._transport.reduce_scatter(share, row, what=self._what) for share, row in zip(shares, rows, strict=True)
        ]
        yield scattered[0] if len(scattered) == 1 else AllWork(scattered)
        gathered = [
            self._transport.all_gather(row, share, what=self._what) for row, share in zip(rows, shares, strict=True)
        ]
        yield gathered[0] if len(gathered) == 1 else AllWork(gathered)
        for tensor, row in zip(tensors, rows, strict=True):
            if row.data_ptr() != tensor.data_ptr():
                tensor.view(-1).copy_(row.view(-1)[: tensor.numel()])

    def _in_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """A row for each rank: the tensor itself if it can be divided so, else a padded copy."""
        width = share_bytes(tensor.nbytes, self.size) // tensor.element_size()
        if self.size * width == tensor.numel() and tensor.is_contiguous():
            return tensor.view(self.size, width)
        rows = tensor.new_zeros(self.size * width)
        rows[: tensor.numel()] = tensor.reshape(-1)
        return rows.view(self.size, width)

    def sum(self, tensors: tuple[torch.Tensor, ...]) -> Work:
        return self._group.sum(tensors)

    def gather(self, tensor: torch.Tensor) -> tuple[Work, torch.Tensor]:
        return self._group.gather(tensor)

    def scatter(self, rows: torch.Tensor) -> tuple[Work, torch.Tensor]:
        return self._group.scatter(rows)

    def scatter_uneven(
        self, messages: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> tuple[Work, list[torch.Tensor]]:
        return self._group.scatter_uneven(messages, lengths)

    def swap(self, send: torch.Tensor | None, receive: torch.Tensor | None, peer: int) -> Work:
        return self._group.swap(send, receive, peer)
