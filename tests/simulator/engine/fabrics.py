"""Networks small enough to work out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from laconic.cluster.fabric import Floats, Indices


class Wires:
    """Links of given capacities, and for some pairs of devices the links between them."""

    def __init__(
        self,
        capacity_bytes_per_s: Sequence[float],
        routes: Mapping[tuple[int, int], Sequence[int]],
        delay_s: Sequence[float] | None = None,
    ) -> None:
        self._capacity = np.array(capacity_bytes_per_s, dtype=np.float64)
        self._delay_s = np.zeros(len(self._capacity)) if delay_s is None else np.array(delay_s, dtype=np.float64)
        self._routes = routes

    @property
    def num_devices(self) -> int:
        return 1 + max(max(pair) for pair in self._routes)

    @property
    def capacity_bytes_per_s(self) -> Floats:
        return self._capacity

    @property
    def delay_s(self) -> Floats:
        return self._delay_s

    def routes(self, sources: Indices, destinations: Indices) -> tuple[Indices, Indices]:
        found = [
            [] if pair[0] == pair[1] else list(self._routes[pair])
            for pair in zip(sources.tolist(), destinations.tolist(), strict=True)
        ]
        first = np.cumsum([0, *map(len, found)])
        return first, np.array([link for links in found for link in links], dtype=np.int64)

    def link_name(self, link: int) -> str:
        return f"wire {link}"


def switch(num_devices: int, bytes_per_s: float, delay_s: float = 0.0) -> Wires:
    """A link from each device to a switch without limits, and one back."""
    pairs = [(a, b) for a in range(num_devices) for b in range(num_devices) if a != b]
    return Wires(
        [bytes_per_s] * (2 * num_devices),
        {(a, b): (a, num_devices + b) for a, b in pairs},
        [delay_s] * (2 * num_devices),
    )


def racks(num_racks: int, per_rack: int, bytes_per_s: float, uplink_bytes_per_s: float) -> Wires:
    """Devices in racks; what leaves a rack crosses its uplink, and the downlink of the other."""
    size = num_racks * per_rack
    routes: dict[tuple[int, int], tuple[int, ...]] = {}
    for a in range(size):
        for b in range(size):
            here, there = a // per_rack, b // per_rack
            between = () if here == there else (2 * size + here, 2 * size + num_racks + there)
            routes[a, b] = (a, *between, size + b)
    return Wires([bytes_per_s] * (2 * size) + [uplink_bytes_per_s] * (2 * num_racks), routes)
