"""The links between devices and the routes of messages, which the flow-level network shares."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


class Fabric(Protocol):
    """Directed links, numbered from 0, and a route for every pair of devices.

    Devices are numbered as ranks are: those of host 0 first, then those of host 1 and so on.
    """

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        ...

    @property
    def capacity_bytes_per_s(self) -> Floats:
        """The capacity of each link."""
        ...

    @property
    def delay_s(self) -> Floats:
        """The delay of each link."""
        ...

    def routes(self, sources: Indices, destinations: Indices) -> tuple[Indices, Indices]:
        """The links each message crosses, in order.

        Returns (first, links): message i crosses links[first[i] : first[i + 1]]. A message from a device to itself
        crosses none.
        """
        ...

    def link_name(self, link: int) -> str:
        """A link in words, e.g. "host 3 -> switch"."""
        ...
