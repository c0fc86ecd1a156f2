"""Costs flow by flow: every message of a move takes its route, and messages that share a link share it fairly.

A move is a few stages, one after the other; the messages of a stage begin together. Where several jobs share a fabric,
stages are transfers in their common graph; for one job alone each kind of move is run once by itself, and costs grow
with its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from laconic.cluster import Cluster
from laconic.cluster.fabric import Floats, Indices
from laconic.collectives import ALGORITHMS
from laconic.collectives.choice import NATIVE
from laconic.collectives.schedule import Collective
from laconic.core.exchange import Move
from laconic.core.hosts import hosts_alone
from laconic.errors import UsageError
from laconic.simulator.engine import GraphBuilder, run
from laconic.simulator.engine.collective_flows import messages
from laconic.simulator.network.contract import LINK, Passage

_UNIT = 1 << 24
"""Bytes for which a move is run; costs for others are in proportion."""
_RING_UP_TO = 16
_MOST_ROWS = 1024
"""Ranks up to which a collective is taken step by step."""
_MOST_PAIRS = 512
"""Ranks up to which everybody sends to everybody."""


@dataclass(frozen=True, eq=False)
class Stage:
    """Messages that begin together; ranks, not devices."""

    sources: Indices
    destinations: Indices
    shares: Floats
    """Bytes of each message, for each byte a rank contributes."""
    num_steps: int = 1
    """Latencies that pass one after the other: steps that follow each other through the same links."""


class FlowNetwork:
    """A cluster's fabric, shared fairly."""

    def __init__(self, cluster: Cluster, *, message_s: float = 0.0) -> None:
        self._cluster = cluster
        self.message_s = message_s
        self.fabric = cluster.fabric()
        self._costs = lru_cache(maxsize=256)(self._cost)

    def warnings(self) -> list[str]:
        """See Network."""
        return []

    def passages(self, move: Move, world_size: int, num_servers: int) -> tuple[Passage, ...]:
        """See Network."""
        key = Move(move.kind, (_UNIT,), move.algorithm, move.peers, 0, move.among_hosts)
        byte_s, latency_s = self._costs(key, world_size, num_servers)
        found = [Passage(LINK, byte_s * move.nbytes, latency_s)]
        if move.kind == "serve":
            found.append(Passage(LINK, byte_s * move.answer_bytes, latency_s))
        return tuple(passage for passage in found if passage.seconds)

    def _cost(self, move: Move, world_size: int, num_servers: int) -> tuple[float, float]:
        """Seconds per byte, and what passes besides."""
        byte_s = latency_s = 0.0
        for stage in self.stages(move, world_size, num_servers):
            builder = GraphBuilder()
            builder.transfer(stage.sources, stage.destinations, stage.shares * _UNIT)
            graph = builder.build(self.fabric)
            delay_s = float(graph.duration_s[0])
            byte_s += (run(graph).makespan_s - delay_s) / _UNIT
            latency_s += stage.num_steps * (self.message_s + delay_s)
        return byte_s, latency_s

    def stages(self, move: Move, world_size: int, num_servers: int = 0) -> tuple[Stage, ...]:
        """What a move sends, among ranks 0 to n - 1."""
        devices = self._cluster.devices_per_host
        ranks = np.arange(world_size, dtype=np.int64)
        if move.among_hosts:
            ranks = ranks[::devices]
        if move.kind in {"to_leaders", "from_leaders"}:
            return self._inside(ranks, devices, down=move.kind == "from_leaders")
        if move.kind == "serve":
            return (_to_servers(world_size, num_servers),)
        if len(ranks) == 1:
            return ()
        if move.kind == "sum":
            return self._sum(move.algorithm, ranks)
        if move.kind in {"gather", "scatter_sum"}:
            share = len(ranks) - 1.0 if move.kind == "gather" else (len(ranks) - 1) / len(ranks)
            return (_shift(ranks, 1, share, (len(ranks) - 1).bit_length()),)
        if move.kind == "scatter":
            return (_to_all(ranks),)
        if move.kind == "send":
            return (_shift(ranks, 1, 1.0, 1),)
        assert move.kind == "mix"
        around = [_shift(ranks, 1 << number, 1.0, 1) for number in range(min(move.peers, 16))]
        return (_together(around),)

    def _sum(self, algorithm: str, ranks: Indices) -> tuple[Stage, ...]:
        size = len(ranks)
        if algorithm in {NATIVE, "ring"}:
            # All steps of a ring send the same messages, so that they are one stage of as many bytes. Backends use
            # trees where a ring has too many steps.
            steps = 2 * (size - 1) if algorithm == "ring" or size <= _RING_UP_TO else 2 * (size - 1).bit_length()
            return (_shift(ranks, 1, 2 * (size - 1) / size, steps),)
        if size > _MOST_ROWS:
            raise UsageError(
                f"at flow level {algorithm} is simulated for up to {_MOST_ROWS} ranks, got {size}. Use "
                "algorithm=native, or the analytic network."
            )
        devices = self._cluster.devices_per_host
        hosts = tuple(tuple(range(first, min(first + devices, size))) for first in range(0, size, devices))
        made = ALGORITHMS[algorithm](hosts if algorithm == "hierarchical" else hosts_alone(size))
        return _of_rows(made, ranks)

    def _inside(self, ranks: Indices, devices: int, *, down: bool) -> tuple[Stage, ...]:
        """A binomial tree inside each host."""
        found: list[Stage] = []
        distance = 1
        while distance < devices:
            place = ranks % devices
            senders = ranks[(place % (2 * distance) == distance)]
            stage = Stage(senders, senders - distance, np.ones(len(senders)))
            found.append(Stage(stage.destinations, stage.sources, stage.shares) if down else stage)
            distance *= 2
        return tuple(reversed(found)) if down else tuple(found)


def _of_rows(made: Collective, ranks: Indices) -> tuple[Stage, ...]:
    return tuple(
        Stage(ranks[sources], ranks[destinations], nbytes / _UNIT)
        for sources, destinations, nbytes in messages(made, _UNIT)
    )


def _shift(ranks: Indices, distance: int, share: float, num_steps: int) -> Stage:
    return Stage(ranks, np.roll(ranks, -distance), np.full(len(ranks), share), num_steps)


def _to_all(ranks: Indices) -> Stage:
    if len(ranks) > _MOST_PAIRS:
        raise UsageError(
            f"at flow level an all-to-all is simulated for up to {_MOST_PAIRS} ranks, got {len(ranks)}. Use the "
            "analytic network."
        )
    sources, destinations = np.meshgrid(ranks, ranks, indexing="ij")
    apart = sources != destinations
    return Stage(sources[apart], destinations[apart], np.full(int(apart.sum()), 1 / len(ranks)))


def _to_servers(world_size: int, num_servers: int) -> Stage:
    if num_servers < 0:
        raise UsageError(
            "at flow level servers are simulated beside the workers, not on hosts of their own. Leave hosts out, or "
            "use the analytic network."
        )
    servers = np.arange(min(num_servers, world_size), dtype=np.int64)
    sources, destinations = np.meshgrid(np.arange(world_size, dtype=np.int64), servers, indexing="ij")
    apart = sources != destinations
    return Stage(sources[apart], destinations[apart], np.full(int(apart.sum()), 1 / len(servers)))


def _together(stages: list[Stage]) -> Stage:
    return Stage(
        np.concatenate([stage.sources for stage in stages]),
        np.concatenate([stage.destinations for stage in stages]),
        np.concatenate([stage.shares for stage in stages]),
    )
