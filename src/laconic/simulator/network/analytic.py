"""Costs from formulas: steps times latency plus bytes over the busiest link; measured tables where there are any.

    t = start-up + steps (software + delay) + bytes in sequence x seconds per byte

The seconds per byte of a step are those of the busiest link that its messages share. Where a probe has measured an
operation among the same number of ranks, its table (start-up, ramp, plateau) replaces the formula. The backend's own
all-reduce is a ring or, where that is faster, two trees, as backends choose.
"""

from __future__ import annotations

from functools import lru_cache

from laconic.architecture.servers.layout import HEADER_BYTES, VALUE_BYTES
from laconic.cluster import Cluster
from laconic.cluster.link import usual_link
from laconic.collectives import ALGORITHMS
from laconic.collectives.algorithm import Formula, Leg
from laconic.collectives.choice import NATIVE
from laconic.collectives.ring import RING
from laconic.core.exchange import Move
from laconic.core.hosts import Hosts
from laconic.simulator.network.contract import DOWN, INSIDE, LINK, UP, Passage
from laconic.simulator.network.measured_table import MeasuredTable
from laconic.simulator.network.patterns import Load, Patterns, ServerLoad

_ROUNDING = 1e-9
_HOST_BY_HOST = 16
"""Ranks up to which every host's link is modelled by itself where servers run on the workers' hosts."""


def pipelined_trees(ranks: int) -> Formula:
    """Two binary trees with many small pieces in flight, as backends use among many ranks."""
    return Formula((Leg(2 * (ranks - 1).bit_length(), 2.0),))


