"""The interface of a network model: which parts of the network a move occupies, how long, and its other delays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from laconic.core.exchange import Move

LINK = "network"
"""The links between hosts, which exchanges use one after the other."""
INSIDE = "inside hosts"
"""The links between the devices of one host."""
UP, DOWN = "to servers", "from servers"
"""Links that only one of the two directions uses, so that both can be in flight."""


@dataclass(frozen=True)
class Passage:
    """One segment of a move: t = issue_s + startup_s + busy_s + latency_s.

    Other transfers may use its links during issue_s and latency_s.
    """

    where: str
    """The links that no other transfer can use meanwhile."""
    busy_s: float
    """The time in which bytes move."""
    latency_s: float = 0.0
    startup_s: float = 0.0
    """Time before bytes move, during which the link is idle."""
    issue_s: float = 0.0
    """Time before that, during which bytes of other transfers move but no other transfer starts."""
    launch_s: float = 0.0
    """Time before that, as long as the device computes, during which no other bytes move: kernels of exchanges run in
    one order, and the first of them waits for the kernel that is running."""
    rank_s: float = 0.0
    """The time in which bytes of one rank move over its own link, which need not be the busiest one."""
    answer: bool = False
    """Whether it comes from a server, which may delay it."""
    beside: tuple[tuple[str, float], ...] = ()
    """Other links that the same bytes occupy at the same time, and for how long."""

    @property
    def seconds(self) -> float:
        """Its duration with nothing else in flight."""
        moving_s = max(self.busy_s, *(time_s for _, time_s in self.beside), 0.0)
        return self.issue_s + self.startup_s + moving_s + self.latency_s


class Network(Protocol):
    """Computes the cost of moves among a number of equal ranks; the same move always costs the same."""

    def passages(self, move: Move, world_size: int, num_servers: int) -> tuple[Passage, ...]:
        """The segments of a move among this many ranks, one after the other.

        num_servers: servers on the hosts of the first ranks; negative: that many on hosts of their own.
        """
        ...

    def warnings(self) -> list[str]:
        """Requests outside the known range, in sentences."""
        ...


def seconds(network: Network, move: Move, world_size: int, num_servers: int = 0) -> float:
    """The duration of a move with nothing else in flight."""
    return sum(passage.seconds for passage in network.passages(move, world_size, num_servers))
