"""The time that crossing nodes adds to a collective operation.

    time = max(inside one node, bytes over a node's boundary / rate of its NICs) + hops * time of a hop

The parts overlap, because libraries cut buffers into pieces and forward them while others arrive. A ring crosses the
boundary of each node once, so as many bytes leave a node as one GPU sends, however many GPUs the node has. In an
all-to-all, each GPU of a node sends a part of its own, and the share with a destination on another node leaves.

    hops    all_reduce               2 log2(nodes)     a tree, which libraries use where start-up counts
            all_gather, others       nodes - 1
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from laconic.cluster.collective_costs.operations import Operation
from laconic.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class NodeLink:
    """The NICs of one node."""

    nics: int
    nic_bytes_per_s: float
    """The rate of one NIC as on the data sheet, in one direction."""
    efficiency: float = 0.94
    """Share of this rate that large messages reach; NVIDIA expects 46 to 48 GB/s of 50 (nccl-tests, issue 290)."""
    hop_s: float = 8e-6
    """Latency to a GPU on another node; NCCL's cost model counts 2.7 us to 9.6 us, depending on the protocol."""

    def __post_init__(self) -> None:
        if self.nics < 1:
            raise UsageError(f"a node needs at least 1 NIC, got {self.nics}.")
        if not (self.nic_bytes_per_s > 0 and 0 < self.efficiency <= 1 and self.hop_s >= 0):
            raise UsageError("the rate of a NIC must be positive, its efficiency in (0, 1] and hop_s not negative.")

    def bytes_per_s(self, gpus_per_node: int) -> float:
        """The combined rate of the NICs that these GPUs use; a single GPU uses one."""
        return min(self.nics, gpus_per_node) * self.nic_bytes_per_s * self.efficiency


def between_s(operation: Operation, nbytes: float, gpus: int, nodes: int, link: NodeLink) -> float:
    """The time for bytes across the boundary of a node, without hops."""
    leaving = operation.sent_bytes(nbytes, gpus)
    if operation.name == "all_to_all":
        leaving = nbytes * (nodes - 1) / nodes * (gpus // nodes)
    return leaving / link.bytes_per_s(1 if operation.name == "send" else gpus // nodes)


def hops_s(operation: Operation, nodes: int, link: NodeLink) -> float:
    """The time that messages take to reach the farthest node."""
    if operation.name == "send":
        return link.hop_s
    hops = 2 * math.log2(nodes) if operation.name == "all_reduce" else nodes - 1
    return hops * link.hop_s