class AnalyticNetwork:
    """A cluster's links, with costs from formulas.

    message_s: the software overhead of each message, in addition to the delay of the links it crosses.
    """

    def __init__(self, cluster: Cluster, *, message_s: float = 0.0) -> None:
        self._cluster = cluster
        self._message_s = message_s
        self._fabric = cluster.fabric()
        self._table = MeasuredTable(cluster.measured)
        self._patterns = lru_cache(maxsize=16)(self._patterns_of)
        self._known: dict[tuple[Move, int, int], tuple[Passage, ...]] = {}

    def warnings(self) -> list[str]:
        return self._table.warnings()

    def _patterns_of(self, world_size: int, groups: Hosts = ()) -> Patterns:
        return Patterns(self._fabric, world_size, self._cluster.devices_per_host, groups)

    def passages(self, move: Move, world_size: int, num_servers: int) -> tuple[Passage, ...]:
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
            return self._trees_inside(move, world_size)
        if move.kind in {"scatter_inside", "scatter_between"}:
            return self._by_host(move, world_size)
        if move.kind == "aggregate":
            return self._aggregate(move, world_size)
        patterns = self._patterns(world_size, move.groups)
        every = patterns.each if move.among_hosts else 1
        ranks = -(-world_size // every)
        if ranks == 1:
            return ()
        as_probed = not move.among_hosts and not move.groups
        if as_probed and (measured := self._table.passage(move, world_size)) is not None:
            return (measured,)
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
        """The cost of moves other than sums."""
        nbytes, near = move.nbytes, patterns.shift(1, every)
        if move.kind == "gather":
            # Doubling; a ring sends the same bytes in more steps. Leaders send directly to each other, all at once.
            steps = 1 if move.among_hosts else (ranks - 1).bit_length()
            return Passage(LINK, (ranks - 1) * nbytes * near.byte_s, steps * self._step_s(near))
        if move.kind == "scatter":
            load = patterns.to_all(every)
            return Passage(LINK, nbytes / ranks * load.byte_s, self._step_s(load))
        if move.kind == "send":
            return Passage(LINK, nbytes * near.byte_s, self._step_s(near))
        assert move.kind == "mix"
        load = patterns.mix(move.topology, move.partners)
        return Passage(LINK, nbytes * load.byte_s, max(1, move.peers) * self._step_s(load))

    # -- sums --------------------------------------------------------------------------------------------------

    def _sum(
        self, algorithm: str, nbytes: int, patterns: Patterns, *, ranks: int, every: int = 1, share: float = 1.0
    ) -> tuple[Passage, ...]:
        """The cost of a sum; share: the part of its steps and bytes that is done."""
        if algorithm == NATIVE:
            ways = [RING.cost(ranks), pipelined_trees(ranks)]
        else:
            ways = [ALGORITHMS[algorithm].cost(ranks, patterns.each)]
        found = [self._legs(way, share * nbytes, patterns, every=every, share=share) for way in ways]
        return min(found, key=lambda passages: sum(passage.seconds for passage in passages))

    def _legs(
        self, way: Formula, nbytes: float, patterns: Patterns, *, every: int, share: float
    ) -> tuple[Passage, ...]:
        """One passage for consecutive steps on the same part of the network."""
        found: list[tuple[str, float, float]] = []
        for leg in way.legs:
            load, where = _load(leg, patterns, every), _where(patterns) if leg.pattern == "inside" else LINK
            busy_s, latency_s = leg.serial_ratio * nbytes * load.byte_s, share * leg.num_steps * self._step_s(load)
            if found and found[-1][0] == where:
                _, before_s, waited_s = found.pop()
                busy_s, latency_s = before_s + busy_s, waited_s + latency_s
            found.append((where, busy_s, latency_s))
        return tuple(Passage(*leg) for leg in found)

    def _half(self, move: Move, nbytes: int, ranks: int, patterns: Patterns) -> tuple[Passage, ...]:
        """The reduce-scatter half or the all-gather half of a sum of `nbytes`."""
        if move.algorithm == NATIVE:
            near, steps = patterns.shift(1), (ranks - 1).bit_length()
            return (Passage(LINK, (ranks - 1) / ranks * nbytes * near.byte_s, steps * self._step_s(near)),)
        first = ALGORITHMS[move.algorithm].cost(ranks, patterns.each).first_half
        share = first if move.kind == "scatter_sum" else 1 - first
        return self._sum(move.algorithm, nbytes, patterns, ranks=ranks, share=share)

    def _trees_inside(self, move: Move, world_size: int) -> tuple[Passage, ...]:
        """A tree inside every host, or group, one way."""
        patterns = self._patterns(world_size, move.groups)
        each = min(patterns.each, world_size)
        depth, load = (each - 1).bit_length(), patterns.inside(each)
        moving_s, latency_s = depth * move.nbytes * load.byte_s, depth * self._step_s(load)
        return (Passage(_where(patterns), moving_s, latency_s),) if depth else ()

    def _by_host(self, move: Move, world_size: int) -> tuple[Passage, ...]:
        """An all-to-all inside every host, or among ranks with the same position on their hosts."""
        devices, patterns = min(self._cluster.devices_per_host, world_size), self._patterns(world_size)
        if move.kind == "scatter_inside":
            load = patterns.inside(devices)
            busy_s = (devices - 1) / devices * move.nbytes * load.byte_s
            return (Passage(INSIDE, busy_s, self._step_s(load)),) if devices > 1 else ()
        load, hosts = patterns.to_hosts(devices), world_size // devices
        return (Passage(LINK, move.nbytes / hosts * load.byte_s, self._step_s(load)),) if hosts > 1 else ()

    def _aggregate(self, move: Move, world_size: int) -> tuple[Passage, ...]:
        """To an aggregator on the path and back, frame by frame, so that both directions are busy at the same time."""
        if world_size == 1:
            return ()
        load = self._patterns(world_size).shift(across(self._cluster.devices_per_host, world_size))
        byte_s = load.byte_s * self._slower_than_stated(meeting=False)
        return (Passage(LINK, move.nbytes * slotted(byte_s, self._step_s(load), move.slots), self._step_s(load)),)

    # -- servers -----------------------------------------------------------------------------------------------

    def _beside(self, move: Move, world_size: int, num_servers: int) -> tuple[Passage, ...]:
        """To servers on the hosts of the first ranks, and back; with many pieces, the average load counts."""
        few = world_size <= _HOST_BY_HOST and self._cluster.devices_per_host == 1
        if move.server >= 0 and few and not self._cluster.uplinks:
            return self._at_host(move, world_size)
        load = self._patterns(world_size).to_servers(num_servers, move.shares)
        sizes = tuple(
            self._slower_than_stated(meeting=meeting) * nbytes
            for nbytes, meeting in ((move.nbytes, True), (move.answer_bytes, False))
        )
        return there_and_back(sizes, load, self._message_s + load.delay_s)

    def _at_host(self, move: Move, world_size: int) -> tuple[Passage, ...]:
        """To one server on the host of one rank, and back: its link carries the bytes of all ranks.

        One bucket that is much larger than the rest occupies one server, whatever the average is.
        """
        host = move.server % world_size
        others = [rank for rank in range(world_size) if rank != host]
        delay_s = 2 * max(link.delay_s for link in self._cluster.links[:world_size])
        found: list[Passage] = []
        for nbytes, here, there in ((move.nbytes, "into", "out of"), (move.answer_bytes, "out of", "into")):
            # Messages of several ranks meet only on the way to the server.
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
        """The factor by which large messages take longer than their links' bandwidth implies, if measured."""
        sent_s = self._table.sent_byte_s(meeting=meeting)
        stated_s = self._patterns(self._fabric.num_devices).shift(1).byte_s
        return max(1.0, sent_s / stated_s) if sent_s is not None and stated_s else 1.0


def there_and_back(sizes: tuple[float, ...], load: ServerLoad, latency_s: float) -> tuple[Passage, ...]:
    """The passages of a payload to servers and of their answer, of these sizes.

    Each direction spends half of the time of both at once on links that they share, the rest on links of its own.
    """
    found: list[Passage] = []
    for nbytes, way_s, own in zip(sizes, (load.up_s, load.down_s), (UP, DOWN), strict=True):
        shared = min(1.0, load.both_s / 2 / way_s) if way_s else 1.0
        busy_s, rank_s = nbytes * way_s, nbytes * load.rank_s
        if shared < 1 - _ROUNDING:
            found.append(Passage(own, (1 - shared) * busy_s, rank_s=(1 - shared) * rank_s, answer=own == DOWN))
        found.append(Passage(LINK, shared * busy_s, latency_s, rank_s=shared * rank_s, answer=own == DOWN))
    return tuple(passage for passage in found if passage.seconds)


def across(devices_per_host: int, world_size: int) -> int:
    """A distance between ranks at which all messages leave their hosts, if there are several hosts.

    If every rank sends and receives one byte over that distance, these bytes load the same links as with an aggregator
    when every switch on the path adds up: links of a host once for each of its ranks, links between switches once.
    """
    return devices_per_host if world_size > devices_per_host else 1


def slotted(byte_s: float, round_trip_s: float, slots: int) -> float:
    """Seconds per byte with this many frames in flight: limited by the link with its headers, or by the slots."""
    return max(byte_s * (1 + HEADER_BYTES / VALUE_BYTES), round_trip_s / (slots * VALUE_BYTES))


def _where(patterns: Patterns) -> str:
    """The links that messages inside a group of ranks keep busy."""
    return LINK if patterns.leaves_hosts else INSIDE


def _load(leg: Leg, patterns: Patterns, every: int) -> Load:
    """The load of the messages of one step; only one in `every` ranks takes part."""
    if leg.pattern == "inside":
        return patterns.inside(leg.distance)
    return patterns.swap(leg.distance) if leg.pattern == "swap" else patterns.shift(leg.distance, every * leg.every)
