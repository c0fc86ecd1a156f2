"""The cost of a collective, from its rows alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from laconic.collectives.schedule import Collective, chunk_bounds


@dataclass(frozen=True)
class Price:
    """The cost of an all-reduce of one size."""

    num_steps: int
    sent_bytes: tuple[int, ...]
    """Bytes that each rank sends."""
    serial_bytes: int
    """Bytes that cross the busiest rank's link one after the other: the most that any rank sends or receives in a step,
    added up over steps. The duration is this times the seconds per byte, plus the steps times the latency."""

    @property
    def busiest_bytes(self) -> int:
        """Bytes of the rank that sends most."""
        return max(self.sent_bytes)


@lru_cache(maxsize=4096)
def price(collective: Collective, nbytes: int) -> Price:
    """The price of one all-reduce of `nbytes`."""
    sizes = np.diff(np.array(chunk_bounds(nbytes, collective.num_chunks), dtype=np.int64))
    step, source, destination, chunk = collective.table[:, :4].T
    num_steps, world_size = collective.num_steps, collective.world_size
    sent = np.zeros((num_steps, world_size), dtype=np.int64)
    received = np.zeros_like(sent)
    np.add.at(sent, (step, source), sizes[chunk])
    np.add.at(received, (step, destination), sizes[chunk])
    serial = int(np.maximum(sent, received).max(axis=1).sum()) if num_steps else 0
    return Price(num_steps, tuple(sent.sum(axis=0).tolist()), serial)
