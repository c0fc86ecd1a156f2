"""Costs from formulas: steps times latency plus bytes over the busiest link; measured tables where there are any.

    t = start-up + steps (software + delay) + bytes one after the other x seconds per byte

The seconds per byte of a step are those of the busiest link that its messages share. Where a probe has measured an
operation among as many ranks, its table (start-up, ramp, plateau) takes the formula's place. The backend's own
all-reduce is a ring or, where that is faster, two trees, as backends choose.
"""

from __future__ import annotations

from functools import lru_cache

from laconic.cluster import Cluster
from laconic.cluster.link import usual_link
from laconic.collectives import ALGORITHMS
from laconic.collectives.algorithm import Formula, Leg
from laconic.collectives.choice import NATIVE
from laconic.collectives.ring import RING
from laconic.core.exchange import Move
from laconic.simulator.network.contract import DOWN, INSIDE, LINK, UP, Passage
from laconic.simulator.network.measured_table import MeasuredTable
from laconic.simulator.network.patterns import Load, Patterns

_ROUNDING = 1e-9
_HOST_BY_HOST = 16
"""Ranks up to which every host's link is looked at by itself where servers stand beside them."""


def pipelined_trees(ranks: int) -> Formula:
    """Two binary trees with many small pieces under way, which backends use among many ranks."""
    return Formula((Leg(2 * (ranks - 1).bit_length(), 2.0),))


