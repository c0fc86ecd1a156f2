"""What a network tells the simulator: which parts of it a move keeps busy, for how long, and what passes besides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from laconic.core.exchange import Move

LINK = "network"
"""The links between hosts, which one exchange after the other keeps busy."""
INSIDE = "inside hosts"
"""What connects the devices of one host."""
UP, DOWN = "to servers", "from servers"
"""Links that only one of the two ways to servers and back keeps busy, so that both can be under way."""


@dataclass(frozen=True)
class Passage:
    """One stretch of a move: t = issue_s + startup_s + busy_s + latency_s; in first and last others use its links."""

    where: str
    """The part of the network that nobody else can use meanwhile."""
    busy_s: float
    """How long bytes move."""
    latency_s: float = 0.0
    startup_s: float = 0.0
    """Before bytes move, and nobody else's can."""
    issue_s: float = 0.0
    """Before that, while others' bytes move but nothing else is started."""
    rank_s: float = 0.0
    """How long bytes of one rank move, however few take part, over its own link, which need not be the busiest one."""
    answer: bool = False
    """Comes from a server, which may hold it back."""
    beside: tuple[tuple[str, float], ...] = ()
    """Other parts of the network that bytes of the same stretch keep busy at the same time, and for how long."""

    @property
    def seconds(self) -> float:
        """How long it takes by itself."""
        moving_s = max(self.busy_s, *(time_s for _, time_s in self.beside), 0.0)
        return self.issue_s + self.startup_s + moving_s + self.latency_s


class Network(Protocol):
    """Prices moves among a number of equal ranks; the same move always costs the same."""

    def passages(self, move: Move, world_size: int, num_servers: int) -> tuple[Passage, ...]:
        """The stretches of a move among so many ranks, one after the other.

        num_servers: servers beside the first ranks; negative: that many on hosts of their own.
        """
        ...

    def warnings(self) -> list[str]:
        """What was asked for and is not known well, in sentences."""
        ...


def seconds(network: Network, move: Move, world_size: int, num_servers: int = 0) -> float:
    """How long a move takes when nothing else is under way."""
    return sum(passage.seconds for passage in network.passages(move, world_size, num_servers))
