"""The links that the steps of a move load, and the time per byte of each message where links are shared."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from laconic.architecture.graphs.topologies import TOPOLOGIES, cycle_of
from laconic.cluster.fabric import Fabric, Floats, Indices
from laconic.core.hosts import Hosts

_MOST_SHIFTS = 64
"""Distances sampled where every rank sends to many; the others load links equally."""
_DRAWN_ROUNDS = 8
"""Rounds sampled where each round has a random graph."""


class Load(NamedTuple):
    """The cost of messages that are sent at the same time."""

    byte_s: float
    """Seconds per byte of each message, on the busiest link."""
    delay_s: float
    """The delay of the longest route."""


class ServerLoad(NamedTuple):
    """The cost when every rank sends a byte to servers, in equal or given shares, or gets one."""

    up_s: float
    down_s: float
    both_s: float
    """Both directions at the same time: links that only one of them uses are not busy for longer."""
    rank_s: float
    """The cost when a single rank sends."""
    delay_s: float


class Patterns:
    """Sets of messages that all travel at the same time, among the first `world_size` devices of a fabric.

    groups: ranks that are taken together, in this order, instead of those of a host.
    """

    def __init__(self, fabric: Fabric, world_size: int, devices_per_host: int = 1, groups: Hosts = ()) -> None:
        self._fabric = fabric
        self._world_size = world_size
        order = [rank for group in groups for rank in group] or range(world_size)
        self._devices = np.array(order, dtype=np.int64)
        self.each = max(map(len, groups)) if groups else devices_per_host
        """How many ranks are taken together."""
        self.leaves_hosts = any(len({rank // devices_per_host for rank in group}) > 1 for group in groups)
        """Whether messages inside a group leave hosts."""
        self.shift = lru_cache(maxsize=256)(self._shift)
        self.swap = lru_cache(maxsize=64)(self._swap)
        self.to_all = lru_cache(maxsize=4)(self._to_all)
        self.inside = lru_cache(maxsize=4)(self._inside)
        self.to_hosts = lru_cache(maxsize=4)(self._to_hosts)
        self.to_servers = lru_cache(maxsize=16)(self._to_servers)
        self.mix = lru_cache(maxsize=16)(self._mix)

    def _shift(self, distance: int, every: int = 1) -> Load:
        """Rank r sends to rank r + distance; only the first in `every` ranks takes part."""
        ranks = np.arange(0, self._world_size, every, dtype=np.int64)
        return self._load(ranks, np.roll(ranks, -distance))

    def _swap(self, distance: int) -> Load:
        """Ranks that differ in one binary digit send to each other; those beyond the last power of two are idle."""
        ranks = np.arange(1 << (self._world_size.bit_length() - 1), dtype=np.int64)
        return self._load(ranks, ranks ^ distance)

    def _inside(self, devices_per_host: int) -> Load:
        """Rank r sends to the next one of its host, the last of a host to its first."""
        ranks = np.arange(self._world_size, dtype=np.int64)
        is_last = ((ranks + 1) % devices_per_host == 0) | (ranks + 1 == self._world_size)
        return self._load(ranks, np.where(is_last, ranks - ranks % devices_per_host, ranks + 1))

    def _to_all(self, every: int = 1) -> Load:
        """Each rank, or one in `every` ranks, sends one byte to every other one."""
        ranks = np.arange(0, self._world_size, every, dtype=np.int64)
        others = len(ranks) - 1
        if others == 0:
            return Load(0.0, 0.0)
        loads, longest_s = np.zeros(len(self._fabric.capacity_bytes_per_s)), 0.0
        for distance in (distances := _some(others)):
            load, delay_s = self._loads(ranks, np.roll(ranks, -1 - distance))
            loads += load
            longest_s = max(longest_s, delay_s)
        return Load(self._busiest(loads) * others / len(distances), longest_s)

    def _to_hosts(self, devices_per_host: int) -> Load:
        """Each rank sends one byte to the rank with its position on every other host."""
        others = self._world_size // devices_per_host - 1
        found = [self.shift(devices_per_host * (1 + distance)) for distance in _some(others)] if others else []
        byte_s = sum(load.byte_s for load in found) * others / max(1, len(found))
        return Load(byte_s, max((load.delay_s for load in found), default=0.0))

    def _to_servers(self, num_servers: int, shares: tuple[float, ...] = ()) -> ServerLoad:
        """Servers run on the hosts of the first ranks."""
        if shares:
            return self._to_shares(shares)
        num_servers = min(num_servers, self._world_size)
        ranks, longest_s = np.arange(self._world_size, dtype=np.int64), 0.0
        up, down = (np.zeros(len(self._fabric.capacity_bytes_per_s)) for _ in range(2))
        # Of many servers, not the one on a rank's own host: in a sample it would have too much weight.
        skipped = int(num_servers > _MOST_SHIFTS)
        distances = [skipped + place for place in _some(num_servers - skipped)]
        for distance in distances:
            servers = (ranks + distance) % num_servers
            load, delay_s = self._loads(ranks, servers)
            up += load
            down += self._loads(servers, ranks)[0]
            longest_s = max(longest_s, delay_s)
        alone, _ = self._loads(np.full(num_servers, ranks[-1]), np.arange(num_servers, dtype=np.int64))
        up_s, down_s, both_s = (self._busiest(load) / len(distances) for load in (up, down, up + down))
        return ServerLoad(up_s, down_s, both_s, self._busiest(alone) / num_servers, longest_s)

    def _to_shares(self, shares: tuple[float, ...]) -> ServerLoad:
        """One server on the host of each rank, each with its share."""
        ranks, longest_s = np.arange(self._world_size, dtype=np.int64), 0.0
        up, down, alone = (np.zeros(len(self._fabric.capacity_bytes_per_s)) for _ in range(3))
        for server, share in enumerate(shares):
            if share:
                there = np.full(self._world_size, server)
                load, delay_s = self._loads(ranks, there)
                up += share * load
                down += share * self._loads(there, ranks)[0]
                alone += share * self._loads(ranks[-1:], there[-1:])[0]
                longest_s = max(longest_s, delay_s)
        up_s, down_s, both_s, rank_s = map(self._busiest, (up, down, up + down, alone))
        return ServerLoad(up_s, down_s, both_s, rank_s, longest_s)

    def _mix(self, topology: str, partners: tuple[tuple[int, ...], ...] = ()) -> Load:
        """Every rank sends to each of its neighbours; the mean over rounds where these change."""
        found = [self._load(*messages) for messages in neighbours(topology, self._world_size, partners)]
        byte_s, delay_s = np.mean(found, axis=0).tolist()
        return Load(byte_s, delay_s)

    def _load(self, sources: Indices, destinations: Indices) -> Load:
        load, delay_s = self._loads(sources, destinations)
        return Load(self._busiest(load), delay_s)

    def _busiest(self, load: Floats) -> float:
        return float((load / self._fabric.capacity_bytes_per_s).max(initial=0.0))

    def _loads(self, sources: Indices, destinations: Indices) -> tuple[Floats, float]:
        first, links = self._fabric.routes(self._devices[sources], self._devices[destinations])
        capacity = self._fabric.capacity_bytes_per_s
        load = np.bincount(links, minlength=len(capacity)).astype(float)
        delays = np.concatenate([[0.0], np.cumsum(self._fabric.delay_s[links])])
        delay_s = float((delays[first[1:]] - delays[first[:-1]]).max(initial=0.0))
        return load, delay_s


def _some(count: int) -> list[int]:
    """Numbers below `count`; if there are many, an evenly spread sample."""
    return np.unique(np.linspace(0, count - 1, min(count, _MOST_SHIFTS)).round().astype(np.int64)).tolist()


def neighbours(
    topology: str, world_size: int, partners: tuple[tuple[int, ...], ...] = ()
) -> Iterator[tuple[Indices, Indices]]:
    """Sources and destinations, round by round until rounds repeat; a few rounds where each has a random graph.

    partners: those of every rank in each round, where they are chosen from measured links.
    """
    graph = cycle_of(partners) if partners else TOPOLOGIES[topology]
    rounds = 1 if graph.fixed else _DRAWN_ROUNDS if graph.draws else max(1, (world_size - 1).bit_length())
    for round in range(len(partners) or rounds):
        targets = [sorted(graph.targets(rank, world_size, round, 0)) for rank in range(world_size)]
        sources = np.repeat(np.arange(world_size, dtype=np.int64), [len(found) for found in targets])
        yield sources, np.array([target for found in targets for target in found], dtype=np.int64)
