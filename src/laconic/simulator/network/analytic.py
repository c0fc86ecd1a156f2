"""Costs from formulas: steps times latency plus bytes over the busiest link; measured tables where there are any.

    t = start-up + steps (software + delay) + bytes one after the other x seconds per byte

The seconds per byte of a step are those of the busiest link that its messages share. Where a probe has measured an
operation among as many ranks, its table (start-up, ramp, plateau) takes the formula's place. The backend's own
all-reduce is a ring or, where that is faster, two trees, as backends choose.
"""

from __future__ import annotations

from functools import lru_cache

from laconic.cluster import Cluster
from laconic.cluster.measured import Curve
from laconic.collectives.choice import NATIVE
from laconic.collectives.formulas import Formula, formula
from laconic.core.exchange import Move
from laconic.core.transport import all_gather_sent, shard_exchange_sent
from laconic.simulator.network.contract import DOWN, INSIDE, LINK, UP, Passage
from laconic.simulator.network.patterns import Patterns
from laconic.units import human_bytes

_MEASURED_AS = {
    "sum": "all_reduce",
    "scatter_sum": "all_to_all",  # that and a sum on the spot is how it is done
    "gather": "all_gather",
    "scatter": "all_to_all",
    "send": "send",
    "mix": "send",
}


def _pipelined_trees(ranks: int) -> Formula:
    """Two binary trees with many small pieces under way, which backends use among many ranks."""
    return Formula(2 * (ranks - 1).bit_length(), 2.0)


def _seconds(way: Formula, nbytes: int, byte_s: float, step_s: float) -> float:
    return way.serial_ratio * nbytes * byte_s + way.num_steps * step_s


