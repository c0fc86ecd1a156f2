"""A cluster as data: hosts with devices and NICs, the links between them, and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from laconic.cluster import cluster_file
from laconic.cluster.fabric import Fabric
from laconic.cluster.link import Link, usual_link
from laconic.cluster.measured import Measured
from laconic.cluster.topologies import Ports, Racks, Switch, Topology
from laconic.cluster.values import Text, Whole, shown
from laconic.cluster.wired import WiredFabric
from laconic.errors import UsageError

MOST_HOSTS = 65_536
_MOST_SHOWN = 16
"""Hosts named one by one in a description."""
_SPEEDS = (1e-3, 1e3)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts, each with devices, NICs and a link to the network; and how the network joins them."""

    links: tuple[Link, ...]
    """One per host: the link of each of its NICs."""
    topology: Topology = field(default_factory=Switch)
    devices_per_host: int = 1
    """GPUs or other devices, one per rank; ranks are numbered host by host."""
    inside: Link | None = None
    """The port of each device on its host's bus (NVLink, PCIe); only, and always, with several devices per host."""
    nics: int = 1
    """NICs per host, each with a link of its own; devices share them evenly."""
    speeds: tuple[float, ...] = ()
    """The speed of each host, relative to the device of the workload; default: 1.0 for all."""
    name: str = ""
    source: str = ""
    """A sentence that says where the figures come from."""
    measured: Measured | None = None
    """The measurements of a probe."""

    def __post_init__(self) -> None:
        check_num_hosts(len(self.links))
        Whole(most=1024).read(self.devices_per_host, "devices_per_host")
        Whole(most=1024).read(self.nics, "nics")
        Text().read(self.name, "name")
        Text().read(self.source, "source")
        if not self.speeds:
            object.__setattr__(self, "speeds", (1.0,) * len(self.links))
        if len(self.speeds) != len(self.links):
            raise UsageError(f"there must be one speed per host, got {len(self.speeds)} for {len(self.links)} hosts.")
        for host, speed in enumerate(self.speeds):
            if not _SPEEDS[0] <= speed <= _SPEEDS[1]:
                raise UsageError(
                    f"the speed of host {host} must be a number from {_SPEEDS[0]:g} to {_SPEEDS[1]:g}, "
                    f"got {shown(speed)}. 1 is the speed the workload was measured at."
                )
        if self.devices_per_host > 1 and self.inside is None:
            raise UsageError(
                f"with {self.devices_per_host} devices per host the link between them is needed. Write e.g. "
                '[inside] bandwidth = "200gbit".'
            )
        if self.devices_per_host == 1 and self.inside is not None:
            raise UsageError("inside has no effect with one device per host. Leave it out, or set devices_per_host.")
        self.topology.check(len(self.links), self.nics, self.devices_per_host)

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return len(self.links)

    @property
    def num_devices(self) -> int:
        """The number of devices of all hosts, which is the largest number of ranks."""
        return len(self.links) * self.devices_per_host

    @property
    def rack_of(self) -> tuple[int, ...]:
        """The rack of each host; empty where there are none."""
        return self.topology.rack_of if isinstance(self.topology, Racks) else ()

    @property
    def uplinks(self) -> tuple[Link, ...]:
        """One per rack; empty where there are none."""
        return self.topology.uplinks if isinstance(self.topology, Racks) else ()

    @classmethod
    def uniform(cls, num_hosts: int, link: Link, exceptions: Mapping[int, Link] | None = None) -> Cluster:
        """Hosts on one switch, with equal links except for the hosts in `exceptions`."""
        check_num_hosts(num_hosts)
        links = [link] * num_hosts
        for host, other in (exceptions or {}).items():
            cluster_file.check_host(host, num_hosts)
            links[host] = other
        return cls(links=tuple(links))

    @classmethod
    def in_racks(
        cls, num_hosts: int, link: Link, *, racks: int, oversubscription: float = 1.0, in_turn: bool = False
    ) -> Cluster:
        """Hosts in equal racks, whose uplinks carry 1 / oversubscription of what their hosts can send.

        in_turn: host h is in rack h mod racks; else neighbours share a rack.
        """
        check_num_hosts(num_hosts)
        topology = Racks.alike(num_hosts, racks, link, oversubscription=oversubscription, in_turn=in_turn)
        return cls(links=(link,) * num_hosts, topology=topology)

    def resized(self, num_hosts: int) -> Cluster:
        """This cluster with more or fewer hosts, which must all be equal; measurements are kept."""
        if num_hosts == self.num_hosts:
            return self
        check_num_hosts(num_hosts)
        if len(set(self.links)) > 1 or len(set(self.speeds)) > 1:
            raise UsageError(
                f"the hosts of this cluster differ, so their number cannot change from {self.num_hosts} to {num_hosts}."
            )
        return replace(self, links=self.links[:1] * num_hosts, speeds=self.speeds[:1] * num_hosts)

    def fabric(self) -> Fabric:
        """The links between devices, and the routes over them."""
        ports = Ports(
            num_hosts=self.num_hosts,
            nics=self.nics,
            capacity_bytes_per_s=np.array([link.bytes_per_s for link in self.links]),
            delay_s=np.array([link.delay_s for link in self.links]),
            usual=usual_link(self.links),
        )
        return WiredFabric(self.topology, ports, self.devices_per_host, self.inside)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a TOML file."""
        try:
            return cls.from_toml(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
            raise UsageError(f"cannot read the cluster file {path}: {reason}.") from exc

    @classmethod
    def from_toml(cls, text: str) -> Cluster:
        """Read a TOML document."""
        return cls.from_table(cluster_file.parse(text))

    @classmethod
    def from_table(cls, table: Mapping[str, object]) -> Cluster:
        """Read a TOML document that has been parsed."""
        return cls(**cluster_file.read(table))

    def to_toml(self, table: str = "") -> str:
        """The inverse of from_toml; with `table`, as a table of that name in a larger document."""
        return cluster_file.write(self, table)

    def describe(self) -> str:
        """Hosts, links and topology in one line."""
        kinds: dict[Link, list[int]] = {}
        for host, link in enumerate(self.links):
            kinds.setdefault(link, []).append(host)
        most = max(kinds, key=lambda link: len(kinds[link]))
        devices = f" of {self.devices_per_host} devices (inside {self.inside})" if self.inside else ""
        nics = f"{self.nics} x " if self.nics > 1 else ""
        others = [f"{_hosts(of_kind)}: {link}" for link, of_kind in kinds.items() if link != most]
        speeds: dict[float, list[int]] = {}
        for host, speed in enumerate(self.speeds):
            speeds.setdefault(speed, []).append(host)
        others += [f"{_hosts(alike)}: computes at {speed:g}" for speed, alike in speeds.items() if speed != 1]
        topology = [self.topology.describe()] if self.topology.describe() else []
        hosts = "1 host" if self.num_hosts == 1 else f"{self.num_hosts} hosts"
        return "; ".join([f"{hosts}{devices} at {nics}{most}", *others, *topology])


def _hosts(hosts: list[int]) -> str:
    if len(hosts) > _MOST_SHOWN:
        return f"{len(hosts)} hosts"
    return f"host {', '.join(map(str, hosts))}"


def check_num_hosts(num_hosts: int) -> None:
    """Raise where no cluster has this many hosts."""
    if not 1 <= num_hosts <= MOST_HOSTS:
        raise UsageError(f"the number of hosts must be between 1 and {MOST_HOSTS}, got {num_hosts}.")
