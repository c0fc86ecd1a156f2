"""The cost of collectives and messages between GPUs, inside a node and across nodes.

    t = launch + hops + ramp * sqrt(wire bytes) + wire bytes / plateau

wire bytes are what each GPU sends: 2 (n-1)/n of the tensor for an all-reduce, (n-1)/n for an all-gather or a
reduce-scatter. A ring that spans nodes is limited by the NICs of the members in one node together, or by the links
inside it: plateau = min(inside, members per node * NIC).

    hops of a ring of n GPUs on k nodes    (n - k) * inside hop + (k - 1) * between hop, twice for an all-reduce
    hops of a tree                         2 * ((n/k - 1) * inside hop + log2(k) * between hop)

The latency of a hop is that of NCCL's own cost model (NVIDIA/nccl, src/graph/tuning.cc, protocol Simple): 3.4 us
over NVLink and 14 us over the network on a ring. An all-reduce takes the faster of ring and tree, as NCCL does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from laconic.cluster import Cluster
from laconic.errors import ConfigurationError
from laconic.simulator.parallel.measured_collectives import measured_s, measured_system

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


class Members(NamedTuple):
    """A group of GPUs: its size, and the number of members per node."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """The number of nodes they are spread over."""
        return -(-self.size // self.per_node)


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Nodes of GPUs on a fast bus, and a NIC per GPU."""

    gpus_per_node: int = 8
    inside_bytes_per_s: float
    """Plateau of a collective's bus bandwidth inside a node."""
    between_bytes_per_s: float
    """Rate per GPU that its share of the node's NICs reaches."""
    launch_s: float = 0.0
    """Time from the call to the first byte, per operation."""
    inside_hop_s: float = 0.0
    """Latency from GPU to GPU inside a node."""
    between_hop_s: float = 0.0
    """Latency from node to node."""
    partial_share: float = 0.5
    """Share of the NICs' rate for a group with several, but not all, GPUs of each node: a ring enters a node at one GPU
    and leaves at another, so each NIC carries one direction."""
    ramp: float = 0.0
    """Seconds per square root of a byte: how slowly the plateau is reached."""
    measured: str = ""
    """The system whose measured collectives are taken inside a node (measured_collectives.py); default: formulas."""

    def members(self, size: int, stride: int) -> Members:
        """A group of `size` ranks that are `stride` apart; ranks are numbered node by node."""
        return Members(size, max(1, min(size, self.gpus_per_node // stride)))

    def seconds(self, operation: Operation, nbytes: float, members: Members) -> float:
        """Seconds of one operation; `nbytes`: of the full tensor; for an all-to-all, of the tensor of each GPU."""
        size = members.size
        if size == 1 or not nbytes:
            return 0.0
        if operation == "send":
            return self._send_s(nbytes, members)
        if self.measured and members.nodes == 1:
            return measured_s(self.measured, operation, nbytes, size)
        if operation == "all_to_all":
            return self._all_to_all_s(nbytes, members)
        rounds = 2 if operation == "all_reduce" else 1
        wire = rounds * (size - 1) / size * nbytes
        plateau = self.inside_bytes_per_s
        nodes = members.nodes
        hops_s = rounds * ((size - nodes) * self.inside_hop_s + (nodes - 1) * self.between_hop_s)
        if nodes > 1:
            partly = 1 < members.per_node < self.gpus_per_node
            nics = members.per_node * (self.partial_share if partly else 1.0)
            plateau = min(plateau, nics * self.between_bytes_per_s)
            if operation == "all_reduce":
                tree_s = (members.per_node - 1) * self.inside_hop_s + math.log2(nodes) * self.between_hop_s
                hops_s = min(hops_s, 2 * tree_s)
        return self.launch_s + hops_s + self.ramp * math.sqrt(wire) + wire / plateau

    def _send_s(self, nbytes: float, members: Members) -> float:
        if members.nodes > 1:
            return self.launch_s + self.between_hop_s + nbytes / self.between_bytes_per_s
        return self.launch_s + self.inside_hop_s + nbytes / self.inside_bytes_per_s

    def _all_to_all_s(self, nbytes: float, members: Members) -> float:
        """Every pair exchanges directly; messages inside and between nodes run in parallel."""
        size = members.size
        inside = nbytes * (members.per_node - 1) / size / self.inside_bytes_per_s
        between = nbytes * (size - members.per_node) / size / self.between_bytes_per_s
        hops_s = self.between_hop_s if members.nodes > 1 else self.inside_hop_s
        return self.launch_s + hops_s + max(inside, between)

    def dispatch_s(self, nbytes: float, copies: int, members: Members) -> float:
        """Seconds to send tokens of `nbytes` in all, each to `copies` ranks of a group, but to every node at most once.

        A token crosses the network once for each other node that holds one of its experts, k (1 - (1 - 1/k)^copies) of
        k nodes on average, and is passed on inside the node, as DeepEP does.
        """
        if members.size == 1 or not nbytes:
            return 0.0
        nodes = members.nodes
        reached = nodes * (1 - (1 - 1 / nodes) ** copies)
        between = nbytes * reached * (nodes - 1) / nodes / self.between_bytes_per_s
        inside = nbytes * copies * (members.per_node - 1) / members.per_node / self.inside_bytes_per_s
        hops_s = self.inside_hop_s + (self.between_hop_s if nodes > 1 else 0.0)
        return self.launch_s + hops_s + max(inside, between)


IDEAL = Fabric(inside_bytes_per_s=math.inf, between_bytes_per_s=math.inf)
"""A network that costs nothing."""

_NVLINK_HOP_S, _NETWORK_HOP_S = 3.4e-6, 14e-6
_INSIDE_SHARE, _BETWEEN_SHARE = 0.85, 0.9
"""Share of a link's bandwidth that collectives reach; 380 of 450 GB/s on NVLink 4, 226 of 300 on NVLink 3."""


def fabric_of(cluster: Cluster, accelerator: str = "") -> Fabric:
    """The nodes of a cluster, which must be equal and without a bottleneck between them.

    accelerator: its name; measured collectives inside nodes are used where there are any.
    """
    if not cluster.topology.is_nonblocking:
        raise ConfigurationError(
            f'cluster {cluster.name}: the topology "{cluster.topology.kind}" can be a bottleneck, which is not handled '
            "under a parallel plan. Give hosts on one switch or on rails; for several sites, --sites and --uplink."
        )
    if len(set(cluster.links)) > 1 or any(speed != 1.0 for speed in cluster.speeds):
        raise ConfigurationError(f"cluster {cluster.name}: parallel plans need equal hosts.")
    devices = cluster.devices_per_host
    link = cluster.links[0]
    inside = cluster.inside
    return Fabric(
        gpus_per_node=devices,
        inside_bytes_per_s=_INSIDE_SHARE * (math.inf if inside is None else inside.bandwidth_bps / 8),
        between_bytes_per_s=_BETWEEN_SHARE * link.bandwidth_bps * cluster.nics / devices / 8,
        launch_s=20e-6,
        inside_hop_s=0.0 if inside is None else max(_NVLINK_HOP_S, inside.delay_s),
        between_hop_s=max(_NETWORK_HOP_S, 2 * link.delay_s),
        ramp=2.5e-9,
        measured=measured_system(accelerator, inside),
    )


def a100_nodes(nic_bytes_per_s: float, *, share: float = 0.9) -> Fabric:
    """Nodes of 8 A100 on NVLink 3, with a NIC per GPU; collectives reach `share` of its rate.

    Plateau, ramp and launch are fitted to 66 all-reduces of 1 MiB to 1 GiB among 2, 4 and 8 GPUs that were published
    with vTrain (6% on average).
    """
    return Fabric(
        inside_bytes_per_s=226e9,
        between_bytes_per_s=share * nic_bytes_per_s,
        launch_s=25e-6,
        inside_hop_s=_NVLINK_HOP_S,
        between_hop_s=_NETWORK_HOP_S,
        ramp=4.7e-9,
    )


def h100_nodes(nic_bytes_per_s: float, *, share: float = 0.9) -> Fabric:
    """Nodes of 8 H100 on NVLink 4, with a NIC per GPU; collectives reach `share` of its rate.

    The plateau is that of the all-reduces among 8 GPUs that were published with Vidur; the rest is as on A100.
    """
    return Fabric(
        inside_bytes_per_s=380e9,
        between_bytes_per_s=share * nic_bytes_per_s,
        launch_s=20e-6,
        inside_hop_s=_NVLINK_HOP_S,
        between_hop_s=_NETWORK_HOP_S,
        ramp=2.5e-9,
    )
