"""The servers of an architecture: how many there are, where they run, and which of them has which bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
    by_links: bool = False
    """Whether servers get more or less according to links that are measured when attaching."""
    shares: tuple[float, ...] = ()
    """The share of all bytes that each server gets; none: equal shares."""
    slots: int = 0
    """Slots in which a server only adds up integers, frame by frame; 0: it gets whole tensors."""

    def num_servers(self, world_size: int) -> int:
        """How many servers there are."""
        if self.hosts:
            return len(self.hosts.split("|"))
        return self.shards or world_size

    def owners(self, buckets: Sequence[Bucket], world_size: int) -> list[int]:
        """The server of each bucket: the one with the fewest bytes for its share, the largest buckets first."""
        loads, found = [0] * self.num_servers(world_size), [0] * len(buckets)
        for number in sorted(range(len(buckets)), key=lambda number: -buckets[number].nbytes):
            found[number] = self._least(loads, buckets[number].nbytes)
            loads[found[number]] += buckets[number].nbytes
        return found

    def _least(self, loads: list[int], nbytes: int) -> int:
        if not self.shares:
            return loads.index(min(loads))
        fullness = {
            server: (load + nbytes) / share
            for server, (load, share) in enumerate(zip(loads, self.shares, strict=True))
            if share
        }
        return min(fullness, key=lambda server: fullness[server])

    def cuts(self, nbytes: int, world_size: int, smallest_bytes: int) -> list[int]:
        """Where a bucket of so many bytes is cut, so that each server can have a piece; none below the smallest."""
        if not self.shares:
            count = max(1, min(self.num_servers(world_size), nbytes // smallest_bytes))
            return [nbytes * piece // count for piece in range(1, count)]
        pieces = [share * nbytes for share in self.shares if share * nbytes >= smallest_bytes]
        # What servers with small shares get together is cut into as many pieces as it allows.
        rest = nbytes - sum(pieces)
        count = int(rest // smallest_bytes)
        pieces += [rest / max(1, count)] * count
        return [int(end) for end in accumulate(pieces[:-1])]
