"""Groups of routers: every router is joined to all others of its group, and every group to all others.

Routes are minimal: to the router of the own group that holds a cable to the other group, over that cable, then to the
destination's router. Of several cables between two groups, a hash of the two ends selects one.

    cable c from group a to group b leaves router (((b - a - 1) mod groups) * cables + c) mod routers of group a

Reference: Kim et al. 2008, Technology-Driven, Highly-Scalable Dragonfly Topology.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from laconic.cluster.fabric import Indices
from laconic.cluster.link import Link
from laconic.cluster.link_table import LinkTable
from laconic.cluster.topologies.contract import (
    NOT_CROSSED,
    Messages,
    Paths,
    Ports,
    Topology,
    lay_nic_links,
    rate,
    seconds,
    whole,
)
from laconic.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Dragonfly(Topology):
    """Groups of routers, every two of them joined, in a group and between groups; minimal routes."""

    kind: ClassVar[str] = "dragonfly"

    groups: int = whole(most=1024)
    routers: int = whole(most=1024)
    """Routers in each group."""
    hosts_per_router: int = whole()
    cables: int = whole(1, most=1024)
    """Cables between every two groups."""
    local_bps: float | None = rate()
    """Bandwidth of a cable between two routers of a group; None: as a host's link."""
    between_bps: float | None = rate()
    """Bandwidth of a cable between groups; None: as a host's link."""
    delay_s: float = seconds()
    """Delay of every cable between routers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for bandwidth_bps in (self.local_bps, self.between_bps):
            if bandwidth_bps is not None:
                Link(bandwidth_bps=bandwidth_bps)  # its bounds are those of any link

    def check(self, num_hosts: int, nics: int, devices_per_host: int) -> None:
        super().check(num_hosts, nics, devices_per_host)
        held = self.groups * self.routers * self.hosts_per_router
        if held < num_hosts:
            raise UsageError(
                f"topology dragonfly: {self.groups} groups x {self.routers} routers x {self.hosts_per_router} hosts "
                f"hold {held} hosts, but there are {num_hosts}. Give more groups, routers or hosts_per_router."
            )

    def connect(self, ports: Ports, table: LinkTable) -> Paths:
        groups, routers, cables, per_router = self.groups, self.routers, self.cables, self.hosts_per_router
        local = ports.usual.bytes_per_s if self.local_bps is None else self.local_bps / 8
        between = ports.usual.bytes_per_s if self.between_bps is None else self.between_bps / 8

        def router(host: int) -> str:
            group, place = divmod(host // per_router, routers)
            return f"router {group}.{place}"

        def local_name(at: int) -> str:
            group, pair = divmod(at, routers * routers)
            return f"router {group}.{pair // routers} -> router {group}.{pair % routers}"

        def global_name(at: int) -> str:
            pair, cable = divmod(at, cables)
            here, there = divmod(pair, groups)
            ends = int(gate(here, there, cable)), int(gate(there, here, cable))
            return f"router {here}.{ends[0]} -> router {there}.{ends[1]}"

        def gate(here: Indices | int, there: Indices | int, cable: Indices | int) -> Indices | int:
            """The router of group `here` that holds this cable to group `there`."""
            return ((there - here - 1) % groups * cables + cable) % routers

        up, down = lay_nic_links(ports, table, lambda host, nic: router(host))
        # Number (group * routers + from) * routers + to; those from a router to itself are never used.
        mesh = table.add_alike(groups * routers * routers, local, self.delay_s, local_name)
        # Number (from group * groups + to group) * cables + cable; likewise.
        far = table.add_alike(groups * groups * cables, between, self.delay_s, global_name)

        def hop(group: Indices, start: Indices, end: Indices) -> Indices:
            return np.where(start != end, mesh + (group * routers + start) * routers + end, NOT_CROSSED)

        def paths(messages: Messages) -> list[Indices]:
            here, start = np.divmod(messages.source // per_router, routers)
            there, end = np.divmod(messages.destination // per_router, routers)
            cable = messages.choose(cables)
            leaves = here != there
            # Within a group both gates are the destination's router: one hop, then none.
            exits = np.where(leaves, gate(here, there, cable), end)
            enters = np.where(leaves, gate(there, here, cable), end)
            return [
                up + messages.source * ports.nics + messages.source_nic,
                hop(here, start, exits),
                np.where(leaves, far + (here * groups + there) * cables + cable, NOT_CROSSED),
                hop(there, enters, end),
                down + messages.destination * ports.nics + messages.destination_nic,
            ]

        return paths

    def describe(self) -> str:
        return f"dragonfly of {self.groups} groups x {self.routers} routers x {self.hosts_per_router} hosts"
