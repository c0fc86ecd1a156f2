"""All hosts on one switch that never is the bottleneck."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.cluster.fabric import Indices
from laconic.cluster.link_table import LinkTable
from laconic.cluster.topologies.contract import Messages, Paths, Ports, Topology, lay_nic_links


@dataclass(frozen=True, kw_only=True)
class Switch(Topology):
    """All hosts on one switch: only their own links limit them."""

    kind: ClassVar[str] = "switch"
    in_lab: ClassVar[bool] = True

    def connect(self, ports: Ports, table: LinkTable) -> Paths:
        up, down = lay_nic_links(ports, table, lambda host, nic: "switch")

        def paths(messages: Messages) -> list[Indices]:
            return [
                up + messages.source * ports.nics + messages.source_nic,
                down + messages.destination * ports.nics + messages.destination_nic,
            ]

        return paths

    @property
    def is_nonblocking(self) -> bool:
        return True

    def describe(self) -> str:
        return ""
