"""Systems whose collective operations were measured: the curves, and the facts that extrapolation needs.

The times are in systems.json, at every second of the measured sizes (powers of four from 512 B to 512 MiB);
`python -m benchmarks.fit_collectives FILE` writes it from the published table and prints the errors at the sizes left
out. Source: NVIDIA aiconfigurator, systems/data/<system>/comm, nccl-tests and oneCCL's benchmark, out of place, half
precision (github.com/ai-dynamo/aiconfigurator, Apache-2.0).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from laconic.cluster.collective_costs.between_nodes import NodeLink
from laconic.cluster.collective_costs.curve import SizeCurve
from laconic.errors import UsageError, did_you_mean, one_line


class SystemFacts(NamedTuple):
    """Facts that no curve shows."""

    in_switch_ratio: float
    node_link: NodeLink | None


_HOPPER, _BLACKWELL = 0.85, 0.74
"""The share of its rate that NVLink keeps when switches add up, from NCCL's own cost model (nvlsEfficiency)."""
_NDR = NodeLink(nics=8, nic_bytes_per_s=50e9)
_HDR = NodeLink(nics=8, nic_bytes_per_s=25e9)
FACTS: Mapping[str, SystemFacts] = {
    "a100_sxm": SystemFacts(0.0, _HDR),
    "h100_sxm": SystemFacts(_HOPPER, _NDR),
    "h200_sxm": SystemFacts(_HOPPER, _NDR),
    "b200_sxm": SystemFacts(_BLACKWELL, _NDR),
    "b300_sxm": SystemFacts(_BLACKWELL, NodeLink(nics=8, nic_bytes_per_s=100e9)),
    "gb200": SystemFacts(_BLACKWELL, NodeLink(nics=4, nic_bytes_per_s=50e9)),
    "gb300": SystemFacts(_BLACKWELL, NodeLink(nics=4, nic_bytes_per_s=100e9)),
    "l40s": SystemFacts(0.0, None),
    "rtx_pro_6000_server": SystemFacts(0.0, None),
    "b60": SystemFacts(0.0, None),
}
"""NICs as in NVIDIA's reference designs: one per GPU, HDR, NDR or XDR InfiniBand."""


@dataclass(frozen=True, kw_only=True)
class System:
    """GPUs on one switch or bus, and the NICs of a node."""

    name: str
    curves: Mapping[str, Mapping[int, SizeCurve]]
    """operation -> number of GPUs -> times by size."""
    in_switch_ratio: float = 0.0
    """Rate at which switches add up (NVLink SHARP), relative to that of a ring; 0: they cannot."""
    node_link: NodeLink | None = None
    """The NICs of a node; None: nothing is known about several nodes."""
    source: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.in_switch_ratio <= 1:
            raise UsageError(f"in_switch_ratio must be from 0 to 1, got {self.in_switch_ratio:g}.")
        for operation, by_gpus in self.curves.items():
            if not by_gpus or min(by_gpus) < 2:
                raise UsageError(f"{self.name}: {operation} needs a curve among at least 2 GPUs.")


def system_names() -> list[str]:
    """Every system that comes with the package."""
    return list(FACTS)


@cache
def system(name: str) -> System:
    """The measured system of that name."""
    if name not in FACTS:
        raise UsageError(f'there is no measured system "{one_line(name, 40)}". {did_you_mean(name, FACTS)}')
    document = json.loads(
        files("laconic.cluster.collective_costs").joinpath("systems.json").read_text(encoding="utf-8")
    )
    return System(
        name=name,
        curves=read_curves(document["systems"][name]),
        in_switch_ratio=FACTS[name].in_switch_ratio,
        node_link=FACTS[name].node_link,
        source=document["source"],
    )


def read_curves(entry: Mapping[str, Mapping[str, Mapping[str, list[float]]]]) -> dict[str, dict[int, SizeCurve]]:
    """The curves of one system in systems.json: each has its smallest size, and every next one is four times that."""
    curves: dict[str, dict[int, SizeCurve]] = {}
    for operation, by_gpus in entry.items():
        curves[operation] = {}
        for gpus, points in by_gpus.items():
            ((smallest, microseconds),) = points.items()
            sizes = [int(smallest) * 4**index for index in range(len(microseconds))]
            curves[operation][int(gpus)] = SizeCurve.fitted(sizes, [1e-6 * time for time in microseconds])
    return curves
