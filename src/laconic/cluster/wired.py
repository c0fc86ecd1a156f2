"""The fabric of a cluster: devices on the buses of their hosts, NICs, and the links of a topology between them.

A message between two devices of a host crosses the port of each on the host's bus. One that leaves the host crosses
them too, and between them the NIC of the sender, the links of the topology, and the NIC of the receiver. With one
device per host there is no bus.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from laconic.cluster.fabric import Floats, Indices
from laconic.cluster.link import Link
from laconic.cluster.link_table import LinkTable
from laconic.cluster.topologies.contract import NOT_CROSSED, Messages, Ports, Topology

_AT_ONCE = 65_536
"""Messages whose routes are found together: bounds the memory, however many there are."""


class WiredFabric:
    """A Fabric; see there."""

    def __init__(self, topology: Topology, ports: Ports, devices_per_host: int, inside: Link | None) -> None:
        self._nics = ports.nics
        self._devices_per_host = devices_per_host
        self._num_devices = ports.num_hosts * devices_per_host
        self._table = LinkTable()
        self._paths = topology.connect(ports, self._table)
        self._out: int | None = None
        self._in: int | None = None
        if inside is not None:

            def ends(device: int) -> tuple[str, str]:
                host, place = divmod(device, devices_per_host)
                return f"device {place} of host {host}", f"bus of host {host}"

            self._out = self._table.add_alike(
                self._num_devices, inside.bytes_per_s, inside.delay_s, lambda device: " -> ".join(ends(device))
            )
            self._in = self._table.add_alike(
                self._num_devices,
                inside.bytes_per_s,
                inside.delay_s,
                lambda device: " -> ".join(reversed(ends(device))),
            )
        self._capacity_bytes_per_s = self._table.capacity_bytes_per_s
        self._delay_s = self._table.delay_s

    @property
    def num_devices(self) -> int:
        return self._num_devices

    @property
    def capacity_bytes_per_s(self) -> Floats:
        return self._capacity_bytes_per_s

    @property
    def delay_s(self) -> Floats:
        return self._delay_s

    def link_name(self, link: int) -> str:
        return self._table.name(link)

    def routes(self, sources: Indices, destinations: Indices) -> tuple[Indices, Indices]:
        sources, destinations = np.asarray(sources, dtype=np.int64), np.asarray(destinations, dtype=np.int64)
        if sources.shape != destinations.shape or sources.ndim != 1:
            raise ValueError(f"as many sources as destinations are needed, got {sources.shape}, {destinations.shape}")
        for devices in (sources, destinations):
            if len(devices) and not 0 <= devices.min() <= devices.max() < self._num_devices:
                raise ValueError(f"devices are numbered 0 to {self._num_devices - 1}, got others")
        counts: list[Indices] = [np.zeros(1, dtype=np.int64)]
        links: list[Indices] = [np.empty(0, dtype=np.int64)]
        for begin in range(0, len(sources), _AT_ONCE):
            crossed = self._crossed(sources[begin : begin + _AT_ONCE], destinations[begin : begin + _AT_ONCE])
            exists = crossed != NOT_CROSSED
            counts.append(exists.sum(axis=1))
            links.append(crossed[exists])  # row by row, so message by message
        return np.cumsum(np.concatenate(counts)), np.concatenate(links)

    def _crossed(self, sources: Indices, destinations: Indices) -> Indices:
        """A row per message: the links it crosses in order, with gaps."""
        host, place = np.divmod(sources, self._devices_per_host)
        other_host, other_place = np.divmod(destinations, self._devices_per_host)
        far = host != other_host
        spread = _spread(sources[far], destinations[far])
        hops = self._paths(
            Messages(
                source=host[far],
                destination=other_host[far],
                source_nic=self._nic(place[far], spread),
                destination_nic=self._nic(other_place[far], spread),
                spread=spread,
            )
        )
        ports = 0 if self._out is None else 1
        crossed = np.full((len(sources), len(hops) + 2 * ports), NOT_CROSSED, dtype=np.int64)
        rows = np.flatnonzero(far)
        for column, hop in enumerate(hops):
            crossed[rows, column + ports] = hop
        if self._out is not None and self._in is not None:
            moves = sources != destinations
            crossed[:, 0] = np.where(moves, self._out + sources, NOT_CROSSED)
            crossed[:, -1] = np.where(moves, self._in + destinations, NOT_CROSSED)
        return crossed

    def _nic(self, place: Indices, spread: npt.NDArray[np.uint64]) -> Indices:
        """Neighbouring devices share a NIC; a device with several of its own spreads messages over them."""
        own = max(1, self._nics // self._devices_per_host)
        # The highest bits: topologies choose with the others.
        chosen = ((spread >> np.uint64(48)) % np.uint64(own)).astype(np.int64)
        return place * self._nics // self._devices_per_host + chosen


def _spread(sources: Indices, destinations: Indices) -> npt.NDArray[np.uint64]:
    """A hash of each pair (the finaliser of splitmix64): the same everywhere and always, and without a pattern."""
    mixed = (sources.astype(np.uint64) << np.uint64(32)) ^ destinations.astype(np.uint64)
    mixed += np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
