"""Leaf switches under spine switches, and with a third level pods of those under core switches.

    cables of a leaf    = round(hosts_per_leaf * nics / oversubscription), one to each spine switch
    bandwidth of each   = hosts_per_leaf * nics * bandwidth of a host's link / oversubscription / cables

Each message takes one spine (and core) switch, chosen by a hash of its two ends as ECMP does: flows may share one
cable while another is idle.

Reference: Al-Fares et al. 2008, A Scalable, Commodity Data Center Network Architecture.
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
    whole,
)
from laconic.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class FatTree(Topology):
    """Leaf switches with hosts, joined by spine switches; optionally pods of leaves, joined by core switches."""

    kind: ClassVar[str] = "fat_tree"

    hosts_per_leaf: int = whole()
    """Hosts on one leaf switch, with all their NICs."""
    oversubscription: float = number(1.0, least=0.01, most=1000)
    """Bandwidth of the hosts of a leaf, divided by the bandwidth of its cables to spine switches."""
    spines: int | None = whole(None)
    """Spine switches (in each pod), one cable to each from every leaf; None: so many that a cable is like a host's."""
    leaves_per_pod: int | None = whole(None)
    """None: two levels, every spine switch joins all leaves."""
    pod_oversubscription: float = number(1.0, least=0.01, most=1000)
    """Bandwidth from the leaves of a pod to its spine switches, divided by the bandwidth out of the pod."""
    delay_s: float = seconds()
    """Delay of every cable between switches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.leaves_per_pod is None and self.pod_oversubscription != 1.0:
            raise UsageError("topology fat_tree: pod_oversubscription has no effect without leaves_per_pod.")

    def connect(self, ports: Ports, table: LinkTable) -> Paths:
        per_leaf = self.hosts_per_leaf
        leaves = -(-ports.num_hosts // per_leaf)
        spines = self.spines or max(1, round(per_leaf * ports.nics / self.oversubscription))
        capacity = per_leaf * ports.nics * ports.usual.bytes_per_s / self.oversubscription / spines
        per_pod = self.leaves_per_pod or leaves
        pods = -(-leaves // per_pod)
        cores = max(1, round(per_pod / self.pod_oversubscription))  # above each spine switch of a pod
        core_capacity = per_pod * capacity / self.pod_oversubscription / cores

        def spine(leaf: int, index: int) -> str:
            return f"spine {index}" if pods == 1 else f"pod {leaf // per_pod}, spine {index}"

        up, down = lay_nic_links(ports, table, lambda host, nic: f"leaf {host // per_leaf}")
        # Number leaf * spines + s: the cable between a leaf and spine switch s of its pod.
        rise = table.add_alike(
            leaves * spines,
            capacity,
            self.delay_s,
            lambda at: f"leaf {at // spines} -> {spine(at // spines, at % spines)}",
        )
        fall = table.add_alike(
            leaves * spines,
            capacity,
            self.delay_s,
            lambda at: f"{spine(at // spines, at % spines)} -> leaf {at // spines}",
        )
        # Number (pod * spines + s) * cores + c: between spine switch s of a pod and the core switch c above all s.
        num_tops = pods * spines * cores if pods > 1 else 0

        def ends(at: int) -> tuple[str, str]:
            low, core = divmod(at, cores)
            return f"pod {low // spines}, spine {low % spines}", f"core {low % spines}.{core}"

        climb = table.add_alike(num_tops, core_capacity, self.delay_s, lambda at: " -> ".join(ends(at)))
        dive = table.add_alike(num_tops, core_capacity, self.delay_s, lambda at: " -> ".join(reversed(ends(at))))

        def paths(messages: Messages) -> list[Indices]:
            here, there = messages.source // per_leaf, messages.destination // per_leaf
            chosen = messages.choose(spines)
            columns = [
                up + messages.source * ports.nics + messages.source_nic,
                np.where(here != there, rise + here * spines + chosen, NOT_CROSSED),
                np.where(here != there, fall + there * spines + chosen, NOT_CROSSED),
                down + messages.destination * ports.nics + messages.destination_nic,
            ]
            if pods > 1:
                from_pod, to_pod, core = here // per_pod, there // per_pod, messages.choose(cores, level=1)
                top = [(from_pod * spines + chosen) * cores + core, (to_pod * spines + chosen) * cores + core]
                columns[2:2] = [
                    np.where(from_pod != to_pod, climb + top[0], NOT_CROSSED),
                    np.where(from_pod != to_pod, dive + top[1], NOT_CROSSED),
                ]
            return columns

        return paths

    @property
    def is_nonblocking(self) -> bool:
        """Flows that meet on one spine switch are left to the flow simulator."""
        return self.oversubscription <= 1 and self.pod_oversubscription <= 1

    def describe(self) -> str:
        pods = (
            f", pods of {self.leaves_per_pod} leaves at {self.pod_oversubscription:g}:1" if self.leaves_per_pod else ""
        )
        return f"fat tree, {self.hosts_per_leaf} hosts per leaf, {self.oversubscription:g}:1{pods}"