class AnalyticNetwork:
    """A cluster's links, priced by formulas.

    message_s: what software takes for each message, beside the delay of the links it crosses.
    """

    def __init__(self, cluster: Cluster, *, message_s: float = 0.0) -> None:
        self._cluster = cluster
        self._message_s = message_s
        self._fabric = cluster.fabric()
        self._table = MeasuredTable(cluster.measured)
        self._patterns = lru_cache(maxsize=16)(lambda world_size: Patterns(self._fabric, world_size))
        self._known: dict[tuple[Move, int, int], tuple[Passage, ...]] = {}

    def warnings(self) -> list[str]:
        """See Network."""
        return self._table.warnings()

    def passages(self, move: Move, world_size: int, num_servers: int) -> tuple[Passage, ...]:
        """See Network."""
        key = move, world_size, num_servers
        if key not in self._known:
            self._known[key] = self._passages(*key)
        return self._known[key]

    def _passages(self, move: Move, world_size: int, num_servers: int) -> tuple[Passage, ...]:
        if move.kind == "serve":
            if num_servers < 0:
                return self._apart(move, world_size, -num_servers)
            return self._beside(move, world_size, num_servers)
        if move.kind in {"to_leaders", "from_leaders"}:
            return self._trees_inside(move.nbytes, world_size)
        every = self._cluster.devices_per_host if move.among_hosts else 1
        ranks = -(-world_size // every)
        if ranks == 1:
            return ()
        if not move.among_hosts and (measured := self._table.passage(move, world_size)) is not None:
            return (measured,)
        patterns = self._patterns(world_size)
        if move.kind == "sum":
            return self._sum(move.algorithm, move.nbytes, patterns, ranks=ranks, every=every)
        if move.kind == "scatter_sum":
            return self._half(move, move.nbytes, ranks, patterns)
        if move.kind == "gather" and move.algorithm != NATIVE:
            return self._half(move, move.nbytes * ranks, ranks, patterns)
        return (self._spread(move, ranks, every, patterns),)

    def _step_s(self, load: Load) -> float:
        return self._message_s + load.delay_s

    def _spread(self, move: Move, ranks: int, every: int, patterns: Patterns) -> Passage:
        """What is not a sum."""
        nbytes, near = move.nbytes, patterns.shift(1, every)
        if move.kind == "gather":
            # Doubling; a ring sends as much in more steps. Leaders send straight to each other, all of it at once.
            steps = 1 if move.among_hosts else (ranks - 1).bit_length()
            return Passage(LINK, (ranks - 1) * nbytes * near.byte_s, steps * self._step_s(near))
        if move.kind == "scatter":
            load = patterns.to_all(every)
            return Passage(LINK, nbytes / ranks * load.byte_s, self._step_s(load))
        if move.kind == "send":
            return Passage(LINK, nbytes * near.byte_s, self._step_s(near))
        assert move.kind == "mix"
        load = patterns.mix(move.topology)
        return Passage(LINK, nbytes * load.byte_s, max(1, move.peers) * self._step_s(load))

    # -- sums --------------------------------------------------------------------------------------------------

    def _sum(
        self, algorithm: str, nbytes: int, patterns: Patterns, *, ranks: int, every: int = 1, share: float = 1.0
    ) -> tuple[Passage, ...]:
        """share: how much of it is done, of all its steps and bytes."""
        if algorithm == NATIVE:
            ways = [RING.cost(ranks), pipelined_trees(ranks)]
        else:
            ways = [ALGORITHMS[algorithm].cost(ranks, self._cluster.devices_per_host)]
        found = [self._legs(way, share * nbytes, patterns, every=every, share=share) for way in ways]
        return min(found, key=lambda passages: sum(passage.seconds for passage in passages))

    def _legs(
        self, way: Formula, nbytes: float, patterns: Patterns, *, every: int, share: float
    ) -> tuple[Passage, ...]:
        """A passage for legs that follow each other on the same part of the network."""
        found: list[tuple[str, float, float]] = []
        for leg in way.legs:
            load, where = _load(leg, patterns, every), INSIDE if leg.pattern == "inside" else LINK
            busy_s, latency_s = leg.serial_ratio * nbytes * load.byte_s, share * leg.num_steps * self._step_s(load)
            if found and found[-1][0] == where:
                _, before_s, waited_s = found.pop()
                busy_s, latency_s = before_s + busy_s, waited_s + latency_s
            found.append((where, busy_s, latency_s))
        return tuple(Passage(*leg) for leg in found)

    def _half(self, move: Move, nbytes: int, ranks: int, patterns: Patterns) -> tuple[Passage, ...]:
        """Of a sum of `nbytes` the steps in which every rank gets its share, or those that hand the shares out."""
        if move.algorithm == NATIVE:
            near, steps = patterns.shift(1), (ranks - 1).bit_length()
            return (Passage(LINK, (ranks - 1) / ranks * nbytes * near.byte_s, steps * self._step_s(near)),)
        first = ALGORITHMS[move.algorithm].cost(ranks, self._cluster.devices_per_host).first_half
        share = first if move.kind == "scatter_sum" else 1 - first
        return self._sum(move.algorithm, nbytes, patterns, ranks=ranks, share=share)

    def _trees_inside(self, nbytes: int, world_size: int) -> tuple[Passage, ...]:
        """A tree inside every host, one way."""
        devices = min(self._cluster.devices_per_host, world_size)
        depth, load = (devices - 1).bit_length(), self._patterns(world_size).inside(devices)
        return (Passage(INSIDE, depth * nbytes * load.byte_s, depth * self._step_s(load)),) if depth else ()

    # -- servers -----------------------------------------------------------------------------------------------

    def _beside(self, move: Move, world_size: int, num_servers: int) -> tuple[Passage, ...]:
        """To servers beside the first ranks, and back; pieces are spread evenly, so what counts is the load on average.

        Half of what both ways at once would take is where they share links; in the rest they do not meet.
        """
        if move.server >= 0 and world_size <= _HOST_BY_HOST and self._cluster.devices_per_host == 1:
            return self._at_host(move, world_size)
        load = self._patterns(world_size).to_servers(num_servers)
        latency_s, found = self._message_s + load.delay_s, list[Passage]()
        for nbytes, way_s, own in ((move.nbytes, load.up_s, UP), (move.answer_bytes, load.down_s, DOWN)):
            shared = min(1.0, load.both_s / 2 / way_s) if way_s else 1.0
            slower = self._slower_than_stated(meeting=own == UP)
            busy_s, rank_s = slower * nbytes * way_s, slower * nbytes * load.rank_s
            if shared < 1 - _ROUNDING:
                found.append(Passage(own, (1 - shared) * busy_s, rank_s=(1 - shared) * rank_s, answer=own == DOWN))
            found.append(Passage(LINK, shared * busy_s, latency_s, rank_s=shared * rank_s, answer=own == DOWN))
        return tuple(passage for passage in found if passage.seconds)

    def _at_host(self, move: Move, world_size: int) -> tuple[Passage, ...]:
        """To one server beside one rank, and back: it gets everybody's bytes over its own link, while others send.

        One bucket that is much larger than the rest keeps one server busy, whatever the average is.
        """
        host = move.server % world_size
        others = [rank for rank in range(world_size) if rank != host]
        delay_s = 2 * max(link.delay_s for link in self._cluster.links[:world_size])
        found: list[Passage] = []
        for nbytes, here, there in ((move.nbytes, "into", "out of"), (move.answer_bytes, "out of", "into")):
            # Only on the way there do messages of several ranks meet.
            slower = self._slower_than_stated(meeting=here == "into")
            byte_s = [slower / link.bytes_per_s / self._cluster.nics for link in self._cluster.links[:world_size]]
            beside = tuple((f"{there} host {rank}", nbytes * byte_s[rank]) for rank in others)
            busy_s = len(others) * nbytes * byte_s[host]
            rank_s, answer = nbytes * max(byte_s), here == "out of"
            found.append(
                Passage(
                    f"{here} host {host}",
                    busy_s,
                    self._message_s + delay_s,
                    rank_s=rank_s if others else 0.0,
                    answer=answer,
                    beside=beside,
                )
            )
        return tuple(found) if others else ()

    def _apart(self, move: Move, world_size: int, num_servers: int) -> tuple[Passage, ...]:
        """To servers on hosts of their own, with links like most workers'."""
        cluster, usual = self._cluster, usual_link(self._cluster.links)
        slower = self._slower_than_stated(meeting=True)
        used = cluster.links[: -(-world_size // cluster.devices_per_host)]
        rank_s = slower / max(1, cluster.nics // cluster.devices_per_host) / min(link.bytes_per_s for link in used)
        host_s = rank_s * max(1.0, min(cluster.devices_per_host, world_size) / cluster.nics)
        server_s = slower * world_size / num_servers / cluster.nics / usual.bytes_per_s
        inside_s = cluster.inside.delay_s if cluster.inside is not None else 0.0
        latency_s = self._message_s + inside_s + usual.delay_s + max(link.delay_s for link in used)
        return tuple(
            Passage(where, nbytes * max(host_s, server_s), latency_s, rank_s=nbytes * rank_s, answer=where == DOWN)
            for where, nbytes in ((UP, move.nbytes), (DOWN, move.answer_bytes))
        )

    def _slower_than_stated(self, *, meeting: bool) -> float:
        """By what large messages take longer than their links' bandwidth says, if measured."""
        sent_s = self._table.sent_byte_s(meeting=meeting)
        stated_s = self._patterns(self._fabric.num_devices).shift(1).byte_s
        return max(1.0, sent_s / stated_s) if sent_s is not None and stated_s else 1.0


def _load(leg: Leg, patterns: Patterns, every: int) -> Load:
    """What the messages of one step load; of every so many ranks one takes part."""
    if leg.pattern == "inside":
        return patterns.inside(leg.distance)
    return patterns.swap(leg.distance) if leg.pattern == "swap" else patterns.shift(leg.distance, every * leg.every)
