"""BCube(n, k): n**(k + 1) hosts with k + 1 NICs each, NIC i on a switch of level i with n ports.

A host's number has k + 1 digits to the base n; the hosts on one switch of level i differ in digit i only. A route
corrects one digit after the other, and intermediate hosts forward messages. A hash of the two ends decides which digit
comes first, so that all NICs are used; the others follow downwards, and after digit 0 comes digit k.

Reference: Guo et al. 2009, BCube: A High Performance, Server-centric Network Architecture for Modular Data Centers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from laconic.cluster.fabric import Indices
from laconic.cluster.link_table import LinkTable
from laconic.cluster.topologies.contract import NOT_CROSSED, Messages, Paths, Ports, Topology, lay_nic_links, whole
from laconic.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class BCube(Topology):
    """Hosts with several NICs on small switches of several levels; hosts forward messages."""

    kind: ClassVar[str] = "bcube"

    n: int = whole(least=2)
    """Ports of a switch."""
    k: int = whole(1, least=0, most=15)
    """The highest level; hosts have k + 1 NICs."""

    def check(self, num_hosts: int, nics: int, devices_per_host: int) -> None:
        held = self.n ** (self.k + 1)
        if held != num_hosts:
            raise UsageError(
                f"topology bcube: n = {self.n}, k = {self.k} holds {held} hosts, but there are {num_hosts}. "
                "Change n, k or the number of hosts."
            )
        if nics != self.k + 1:
            raise UsageError(f"topology bcube: with k = {self.k}, nics must be {self.k + 1}, got {nics}.")

    def connect(self, ports: Ports, table: LinkTable) -> Paths:
        levels = self.k + 1
        weights = self.n ** np.arange(levels, dtype=np.int64)

        def switch(host: int, level: int) -> str:
            low, weight = host % int(weights[level]), int(weights[level])
            return f"switch {level}.{host // (weight * self.n) * weight + low}"

        up, down = lay_nic_links(ports, table, switch)

        def paths(messages: Messages) -> list[Indices]:
            columns: list[Indices] = []
            at = messages.source.copy()
            start = messages.choose(levels)
            for turn in range(levels):
                level = (start - turn) % levels
                weight = weights[level]
                change = (messages.destination // weight % self.n - at // weight % self.n) * weight
                columns.append(np.where(change != 0, up + at * levels + level, NOT_CROSSED))
                at = at + change
                columns.append(np.where(change != 0, down + at * levels + level, NOT_CROSSED))
            return columns

        return paths

    def describe(self) -> str:
        return f"bcube of n = {self.n}, k = {self.k}"
