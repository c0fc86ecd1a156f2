"""Which links the steps of a move load, and how long a byte per message takes where they are shared."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from laconic.cluster.fabric import Fabric, Indices

_MOST_SHIFTS = 64
"""Of an all-to-all among many, so many of its shifts are looked at; the others load links alike."""


class Patterns:
    """Sets of messages that all travel at the same time, among the first `world_size` devices of a fabric."""

    def __init__(self, fabric: Fabric, world_size: int) -> None:
        self._fabric = fabric
        self._world_size = world_size
        self.shift = lru_cache(maxsize=256)(self._shift)
        self.swap = lru_cache(maxsize=64)(self._swap)
        self.to_all = lru_cache(maxsize=1)(self._to_all)

    def _shift(self, distance: int, every: int = 1) -> tuple[float, float]:
        """Rank r sends to rank r + distance; only every so-many-th takes part: (seconds per byte, delay)."""
        ranks = np.arange(0, self._world_size, every, dtype=np.int64)
        return self._load(ranks, np.roll(ranks, -distance % max(1, len(ranks))))

    def _swap(self, distance: int) -> tuple[float, float]:
        """Ranks that differ in one binary digit send to each other; those beyond the last power of two stand by."""
        ranks = np.arange(1 << (self._world_size.bit_length() - 1), dtype=np.int64)
        return self._load(ranks, ranks ^ distance)

    def _to_all(self) -> tuple[float, float]:
        """Each rank sends one byte to every other one: (seconds, delay)."""
        others = self._world_size - 1
        if others == 0:
            return 0.0, 0.0
        count = min(others, _MOST_SHIFTS)
        distances = np.unique(np.linspace(1, others, count).round().astype(np.int64))
        loads = np.zeros(len(self._fabric.capacity_bytes_per_s))
        longest = 0.0
        ranks = np.arange(self._world_size, dtype=np.int64)
        for distance in distances:
            load, delay_s = self._loads(ranks, np.roll(ranks, -int(distance)))
            loads += load
            longest = max(longest, delay_s)
        per_byte = float((loads / self._fabric.capacity_bytes_per_s).max()) * others / len(distances)
        return per_byte, longest

    def to_servers(self, num_servers: int) -> tuple[float, float]:
        """All ranks send one byte each, spread evenly over servers beside the first ranks: (seconds, delay)."""
        servers = np.arange(min(num_servers, self._world_size), dtype=np.int64)
        sources, destinations = np.meshgrid(np.arange(self._world_size, dtype=np.int64), servers, indexing="ij")
        load, delay_s = self._loads(sources.ravel(), destinations.ravel())
        return float((load / self._fabric.capacity_bytes_per_s).max()) / len(servers), delay_s

    def _load(self, sources: Indices, destinations: Indices) -> tuple[float, float]:
        load, delay_s = self._loads(sources, destinations)
        return float((load / self._fabric.capacity_bytes_per_s).max(initial=0.0)), delay_s

    def _loads(self, sources: Indices, destinations: Indices) -> tuple[np.ndarray, float]:
        first, links = self._fabric.routes(sources, destinations)
        capacity = self._fabric.capacity_bytes_per_s
        load = np.bincount(links, minlength=len(capacity)).astype(float)
        delays = np.concatenate([[0.0], np.cumsum(self._fabric.delay_s[links])])
        delay_s = float((delays[first[1:]] - delays[first[:-1]]).max(initial=0.0))
        return load, delay_s
