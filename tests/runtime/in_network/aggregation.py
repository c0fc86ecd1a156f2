"""An aggregator and its ranks in threads of one process, over datagrams that may be lost, doubled or late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import torch

from laconic.core.connection import Address
from laconic.core.transport import Traffic
from laconic.errors import CommunicationError
from laconic.runtime.datagrams import Datagrams
from laconic.runtime.in_network.aggregator import Aggregator
from laconic.runtime.in_network.frames import Bytes
from laconic.runtime.in_network.worker import SlotWorker

HOST = "127.0.0.1"
TAG = 0x0123_4567_89AB_CDEF


class Faulty(Datagrams):
    """Loses a share of the frames, sends a share twice, and keeps a share for the next call."""

    def __init__(self, seed: int, *, lost: float, doubled: float, late: float) -> None:
        super().__init__(HOST)
        self._random = np.random.default_rng(seed)
        self._shares = (lost, doubled, late)
        self._kept: list[tuple[Bytes, Address]] = []

    def send(self, rows: Bytes, address: Address) -> None:
        kept, self._kept = self._kept, []
        lost, doubled, late = (self._random.random(len(rows)) < share for share in self._shares)
        if (late & ~lost).any():
            self._kept.append((rows[late & ~lost].copy(), address))
        now = rows[~lost & ~late]
        self._random.shuffle(now)
        for some in (now, rows[doubled & ~lost]):
            if len(some):
                super().send(some, address)
        for some, to in kept:
            super().send(some, to)


class Job:
    """n ranks and their aggregator, whose socket is the one of number n."""

    def __init__(
        self,
        world_size: int,
        *,
        num_slots: int = 64,
        timeout_s: float = 20.0,
        sockets: Callable[[int], Datagrams] = lambda rank: Datagrams(HOST),
    ) -> None:
        self.failure: CommunicationError | None = None
        self.aggregator = Aggregator(
            sockets(world_size), num_slots=num_slots, world_size=world_size, tag=TAG, name="server 0"
        )
        self.traffic = [Traffic() for _ in range(world_size)]
        self.workers = [
            SlotWorker(
                sockets(rank),
                self.aggregator.address,
                rank=rank,
                world_size=world_size,
                num_slots=num_slots,
                tag=TAG,
                timeout_s=timeout_s,
                lost=lambda what: self.failure,
                traffic=self.traffic[rank],
            )
            for rank in range(world_size)
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            stack.callback(self.aggregator.close)
            for worker in self.workers:
                stack.callback(worker.close)

    def sum(self, of: Callable[[int], Sequence[torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
        """What every rank gets for what each of them gives."""

        def rank(number: int) -> tuple[torch.Tensor, ...]:
            return self.workers[number].sum(of(number), what="sum of bucket 3").sums

        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(rank, range(len(self.workers))))


def integers(rank: int, numel: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randint(-1000, 1000, (numel,), generator=generator).to(dtype)


def total(world_size: int, numel: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.stack([integers(rank, numel, dtype) for rank in range(world_size)]).sum(0).to(dtype)
