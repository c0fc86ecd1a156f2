"""Costs flow by flow: every message of a move takes its route, and messages that share a link share it fairly.

A move is a few stages, one after the other; the messages of a stage begin together. Where several jobs share a fabric,
stages are transfers in their common graph; for a single job each kind of move is run once, and its cost is scaled by
its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from laconic.cluster import Cluster
from laconic.cluster.fabric import Floats, Indices
from laconic.collectives import ALGORITHMS
from laconic.collectives.choice import NATIVE
from laconic.collectives.hierarchical import from_leaders, to_leaders
from laconic.collectives.schedule import Collective, halves_of
from laconic.core.exchange import Move
from laconic.core.hosts import Hosts
from laconic.errors import UsageError
from laconic.simulator.engine import GraphBuilder, run
from laconic.simulator.engine.collective_flows import messages
from laconic.simulator.network.analytic import across, pipelined_trees, slotted, there_and_back
from laconic.simulator.network.contract import LINK, Passage
from laconic.simulator.network.patterns import ServerLoad, neighbours

_UNIT = 1 << 24
"""Bytes for which a move is run; other sizes are scaled in proportion."""
_TREES = "trees"
"""The algorithm of backends where a ring has too many steps."""
_MOST_ROWS = 1024
"""Ranks up to which a collective is simulated step by step."""
_MOST_PAIRS = 512
"""Ranks up to which an all-to-all is simulated."""


@dataclass(frozen=True, eq=False)
class Stage:
    """Messages that begin together; sources and destinations are ranks, not devices."""

    sources: Indices
    destinations: Indices
    shares: Floats
    """Bytes of each message, for each byte a rank contributes."""
    num_steps: float = 1
    """Latencies that pass one after the other: steps that follow each other through the same links."""


class FlowNetwork:
    """A cluster's fabric, shared fairly."""

    def __init__(self, cluster: Cluster, *, message_s: float = 0.0) -> None:
        self._cluster = cluster
        self.message_s = message_s
        self.fabric = cluster.fabric()
        self._costs = lru_cache(maxsize=256)(self._cost)
        self._server_costs = lru_cache(maxsize=16)(self._server_cost)

    def warnings(self) -> list[str]:
        return []

    def passages(self, move: Move, world_size: int, num_servers: int) -> tuple[Passage, ...]:
        if move.kind == "serve":
            load = self._server_costs(world_size, num_servers, move.shares)
            return there_and_back((move.nbytes, move.answer_bytes), load, self.message_s + load.delay_s)
        byte_s, latency_s = self._costs(self._unit(move, world_size), world_size, num_servers)
        if move.kind == "aggregate":
            byte_s = slotted(byte_s, latency_s, move.slots)
        passage = Passage(LINK, byte_s * move.nbytes, latency_s)
        return (passage,) if passage.seconds else ()

    def _unit(self, move: Move, world_size: int) -> Move:
        """The same move with `_UNIT` bytes; a native sum with the algorithm that the backend would choose."""
        unit = replace(move, sizes=(_UNIT,), answer_bytes=0)
        if move.kind != "sum" or move.algorithm != NATIVE:
            return unit
        ways = [replace(unit, algorithm="ring"), replace(unit, algorithm=_TREES)]
        costs = [self._costs(way, world_size, 0) for way in ways]
        times = [byte_s * move.nbytes + latency_s for byte_s, latency_s in costs]
        return ways[times.index(min(times))]

    def _cost(self, move: Move, world_size: int, num_servers: int) -> tuple[float, float]:
        """Seconds per byte, and the other delays."""
        byte_s = latency_s = 0.0
        for stage in self._stages(move, world_size, num_servers):
            took_s, delay_s = self._run(stage)
            byte_s += took_s / _UNIT
            latency_s += stage.num_steps * (self.message_s + delay_s)
        return byte_s, latency_s

    def _server_cost(self, world_size: int, num_servers: int, shares: tuple[float, ...]) -> ServerLoad:
        """Seconds per byte to servers and back."""
        up = _to_servers(world_size, num_servers, shares)
        down = Stage(up.destinations, up.sources, up.shares)
        ends = np.concatenate([up.sources, up.destinations]), np.concatenate([up.destinations, up.sources])
        both = Stage(*ends, np.concatenate([up.shares, up.shares]))
        own = up.sources == world_size - 1
        alone = Stage(up.sources[own], up.destinations[own], up.shares[own])
        (up_s, delay_s), (down_s, _), (both_s, _), (rank_s, _) = map(self._run, (up, down, both, alone))
        return ServerLoad(up_s / _UNIT, down_s / _UNIT, both_s / _UNIT, rank_s / _UNIT, delay_s)

    def _run(self, stage: Stage) -> tuple[float, float]:
        """The time in which a stage's bytes move, and the delay of its longest route."""
        builder = GraphBuilder()
        builder.transfer(stage.sources, stage.destinations, stage.shares * _UNIT)
        graph = builder.build(self.fabric)
        delay_s = float(graph.duration_s[0])
        return run(graph).makespan_s - delay_s, delay_s

    def stages(self, move: Move, world_size: int, num_servers: int = 0) -> tuple[Stage, ...]:
        """The messages of a move among ranks 0 to n - 1; the way back from servers is the same in reverse."""
        return self._stages(self._unit(move, world_size), world_size, num_servers)

    def _stages(self, move: Move, world_size: int, num_servers: int) -> tuple[Stage, ...]:
        devices, hosts = self._cluster.devices_per_host, move.groups or self._hosts(world_size)
        # In the order in which a ring goes through them.
        taking_part = [host[0] for host in hosts] if move.among_hosts else [rank for host in hosts for rank in host]
        ranks = np.array(taking_part, dtype=np.int64)
        size = len(ranks)
        if move.kind == "serve":
            return (_to_servers(world_size, num_servers, move.shares),)
        if move.kind in {"to_leaders", "from_leaders"}:
            if move.groups:
                tree = from_leaders(hosts) if move.kind == "from_leaders" else to_leaders(hosts)
                return _of_rows(tree)
            return _inside(ranks, devices, down=move.kind == "from_leaders")
        if move.kind in {"scatter_inside", "scatter_between"}:
            groups = ranks // devices if move.kind == "scatter_inside" else ranks % devices
            return _among(ranks, groups)
        if size == 1:
            return ()
        if move.kind == "aggregate":
            return (_shift(ranks, 1.0, 1, across(devices, size)),)
        if move.kind == "sum":
            return self._sum(move.algorithm, ranks, hosts)
        if move.algorithm != NATIVE:
            first, second = halves_of(self._collective(move.algorithm, hosts))
            return _of_rows(first) if move.kind == "scatter_sum" else _of_rows(second, size)
        if move.kind in {"gather", "scatter_sum"}:
            share = size - 1.0 if move.kind == "gather" else (size - 1) / size
            return (_shift(ranks, share, 1 if move.among_hosts else (size - 1).bit_length()),)
        if move.kind == "scatter":
            return (_to_all(ranks),)
        if move.kind == "send":
            return (_shift(ranks, 1.0, 1),)
        assert move.kind == "mix"
        return _mix(move, ranks)

    def _sum(self, algorithm: str, ranks: Indices, hosts: Hosts) -> tuple[Stage, ...]:
        # All steps of a ring send the same messages, so that they are one stage of as many bytes; and so do pieces that
        # follow each other through trees, as long as nothing but a rank's own link limits them.
        if algorithm == _TREES or ALGORITHMS[algorithm].same_messages:
            way = pipelined_trees(len(ranks)) if algorithm == _TREES else ALGORITHMS[algorithm].cost(len(ranks))
            return (_shift(ranks, way.serial_ratio, way.num_steps),)
        return _of_rows(self._collective(algorithm, hosts))

    def _hosts(self, world_size: int) -> Hosts:
        devices = self._cluster.devices_per_host
        return tuple(tuple(range(first, min(first + devices, world_size))) for first in range(0, world_size, devices))

    def _collective(self, algorithm: str, hosts: Hosts) -> Collective:
        size = sum(map(len, hosts))
        if size > _MOST_ROWS:
            raise UsageError(
                f"at flow level {algorithm} is simulated for up to {_MOST_ROWS} ranks, got {size}. Use "
                "algorithm=native, or the analytic network."
            )
        return ALGORITHMS[algorithm](hosts)


