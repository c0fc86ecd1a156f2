"""The servers of an architecture: how many there are, where they run, and which of them has which bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.core.plan import Bucket

VALUE_BYTES = 1440
"""Values of one frame in a slot: a multiple of 8, and with all headers less than an Ethernet packet of 1500 bytes."""
HEADER_BYTES = 24
"""Header bytes of a frame."""


@dataclass(frozen=True, kw_only=True)
class ServerLayout:
    """How many servers there are and where they run.

    The synchronization decides the work of a server: with a barrier it forms sums, without one it holds parameters and
    applies each gradient.
    """

    shards: int = 0
    """Number of servers that the workers start; 0: one per worker."""
    hosts: str = ""
    """Addresses of running servers, as address:port separated by |; empty: the workers start them."""
    slots: int = 0
    """Slots in which a server only adds up integers, frame by frame; 0: it gets whole tensors."""

    def num_servers(self, world_size: int) -> int:
        """How many servers there are."""
        if self.hosts:
            return len(self.hosts.split("|"))
        return self.shards or world_size

    def owners(self, buckets: Sequence[Bucket], world_size: int) -> list[int]:
        """The server of each bucket: in order, the one with the fewest bytes."""
        loads = [0] * self.num_servers(world_size)
        found: list[int] = []
        for bucket in buckets:
            found.append(loads.index(min(loads)))
            loads[found[-1]] += bucket.nbytes
        return found
