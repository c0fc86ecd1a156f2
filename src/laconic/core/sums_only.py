"""The base of groups that can form sums and support no other operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NoReturn

import torch

from laconic.core.exchange import Exchange
from laconic.core.moment import Moment
from laconic.core.transport import Work


class SumsOnly(ABC):
    """A group of all ranks for compressors whose every round is a sum; rules of legality refuse all others."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment

    @property
    def size(self) -> int:
        return self._moment.world_size

    @property
    def rank(self) -> int:
        return self._moment.rank

    @abstractmethod
    def sum(self, tensors: tuple[torch.Tensor, ...]) -> Work:
        """Start replacing each tensor by its sum over the group."""

    def summed(self, tensors: tuple[torch.Tensor, ...]) -> Exchange:
        yield self.sum(tensors)

    def gather(self, tensor: torch.Tensor) -> tuple[Work, torch.Tensor]:
        self._refuse()

    def scatter(self, rows: torch.Tensor) -> tuple[Work, torch.Tensor]:
        self._refuse()

    def scatter_uneven(
        self, messages: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> tuple[Work, list[torch.Tensor]]:
        self._refuse()

    def swap(self, send: torch.Tensor | None, receive: torch.Tensor | None, peer: int) -> Work:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError("refused by the rules of legality")