def _of_rows(made: Collective, times: int = 1) -> tuple[Stage, ...]:
    """The steps of a collective, per byte of the tensor that it sums, or of a share that is `times` smaller."""
    return tuple(
        Stage(sources, destinations, times * nbytes / _UNIT) for sources, destinations, nbytes in messages(made, _UNIT)
    )


def _inside(ranks: Indices, devices: int, *, down: bool) -> tuple[Stage, ...]:
    """A binomial tree inside each host."""
    found: list[Stage] = []
    for level in range((min(devices, len(ranks)) - 1).bit_length()):
        senders = ranks[ranks % devices % (2 << level) == 1 << level]
        ends = (senders - (1 << level), senders) if down else (senders, senders - (1 << level))
        found.append(Stage(*ends, np.ones(len(senders))))
    return tuple(reversed(found)) if down else tuple(found)


def _shift(ranks: Indices, share: float, num_steps: int, distance: int = 1) -> Stage:
    return Stage(ranks, np.roll(ranks, -distance), np.full(len(ranks), share), num_steps)


def _mix(move: Move, ranks: Indices) -> tuple[Stage, ...]:
    """One round; where neighbours change from round to round, an equal part of each, which takes the mean time."""
    rounds = list(neighbours(move.topology, len(ranks), move.partners))
    steps = max(1, move.peers) / len(rounds)
    return tuple(
        Stage(ranks[sources], ranks[destinations], np.full(len(sources), 1 / len(rounds)), steps)
        for sources, destinations in rounds
    )


