"""The links of a fabric, numbered in the order in which they are added."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from laconic.cluster.fabric import Floats

NameOf = Callable[[int], str]


class LinkTable:
    """Blocks of directed links, each with a function that names its members."""

    def __init__(self) -> None:
        self._capacities: list[Floats] = []
        self._delays: list[Floats] = []
        self._firsts: list[int] = []
        self._names: list[NameOf] = []
        self._num_links = 0

    def add(self, capacity_bytes_per_s: Floats, delay_s: Floats, name: NameOf) -> int:
        """Add a block of links and return the number of its first; `name` names them by their position in the block."""
        first = self._num_links
        self._capacities.append(capacity_bytes_per_s)
        self._delays.append(delay_s)
        self._firsts.append(first)
        self._names.append(name)
        self._num_links += len(capacity_bytes_per_s)
        return first

    def add_alike(self, num_links: int, capacity_bytes_per_s: float, delay_s: float, name: NameOf) -> int:
        """Add equal links."""
        return self.add(np.full(num_links, capacity_bytes_per_s), np.full(num_links, delay_s), name)

    @property
    def capacity_bytes_per_s(self) -> Floats:
        """The capacity of each link added so far."""
        return np.concatenate([np.empty(0), *self._capacities])

    @property
    def delay_s(self) -> Floats:
        """The delay of each link added so far."""
        return np.concatenate([np.empty(0), *self._delays])

    def name(self, link: int) -> str:
        """A link in words."""
        if not 0 <= link < self._num_links:
            raise IndexError(f"there is no link {link}; links are numbered 0 to {self._num_links - 1}")
        # Blocks may be empty, so that several begin at one number; the last of them holds it.
        block = bisect_right(self._firsts, link) - 1
        return self._names[block](link - self._firsts[block])
