"""Racks, or sites, each behind an uplink of its own. In a cluster file they are [[rack]] tables:

[[rack]]
hosts = 2
uplink = "50mbit"
delay = "5ms"                    # of the uplink; with loss likewise
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from laconic.cluster.fabric import Indices
from laconic.cluster.link import Link
from laconic.cluster.link_table import LinkTable
from laconic.cluster.topologies.contract import NOT_CROSSED, Messages, Paths, Ports, Topology, lay_nic_links
from laconic.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Racks(Topology):
    """Hosts on the switches of racks, each of which has an uplink to a core that never is the bottleneck."""

    kind: ClassVar[str] = "racks"
    in_lab: ClassVar[bool] = True

    sizes: tuple[int, ...]
    """Hosts in each rack; the first hosts are in the first rack."""
    uplinks: tuple[Link, ...]
    """One per rack."""

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.uplinks) or min(self.sizes) < 1:
            raise UsageError(
                f"racks need an uplink each and at least one host each, got {len(self.uplinks)} uplinks and racks of "
                f"{list(self.sizes)[:20]} hosts."
            )

    @property
    def rack_of(self) -> tuple[int, ...]:
        """The rack of each host."""
        return tuple(rack for rack, size in enumerate(self.sizes) for _ in range(size))

    def check(self, num_hosts: int, nics: int, devices_per_host: int) -> None:
        """See Topology."""
        super().check(num_hosts, nics, devices_per_host)
        if sum(self.sizes) != num_hosts:
            raise UsageError(f"the racks hold {sum(self.sizes)} hosts, but there are {num_hosts}. Correct either.")

    def connect(self, ports: Ports, table: LinkTable) -> Paths:
        """See Topology."""
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
        """See Topology."""
        return f"{len(self.uplinks)} racks behind {', '.join(map(str, self.uplinks))}"