def _to_all(ranks: Indices) -> Stage:
    if len(ranks) > _MOST_PAIRS:
        raise UsageError(
            f"at flow level an all-to-all is simulated for up to {_MOST_PAIRS} ranks, got {len(ranks)}. Use the "
            "analytic network."
        )
    sources, destinations = np.meshgrid(ranks, ranks, indexing="ij")
    apart = sources != destinations
    return Stage(sources[apart], destinations[apart], np.full(int(apart.sum()), 1 / len(ranks)))


def _among(ranks: Indices, groups: Indices) -> tuple[Stage, ...]:
    """Each rank sends a share to every other rank of its group."""
    found = [_to_all(ranks[groups == group]) for group in np.unique(groups)]
    sources, destinations, shares = (
        np.concatenate([getattr(stage, column) for stage in found]) for column in ("sources", "destinations", "shares")
    )
    return (Stage(sources, destinations, shares),) if len(sources) else ()


def _to_servers(world_size: int, num_servers: int, shares: tuple[float, ...]) -> Stage:
    if num_servers < 0:
        raise UsageError(
            "at flow level servers are simulated on the hosts of the workers, not on hosts of their own. Leave hosts "
            "out, or use the analytic network."
        )
    servers = np.arange(min(num_servers, world_size), dtype=np.int64)
    if world_size * len(servers) > _MOST_PAIRS**2:
        raise UsageError(
            f"at flow level up to {_MOST_PAIRS**2} pairs of a worker and a server are simulated, got {world_size} x "
            f"{len(servers)}. Give fewer shards, or use the analytic network."
        )
    sources, destinations = np.meshgrid(np.arange(world_size, dtype=np.int64), servers, indexing="ij")
    apart = sources != destinations
    of_server = np.array(shares) if shares else np.full(len(servers), 1 / len(servers))
    return Stage(sources[apart], destinations[apart], of_server[destinations[apart]])
