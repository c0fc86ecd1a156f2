"""The description of an all-reduce algorithm: its rows, its formula, and where it is of use.

The formula predicts the cost of an algorithm among any number of ranks without its rows:

    t = sum over legs of   num_steps alpha + serial_ratio N beta      alpha: per message, beta: per byte, of the links
                                                                      that the messages of this leg share
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from laconic.collectives.schedule import Collective, renumbered
from laconic.core.hosts import Hosts

Pattern = Literal["shift", "swap", "inside"]
"""Who sends to whom in one step. shift: rank r to rank r + distance. swap: ranks that differ in the binary digit
`distance`. inside: each rank to the next one of its host, which has `distance` ranks."""


@dataclass(frozen=True)
class Leg:
    """Steps that send between the same pairs of ranks."""

    num_steps: int
    serial_ratio: float
    """Bytes that cross the busiest rank's link one after the other, as a multiple of N."""
    pattern: Pattern = "shift"
    distance: int = 1
    every: int = 1
    """For a shift: only the first of every so many ranks takes part, and distances count only those."""


@dataclass(frozen=True)
class Formula:
    """The legs of an algorithm, one after the other."""

    legs: tuple[Leg, ...] = ()
    first_half: float = 0.5
    """The fraction of its steps and bytes until every rank has its share of the sum."""

    @property
    def num_steps(self) -> int:
        """The steps of all legs together."""
        return sum(leg.num_steps for leg in self.legs)

    @property
    def serial_ratio(self) -> float:
        """The sum over all legs."""
        return sum(leg.serial_ratio for leg in self.legs)


def fits(hosts: Hosts) -> str | None:
    """None: the algorithm fits any hosts."""
    return None


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One way to form a sum over all ranks."""

    name: str
    rows: Callable[[Hosts], Collective]
    """The collective for ranks on these hosts, or in these groups; it takes ranks in the order in which they come."""
    formula: Callable[[int, int], Formula]
    """Its cost among so many ranks, at least two, with so many on each host except perhaps the last."""
    by_host: bool = False
    """Who sends to whom depends on which ranks share a host."""
    same_messages: bool = False
    """Every step sends the same messages, each rank to the next, so that all steps can be taken as one."""
    least_ranks: int = 3
    """With fewer ranks it does the same as another algorithm, only slower."""
    unfit: Callable[[Hosts], str | None] = fits
    """Why it would be the same as another algorithm on these hosts; None if it would not."""

    def __call__(self, hosts: Hosts) -> Collective:
        """The collective for ranks on these hosts."""
        return self.rows(hosts)

    def cost(self, world_size: int, ranks_per_host: int = 1) -> Formula:
        """Its cost; nothing for a single rank."""
        return self.formula(world_size, ranks_per_host) if world_size > 1 else Formula()


def anywhere(make: Callable[[int], Collective]) -> Callable[[Hosts], Collective]:
    """Rows that do not depend on who shares a host, only on the order of ranks."""
    return lambda hosts: renumbered(make(sum(map(len, hosts))), tuple(rank for host in hosts for rank in host))
