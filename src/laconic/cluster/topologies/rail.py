"""Rail-optimised: NIC i of every host on rail switch i, and a spine that joins the rails.

Devices with the same place in their hosts reach each other through one switch; others cross the spine. The cables from
a rail switch to the spine count as one: several spine switches are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from laconic.cluster.fabric import Indices
from laconic.cluster.link_table import LinkTable
from laconic.cluster.topologies.contract import (
    NOT_CROSSED,
    Messages,
    Paths,
    Ports,
    Topology,
    lay_nic_links,
    number,
    seconds,
)
from laconic.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Rail(Topology):
    """One switch per NIC of a host, joined by a spine."""

    kind: ClassVar[str] = "rail"

    oversubscription: float = number(1.0, least=0.01, most=1000)
    """Bandwidth of all hosts into a rail, divided by the bandwidth from the rail to other rails."""
    delay_s: float = seconds()
    """Delay of the cables between rail switches and spine."""

    def check(self, num_hosts: int, nics: int, devices_per_host: int) -> None:
        super().check(num_hosts, nics, devices_per_host)
        if nics > devices_per_host:
            raise UsageError(
                f"topology rail: every NIC belongs to a device, but there are {nics} NICs and {devices_per_host} "
                "devices per host. Give at most one NIC per device."
            )

    def connect(self, ports: Ports, table: LinkTable) -> Paths:
        up, down = lay_nic_links(ports, table, lambda host, nic: f"rail {nic}")
        capacity = ports.num_hosts * ports.usual.bytes_per_s / self.oversubscription
        rise = table.add_alike(ports.nics, capacity, self.delay_s, lambda rail: f"rail {rail} -> spine")
        fall = table.add_alike(ports.nics, capacity, self.delay_s, lambda rail: f"spine -> rail {rail}")

        def paths(messages: Messages) -> list[Indices]:
            changes = messages.source_nic != messages.destination_nic
            return [
                up + messages.source * ports.nics + messages.source_nic,
                np.where(changes, rise + messages.source_nic, NOT_CROSSED),
                np.where(changes, fall + messages.destination_nic, NOT_CROSSED),
                down + messages.destination * ports.nics + messages.destination_nic,
            ]

        return paths

    @property
    def is_nonblocking(self) -> bool:
        return self.oversubscription <= 1

    def describe(self) -> str:
        return f"rails joined by a spine at {self.oversubscription:g}:1"
