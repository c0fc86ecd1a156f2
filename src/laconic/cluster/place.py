"""A cluster by name or from a file, with some of its figures replaced, as in a sweep."""

from __future__ import annotations

from dataclasses import dataclass, replace

from laconic.cluster.cluster import Cluster
from laconic.cluster.link import Link, usual_link
from laconic.cluster.presets import PRESETS, cluster
from laconic.errors import UsageError
from laconic.units import format_rate

_PCIE_BPS, _INSIDE_S = 252e9, 1e-6
"""16 lanes of PCIe 4.0, and the delay that known clusters have inside a host."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A cluster and a number of workers to simulate on."""

    cluster: Cluster
    workers: int
    """Ranks, on the first devices of the cluster."""
    bandwidth_bps: float
    """Bandwidth of the hosts' links, which distinguishes this cluster from others in the sweep."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The cluster to simulate; fields left out keep the cluster's values."""

    cluster: str = "ethernet-10g"
    """The name of a known cluster, or a .toml file."""
    hosts: int | None = None
    devices: int | None = None
    """Devices per host."""
    bandwidth_bps: float | None = None
    """Bandwidth of every host's links to the network."""
    delay_s: float | None = None
    """Latency of every host's links to the network."""
    inside_bps: float | None = None
    """Bandwidth between devices of one host."""

    def setting(self, workers: int | None = None) -> Setting:
        """The cluster for this many workers; all its devices if left out.

        Without a number of hosts, a known cluster gets as many as the workers need; one from a file grows if it must.
        """
        made = self._sized(workers)
        if workers is None:
            workers = made.num_devices
        if workers > made.num_devices:
            raise UsageError(
                f"{workers} workers need as many devices, but {made.num_hosts} hosts with {made.devices_per_host} each "
                f"have {made.num_devices}. Give more --hosts or --devices, or leave --hosts out."
            )
        return Setting(cluster=made, workers=workers, bandwidth_bps=usual_link(made.links).bandwidth_bps)

    def notes(self) -> list[str]:
        """Assumptions made, and measurements not used, because figures were replaced."""
        base, made = self._base(self.hosts), self._sized(None)
        found: list[str] = []
        if made.inside is not None and base.inside is None and self.inside_bps is None:
            found.append(
                f"devices of one host are assumed to have PCIe 4.0 between them, {format_rate(_PCIE_BPS)}. If not, "
                "give --inside RATE."
            )
        if base.measured is not None and made.measured is None:
            found.append(
                f"measurements of {base.name} are not used, because other links were given: formulas are used."
            )
        return found

    def _sized(self, workers: int | None) -> Cluster:
        hosts = self.hosts
        if hosts is None and workers is not None:
            base = self._base(None)
            needed = -(-workers // (self.devices or base.devices_per_host))
            # A file describes existing hosts; a known cluster may have any number.
            if self.cluster in PRESETS or needed > base.num_hosts:
                hosts = needed
        return self._replaced(self._base(hosts))

    def _base(self, hosts: int | None) -> Cluster:
        return cluster(self.cluster, hosts=hosts)

    def _replaced(self, base: Cluster) -> Cluster:
        links = tuple(
            replace(
                link,
                bandwidth_bps=link.bandwidth_bps if self.bandwidth_bps is None else self.bandwidth_bps,
                delay_s=link.delay_s if self.delay_s is None else self.delay_s,
            )
            for link in base.links
        )
        devices = base.devices_per_host if self.devices is None else self.devices
        inside = base.inside
        if devices == 1:
            if self.inside_bps is not None:
                raise UsageError("--inside has no effect with one device per host. Leave it out, or give --devices.")
            inside = None
        elif inside is None:
            inside = Link(bandwidth_bps=self.inside_bps or _PCIE_BPS, delay_s=_INSIDE_S)
        elif self.inside_bps is not None:
            inside = replace(inside, bandwidth_bps=self.inside_bps)
        if (links, devices, inside) == (base.links, base.devices_per_host, base.inside):
            return base
        return replace(base, links=links, devices_per_host=devices, inside=inside, measured=None)
