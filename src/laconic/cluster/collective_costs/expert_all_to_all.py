"""The all-to-all of a mixture of experts: tokens to the GPUs of their experts (dispatch) and back (combine).

A token is sent once to every node that holds one of its experts and is copied there, over NVLink, to every GPU that
does. Two resources bound the time per token, and a start-up with a ramp comes on top:

    copies  = GPUs that a token reaches,   nodes' = nodes that it reaches
    SMs     = token bytes * (copies * gpu_copy + nodes' * node_copy) / SMs          nodes' counts from 2 nodes on
    NIC     = token bytes * nodes' * (N - 1) / N / rate of one NIC                  the rest stays in the node
    time    = tokens * max(SMs, NIC) + start-up + ramp * tokens / (tokens + half)

With k of E experts per token, on G GPUs, drawn regardless of where they are,

    copies = G (1 - C(E - E/G, k) / C(E, k))

and likewise nodes'. Where routing limits a token to `most_nodes` of more nodes (4 in DeepSeek-V3), it takes the nodes
with the best experts, and these experts are then among the k, so the token reaches every node it is limited to.

The constants are from DeepEP's normal kernels on one and two nodes of H100 (8 GPUs, 256 experts, top 8, hidden 7168;
aiconfigurator, wideep_deepep_normal_perf): five plateaus - 20 SMs on one node, 20 on two, for both directions, and 24
SMs on two nodes, where dispatch is bound by the NIC - and start-ups with their ramps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from laconic.errors import UsageError

Direction = Literal["dispatch", "combine"]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Which experts tokens go to, and where those are."""

    gpus: int
    nodes: int
    experts: int = 256
    experts_per_token: int = 8
    most_nodes: int = 4
    """A token goes to experts of at most this many nodes."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus < 1 or self.gpus % self.nodes:
            raise UsageError(f"{self.gpus} GPUs cannot be spread evenly over {self.nodes} nodes.")
        if self.experts < self.gpus or self.experts % self.gpus:
            raise UsageError(
                f"{self.experts} experts cannot be spread evenly over {self.gpus} GPUs. Use a multiple of "
                f"{self.gpus} experts."
            )
        reachable = self.experts // self.nodes * min(self.nodes, self.most_nodes)
        if self.most_nodes < 1 or not 1 <= self.experts_per_token <= reachable:
            raise UsageError(
                f"{self.experts_per_token} experts per token cannot be drawn from {self.experts} experts on at most "
                f"{self.most_nodes} of {self.nodes} nodes."
            )

    @property
    def gpus_reached(self) -> float:
        """The mean number of GPUs that a token is copied to, its own included."""
        used = min(self.nodes, self.most_nodes)
        per_node = self.gpus // self.nodes
        return used * per_node * self._chance(used * per_node)

    @property
    def nodes_reached(self) -> float:
        """The mean number of nodes that a token goes to, its own included."""
        if self.nodes > self.most_nodes:
            return float(min(self.most_nodes, self.experts_per_token))
        return self.nodes * self._chance(self.nodes)

    @property
    def nodes_away(self) -> float:
        """The mean number of other nodes that a token goes to."""
        return self.nodes_reached * (self.nodes - 1) / self.nodes

    def _chance(self, parts: int) -> float:
        """The probability that a token has an expert in one of this many equal parts of its experts."""
        allowed = self.experts // self.nodes * min(self.nodes, self.most_nodes)
        elsewhere = allowed - allowed // parts
        return 1 - math.comb(elsewhere, self.experts_per_token) / math.comb(allowed, self.experts_per_token)


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """The time of a transfer beyond its bytes at the final rate."""

    startup_s: float
    ramp_s: float
    half_tokens: float

    def seconds(self, tokens: float) -> float:
        """The time for this many tokens per GPU."""
        return self.startup_s + self.ramp_s * tokens / (tokens + self.half_tokens)


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    element_bytes: float
    gpu_copy_s: float
    """SM-seconds per byte and GPU reached."""
    node_copy_s: float
    """SM-seconds per byte and node reached, where there are several nodes."""
    inside: Ramp
    between: Ramp


_KERNELS: dict[str, _Kernel] = {
    "dispatch": _Kernel(
        element_bytes=1 + 4 / 128,  # float8 with a float32 scale for every 128
        gpu_copy_s=6.10e-11,
        node_copy_s=5.92e-11,
        inside=Ramp(startup_s=34e-6, ramp_s=0.0, half_tokens=1.0),
        between=Ramp(startup_s=27e-6, ramp_s=40e-6, half_tokens=200.0),
    ),
    "combine": _Kernel(
        element_bytes=2,
        gpu_copy_s=5.47e-11,
        node_copy_s=1.324e-10,
        inside=Ramp(startup_s=49e-6, ramp_s=80e-6, half_tokens=800.0),
        between=Ramp(startup_s=49e-6, ramp_s=300e-6, half_tokens=2000.0),
    ),
}
_NIC_BYTES_PER_S = 44e9


@dataclass(frozen=True, kw_only=True)
class ExpertAllToAll:
    """Times of dispatch and combine on GPUs with a NIC each."""

    routing: Routing
    hidden: int
    sms: int = 20
    """Streaming multiprocessors that the kernels use."""
    nic_bytes_per_s: float = _NIC_BYTES_PER_S
    """The rate of one NIC: of 50 GB/s on the data sheet, 44 were reached."""

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.sms < 1 or self.nic_bytes_per_s <= 0:
            raise UsageError("hidden, sms and nic_bytes_per_s must be positive.")

    def seconds(self, direction: Direction, tokens: int) -> float:
        """The time for `tokens` on every GPU."""
        if tokens < 1:
            raise UsageError(f"the number of tokens must be at least 1, got {tokens}.")
        kernel, routing = _KERNELS[direction], self.routing
        ramp = kernel.inside if routing.nodes == 1 else kernel.between
        return tokens * max(self.sm_s(direction), self.nic_s(direction)) + ramp.seconds(tokens)

    def sm_s(self, direction: Direction) -> float:
        """Seconds per token that copying takes."""
        kernel, routing = _KERNELS[direction], self.routing
        copying = routing.gpus_reached * kernel.gpu_copy_s
        if routing.nodes > 1:
            copying += routing.nodes_reached * kernel.node_copy_s
        return self.hidden * kernel.element_bytes * copying / self.sms

    def nic_s(self, direction: Direction) -> float:
        """Seconds per token that the NIC takes."""
        return self.hidden * _KERNELS[direction].element_bytes * self.routing.nodes_away / self.nic_bytes_per_s
