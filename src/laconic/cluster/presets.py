"""Clusters known by a name. Bandwidths are those of public data sheets and standards; delays are assumptions.

delay of a link between hosts    25 us: a small message over kernel TCP crosses two in some 50 us
                                  2 us: over InfiniBand or RDMA
delay inside a host               1 us
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from laconic.cluster.cluster import Cluster, check_num_hosts
from laconic.cluster.link import Link
from laconic.cluster.topologies import Racks, Rail
from laconic.errors import UsageError, did_you_mean, one_line

_TCP_S, _RDMA_S, _INSIDE_S = 25e-6, 2e-6, 1e-6
_TCP_ASSUMED = "the delay of 25 us per link is assumed."


@dataclass(frozen=True)
class Preset:
    """A known cluster, with any number of hosts."""

    make: Callable[[int], Cluster]
    """Makes the cluster with this many hosts."""
    hosts: int
    """Number of hosts by default."""
    about: str
    """In a few words."""


def _ethernet(gbit: float, standard: str) -> Callable[[int], Cluster]:
    def make(hosts: int) -> Cluster:
        uniform = Cluster.uniform(hosts, Link(bandwidth_bps=gbit * 1e9, delay_s=_TCP_S))
        return replace(uniform, source=f"{gbit:g} Gbit/s as in {standard}; {_TCP_ASSUMED}")

    return make


def _cloud_100g(hosts: int) -> Cluster:
    return Cluster(
        links=(Link(bandwidth_bps=100e9, delay_s=_TCP_S),) * hosts,
        devices_per_host=8,
        inside=Link(bandwidth_bps=1200e9, delay_s=_INSIDE_S),
        source="100 Gbit/s per host and NVLink 2 with 300 GB/s per V100, both directions together, as Amazon states "
        f"for p3dn.24xlarge; {_TCP_ASSUMED}",
    )


def _dgx_h100(hosts: int) -> Cluster:
    return Cluster(
        links=(Link(bandwidth_bps=400e9, delay_s=_RDMA_S),) * hosts,
        devices_per_host=8,
        inside=Link(bandwidth_bps=3600e9, delay_s=_INSIDE_S),
        nics=8,
        topology=Rail(oversubscription=1.0, delay_s=_INSIDE_S),
        source="Eight ConnectX-7 with 400 Gbit/s each and NVLink 4 with 900 GB/s per GPU, both directions together, "
        "as in NVIDIA's data sheet of DGX H100; rails without oversubscription and delays of 1 to 2 us are assumed.",
    )


def _pcie_box(hosts: int) -> Cluster:
    return Cluster(
        links=(Link(bandwidth_bps=10e9, delay_s=_TCP_S),) * hosts,
        devices_per_host=8,
        # 16 lanes of 16 GT/s, of which 128 bits in 130 are data: 31.5 GB/s.
        inside=Link(bandwidth_bps=252e9, delay_s=_INSIDE_S),
        source="PCIe 4.0 with 16 lanes per device, 31.5 GB/s per direction after encoding; 10 Gbit/s Ethernet between "
        f"hosts, if there are several, and {_TCP_ASSUMED}",
    )


def _two_sites(hosts: int) -> Cluster:
    if hosts < 2:
        raise UsageError(f"two-sites needs at least 2 hosts, got {hosts}.")
    return Cluster(
        links=(Link(bandwidth_bps=10e9, delay_s=_TCP_S),) * hosts,
        topology=Racks(sizes=(hosts - hosts // 2, hosts // 2), uplinks=(Link(bandwidth_bps=1e9, delay_s=0.005),) * 2),
        source="Made up as an example: 10 Gbit/s Ethernet on two sites, 1 Gbit/s and 10 ms between them.",
    )


PRESETS: dict[str, Preset] = {
    "ethernet-1g": Preset(_ethernet(1, "IEEE 802.3ab (1000BASE-T)"), 8, "hosts on 1 Gbit/s Ethernet"),
    "ethernet-10g": Preset(_ethernet(10, "IEEE 802.3ae"), 8, "hosts on 10 Gbit/s Ethernet"),
    "ethernet-25g": Preset(_ethernet(25, "IEEE 802.3by"), 8, "hosts on 25 Gbit/s Ethernet"),
    "cloud-100g": Preset(_cloud_100g, 4, "8 V100 per host with NVLink, 100 Gbit/s per host"),
    "dgx-h100": Preset(_dgx_h100, 4, "8 H100 per host with NVLink, 8 rails of 400 Gbit/s"),
    "pcie-box": Preset(_pcie_box, 1, "8 GPUs on PCIe 4.0, no NVLink"),
    "two-sites": Preset(_two_sites, 8, "two sites behind 1 Gbit/s and 10 ms"),
}
"""The known clusters by name."""


def cluster(name_or_path: str | Path, hosts: int | None = None) -> Cluster:
    """The known cluster of that name, or the cluster in a .toml file; with this many hosts, if given."""
    text = str(name_or_path)
    preset = PRESETS.get(text)
    if preset is not None:
        if hosts is not None:
            check_num_hosts(hosts)
        made = preset.make(preset.hosts if hosts is None else hosts)
        return replace(made, name=text)
    path = Path(name_or_path)
    if path.suffix.lower() == ".toml":
        loaded = Cluster.load(path)
        named = replace(loaded, name=loaded.name or path.stem)
        return named if hosts is None else named.resized(hosts)
    raise UsageError(
        f'there is no cluster "{one_line(text, 80)}". {did_you_mean(text, PRESETS)} '
        "Or give a .toml file that describes one (docs/clusters.md)."
    )
