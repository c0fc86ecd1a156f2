"""The servers of an architecture: how many there are, where they run, and which of them has which bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.core.plan import Bucket


@dataclass(frozen=True, kw_only=True)
class ServerLayout:
    """How many servers there are and where they run.

    What a server does follows from the synchronization: with a barrier it forms sums, without one it holds parameters
    and applies each gradient.
    """

    shards: int = 0
    """Number of servers that are started beside the workers; 0: one beside every worker."""
    hosts: str = ""
    """Where servers already run, as address:port separated by |; empty: they are started beside the workers."""

    def num_servers(self, world_size: int) -> int:
        """How many servers there are."""
        if self.hosts:
            return len(self.hosts.split("|"))
        return self.shards or world_size

    def owners(self, buckets: Sequence[Bucket], world_size: int) -> list[int]:
        """The server of each bucket: in order, the one that has least."""
        loads = [0] * self.num_servers(world_size)
        found: list[int] = []
        for bucket in buckets:
            found.append(loads.index(min(loads)))
            loads[found[-1]] += bucket.nbytes
        return found
