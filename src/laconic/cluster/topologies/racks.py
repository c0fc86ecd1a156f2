"""Racks, or sites, each behind an uplink of its own. In a cluster file they are [[rack]] tables:

[[rack]]
hosts = 2                        # so many, or which ones: [0, 2]
uplink = "50mbit"
delay = "5ms"                    # of the uplink; with loss likewise
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import numpy as np

from laconic.cluster.fabric import Indices
from laconic.cluster.link import Link
from laconic.cluster.link_table import LinkTable
from laconic.cluster.topologies.contract import NOT_CROSSED, Messages, Paths, Ports, Topology, lay_nic_links
from laconic.errors import UsageError

_MOST_SHOWN = 16
"""Hosts named one by one in a description."""


@dataclass(frozen=True, kw_only=True)
class Racks(Topology):
    """Hosts on the switches of racks, each of which has an uplink to a core that never is the bottleneck.

    Give `sizes` or `members`; the other follows.
    """

    kind: ClassVar[str] = "racks"
    in_lab: ClassVar[bool] = True

    sizes: tuple[int, ...] = ()
    """Hosts in each rack; with these alone, the first hosts are in the first rack."""
    uplinks: tuple[Link, ...]
    """One per rack."""
    members: tuple[tuple[int, ...], ...] = ()
    """The hosts of each rack, in ascending order."""

    def __post_init__(self) -> None:
        sizes = self.sizes or tuple(map(len, self.members))
        if not sizes or len(sizes) != len(self.uplinks) or min(sizes) < 1:
            raise UsageError(
                f"racks need an uplink each and at least one host each, got {len(self.uplinks)} uplinks and racks of "
                f"{list(sizes)[:20]} hosts."
            )
        ends = accumulate(sizes)
        members = self.members or tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))
        members = tuple(tuple(sorted(rack)) for rack in members)
        if sizes != tuple(map(len, members)):
            raise UsageError(f"sizes says {list(sizes)[:20]} hosts per rack, but members lists {list(members)[:8]}.")
        if sorted(host for rack in members for host in rack) != list(range(sum(sizes))):
            raise UsageError(
                f"racks must name each of the hosts 0 to {sum(sizes) - 1} once, got {[list(rack) for rack in members]}."
            )
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "members", members)

    @classmethod
    def alike(cls, num_hosts: int, num_racks: int, link: Link, *, oversubscription: float, in_turn: bool) -> Racks:
        """Racks of equally many hosts with such links, whose uplinks carry a share of what their hosts can send.

            bandwidth of an uplink = hosts of the rack x bandwidth of a host's link / oversubscription

        in_turn: host h is in rack h mod num_racks, as schedulers unaware of racks may place ranks; else neighbours
        share a rack.
        """
        if not 1 <= num_racks <= num_hosts or num_hosts % num_racks:
            raise UsageError(f"{num_hosts} hosts cannot fill {num_racks} racks evenly. Give a divisor of {num_hosts}.")
        if not 0.01 <= oversubscription <= 1000:
            raise UsageError(f"oversubscription must be a number from 0.01 to 1000, got {oversubscription:g}.")
        each = num_hosts // num_racks
        uplink = Link(bandwidth_bps=link.bandwidth_bps * each / oversubscription)
        if in_turn:
            members = tuple(tuple(range(rack, num_hosts, num_racks)) for rack in range(num_racks))
            return cls(members=members, uplinks=(uplink,) * num_racks)
        return cls(sizes=(each,) * num_racks, uplinks=(uplink,) * num_racks)

    @property
    def is_in_order(self) -> bool:
        """Whether the first hosts are in the first rack, and so on."""
        return [host for rack in self.members for host in rack] == list(range(sum(self.sizes)))

    @property
    def rack_of(self) -> tuple[int, ...]:
        """The rack of each host."""
        placed = sorted((host, number) for number, rack in enumerate(self.members) for host in rack)
        return tuple(number for _, number in placed)

    def check(self, num_hosts: int, nics: int, devices_per_host: int) -> None:
        super().check(num_hosts, nics, devices_per_host)
        if sum(self.sizes) != num_hosts:
            raise UsageError(
                f"the racks hold {sum(self.sizes)} hosts, but there are {num_hosts}. Change one of the two."
            )

    def connect(self, ports: Ports, table: LinkTable) -> Paths:
        rack_of = np.array(self.rack_of, dtype=np.int64)
        up, down = lay_nic_links(ports, table, lambda host, nic: f"rack {rack_of[host]}")
        capacity = np.array([link.bytes_per_s for link in self.uplinks])
        delay_s = np.array([link.delay_s for link in self.uplinks])
        out = table.add(capacity, delay_s, lambda rack: f"rack {rack} -> core")
        back = table.add(capacity, delay_s, lambda rack: f"core -> rack {rack}")

        def paths(messages: Messages) -> list[Indices]:
            here, there = rack_of[messages.source], rack_of[messages.destination]
            leaves = here != there
            return [
                up + messages.source * ports.nics + messages.source_nic,
                np.where(leaves, out + here, NOT_CROSSED),
                np.where(leaves, back + there, NOT_CROSSED),
                down + messages.destination * ports.nics + messages.destination_nic,
            ]

        return paths

    def describe(self) -> str:
        racks = f"{len(self.uplinks)} racks behind {', '.join(map(str, self.uplinks))}"
        if self.is_in_order or sum(self.sizes) > _MOST_SHOWN:
            return racks
        return f"{racks}: hosts {' | '.join(' '.join(map(str, rack)) for rack in self.members)}"