class AnalyticNetwork:
    """A cluster's links, priced by formulas.

    message_s: what software takes for each message, beside the delay of the links it crosses.
    """

    def __init__(self, cluster: Cluster, *, message_s: float = 0.0) -> None:
        self._cluster = cluster
        self._message_s = message_s
        self._fabric = cluster.fabric()
        self._warnings: dict[str, None] = {}
        self._patterns = lru_cache(maxsize=16)(lambda world_size: Patterns(self._fabric, world_size))
        self._known: dict[tuple[Move, int, int], tuple[Passage, ...]] = {}

    def warnings(self) -> list[str]:
        """See Network."""
        return list(self._warnings)

    def passages(self, move: Move, world_size: int, num_servers: int) -> tuple[Passage, ...]:
        """See Network."""
        key = move, world_size, num_servers
        if key not in self._known:
            self._known[key] = self._passages(*key)
        return self._known[key]

    def _passages(self, move: Move, world_size: int, num_servers: int) -> tuple[Passage, ...]:
        if move.kind in {"to_leaders", "from_leaders"}:
            return (self._inside(move),)
        if move.kind == "serve":
            return self._serve(move, world_size, num_servers)
        ranks = -(-world_size // self._cluster.devices_per_host) if move.among_hosts else world_size
        if ranks == 1:
            return ()
        measured = None if move.among_hosts else self._measured(move, world_size)
        return (measured or self._formula(move, world_size, ranks),)

    def _formula(self, move: Move, world_size: int, ranks: int) -> Passage:
        patterns = self._patterns(world_size)
        every = self._cluster.devices_per_host if move.among_hosts else 1
        byte_s, delay_s = patterns.shift(1, every)
        step_s = self._message_s + delay_s
        nbytes = move.nbytes
        if move.kind == "sum":
            return self._sum(move, ranks, byte_s, step_s, patterns)
        depth = (ranks - 1).bit_length()  # halving and doubling; a ring sends as much in more steps
        if move.kind == "scatter_sum":
            return Passage(LINK, nbytes * (ranks - 1) / ranks * byte_s, depth * step_s)
        if move.kind == "gather":
            return Passage(LINK, all_gather_sent(nbytes, ranks) * byte_s, depth * step_s)
        if move.kind == "scatter":
            all_s, delay_s = patterns.to_all()
            return Passage(LINK, shard_exchange_sent(nbytes, ranks) / max(1, ranks - 1) * all_s, step_s)
        if move.kind == "send":
            return Passage(LINK, nbytes * byte_s, step_s)
        assert move.kind == "mix"
        # Neighbours are next to each other, or 1, 2, 4, ... places on: all of these messages leave at once.
        shifts = [patterns.shift(1 << number) for number in range(min(move.peers, 16))]
        return Passage(
            LINK, nbytes * sum(shift[0] for shift in shifts), self._message_s + max(shift[1] for shift in shifts)
        )

    def _sum(self, move: Move, ranks: int, byte_s: float, step_s: float, patterns: Patterns) -> Passage:
        if move.algorithm == "hierarchical":
            return self._hierarchical(move, ranks, patterns)
        found = formula(move.algorithm, ranks)
        if move.algorithm == NATIVE:
            found = min(found, _pipelined_trees(ranks), key=lambda way: _seconds(way, move.nbytes, byte_s, step_s))
        if move.algorithm != "halving_doubling":
            return Passage(LINK, found.serial_ratio * move.nbytes * byte_s, found.num_steps * step_s)
        # Its steps go different distances, and on a tree of switches the long ones share links.
        inside = 1 << (ranks.bit_length() - 1)
        busy_s, latency_s = 0.0, 0.0
        for level in range(inside.bit_length() - 1):
            level_byte_s, delay_s = patterns.swap(1 << level)
            busy_s += 2 * move.nbytes * (1 << level) / inside * level_byte_s
            latency_s += 2 * (self._message_s + delay_s)
        if ranks > inside:
            busy_s, latency_s = busy_s + 2 * move.nbytes * byte_s, latency_s + 2 * step_s
        return Passage(LINK, busy_s, latency_s)

    def _hierarchical(self, move: Move, ranks: int, patterns: Patterns) -> Passage:
        devices = self._cluster.devices_per_host
        hosts = -(-ranks // devices)
        inside_byte_s, inside_delay_s = self._inside_link()
        host_byte_s, delay_s = patterns.shift(1, devices)
        inside, between = formula("ring", devices), formula("ring", hosts)
        return Passage(
            LINK,
            move.nbytes * (inside.serial_ratio * inside_byte_s + between.serial_ratio * host_byte_s),
            inside.num_steps * (self._message_s + inside_delay_s) + between.num_steps * (self._message_s + delay_s),
        )

    def _inside(self, move: Move) -> Passage:
        """A tree inside every host."""
        byte_s, delay_s = self._inside_link()
        steps = (self._cluster.devices_per_host - 1).bit_length()
        return Passage(INSIDE, steps * move.nbytes * byte_s, steps * (self._message_s + delay_s))

    def _inside_link(self) -> tuple[float, float]:
        inside = self._cluster.inside
        return (8 / inside.bandwidth_bps, inside.delay_s) if inside is not None else (0.0, 0.0)

    def _serve(self, move: Move, world_size: int, num_servers: int) -> tuple[Passage, ...]:
        """To the servers and back; pieces are spread evenly over them, so what counts is the load on average."""
        patterns = self._patterns(world_size)
        _, delay_s = patterns.shift(1)
        latency_s = self._message_s + delay_s
        if num_servers < 0:  # on hosts of their own, with links like those of the workers
            worker_byte_s = patterns.shift(self._cluster.devices_per_host)[0]
            byte_s = max(worker_byte_s, world_size / -num_servers * worker_byte_s)
            return (
                Passage(UP, move.nbytes * byte_s, latency_s),
                Passage(DOWN, move.answer_bytes * byte_s, latency_s),
            )
        byte_s, delay_s = patterns.to_servers(num_servers)
        byte_s *= self._slower_than_stated()
        latency_s = self._message_s + delay_s
        return (
            Passage(LINK, move.nbytes * byte_s, latency_s),
            Passage(LINK, move.answer_bytes * byte_s, latency_s),
        )

    def _slower_than_stated(self) -> float:
        """By what a large message between two ranks takes longer than its links' bandwidth says, if measured."""
        measured = self._cluster.measured
        curve = None if measured is None else measured.curve("send")
        if curve is None:
            return 1.0
        return max(1.0, 1 / curve.plateau_bytes_per_s / self._patterns(2 * self._cluster.devices_per_host).shift(1)[0])

    def _measured(self, move: Move, world_size: int) -> Passage | None:
        """What a probe has measured for this move, if it has."""
        measured = self._cluster.measured
        if measured is None:
            return None
        kind = _MEASURED_AS[move.kind]
        if move.kind == "sum" and move.algorithm != NATIVE:
            kind = f"all_reduce({move.algorithm})"
        curve = measured.curve(kind, world_size)
        if curve is None and kind != "send" and (other := measured.curve(kind)) is not None:
            self._warn(
                f"{kind} was measured among {other.world_size} ranks, not among {world_size}: formulas are used."
            )
        if curve is None and kind == "send":
            curve = measured.curve(kind)  # between two ranks, however many there are
        return None if curve is None else self._on_curve(curve, move)

    def _on_curve(self, curve: Curve, move: Move) -> Passage:
        messages = len(move.sizes) * (move.peers if move.kind == "mix" else 1)
        nbytes = move.nbytes * (move.peers if move.kind == "mix" else 1)
        found = curve.estimate(nbytes)
        if not found.inside:
            self._warn(
                f"{curve.kind} was measured for {human_bytes(curve.sizes[0])} to {human_bytes(curve.sizes[-1])}; "
                "other sizes are extrapolated."
            )
        startup_s = min(curve.startup_s, found.seconds)
        issue_s = min(curve.issue_s, startup_s)
        return Passage(LINK, found.seconds - startup_s, startup_s - issue_s, messages * issue_s)

    def _warn(self, text: str) -> None:
        self._warnings[text] = None
