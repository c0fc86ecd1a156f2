"""Measure how long operations take on the ranks of a transport, and make a cluster of it.

Every rank calls `probe` at the same time. For each size all operations are timed by turns, a few times over; of each
the slowest rank counts, and of the repeats the median. Sizes grow until the time is spent. All is control traffic.

    further = (time of 6 operations under way at once - time of 2) / 4
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from laconic.cluster.cluster import Cluster
from laconic.cluster.link import Link
from laconic.cluster.measured import Curve, Measured
from laconic.cluster.trials import ELEMENT_BYTES, Operation, Stage, StartSum, operations_of
from laconic.core.clock import Clock
from laconic.core.hosts import Hosts
from laconic.core.transport import AllWork, Transport, Work
from laconic.errors import UsageError
from laconic.units import human_bytes, human_seconds

SIZES: tuple[int, ...] = tuple(1024 * 4**power for power in range(9))
"""1 KiB to 64 MiB."""
LIMIT_S = 10.0
"""How long all of it may take, roughly."""
_REPEATS, _REPEATS_OF_SMALL, _REPEATS_AT_ONCE, _REPEATS_OF_PAIRS = 5, 15, 7, 3
"""LocalServer one that only warms up. Start-up varies more than bandwidth, and small messages cost little."""
_SMALL_BYTES = 64 * 1024
_ALWAYS = 2
"""So many sizes are measured however long they take: fewer say nothing about how times grow."""
_FEW, _MORE = 2, 6
"""Operations under way at once. Not one and more: a backend with two threads takes as long for two as for one."""
_FURTHER_BYTES = 256 * 1024
"""Up to here it is measured what one more adds. Of larger ones others hide as much: all that can be hidden."""
_PAIR_BYTES = 4 * 1024**2


def probe(
    transport: Transport,
    clock: Clock,
    *,
    device: torch.device | None = None,
    sizes: Sequence[int] = SIZES,
    limit_s: float = LIMIT_S,
    algorithms: Mapping[str, StartSum] | None = None,
    pairs: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> Measured:
    """Time all_reduce, all_gather, all_to_all and send between these ranks; every rank comes to the same.

    algorithms: further ways to sum, by name; they become the kinds all_reduce(NAME).
    pairs: also measure the bandwidth from every rank to every other, for as long again.
    """
    if transport.world_size < 2:
        raise UsageError("there is nothing to measure with one rank. Start at least two.")
    _check_sizes(sizes)
    stage = Stage(transport, clock, device or transport.control_device)
    tell = on_progress or (lambda text: None)
    operations = operations_of(stage, max(sizes), algorithms or {})
    found: dict[str, list[tuple[int, float]]] = {operation.kind: [] for operation in operations}
    further: dict[str, list[float]] = {operation.kind: [] for operation in operations}
    alive, spent_s = operations, 0.0
    for number, nbytes in enumerate(sorted(set(sizes))):
        if number >= _ALWAYS:
            # All ranks have the same numbers here, so all go on or stop alike.
            alive = _affordable(alive, found, nbytes, limit_s - spent_s)
        ready = [(operation.kind, made) for operation in alive if (made := operation.prepare(nbytes)) is not None]
        if not ready:
            break
        times, took_s = stage.by_turns([start for _, (_, start) in ready], _repeats(nbytes))
        spent_s += took_s
        for (kind, (real_bytes, _)), seconds in zip(ready, times, strict=True):
            found[kind].append((real_bytes, seconds))
        shown = ", ".join(f"{kind} {human_seconds(seconds)}" for (kind, _), seconds in zip(ready, times, strict=True))
        tell(f"{human_bytes(nbytes)}: {shown}")
        if nbytes <= _FURTHER_BYTES:
            added, took_s = _further(stage, [operation for operation in alive if operation.kind in dict(ready)], nbytes)
            spent_s += took_s
            for kind, seconds in added.items():
                further[kind].append(seconds)
            tell("each further: " + ", ".join(f"{kind} {human_seconds(seconds)}" for kind, seconds in added.items()))
    return Measured(
        curves=tuple(
            Curve(
                kind=kind,
                world_size=transport.world_size,
                sizes=tuple(size for size, _ in points),
                seconds=tuple(_rounded(seconds) for _, seconds in points),
                further=tuple(_rounded(seconds) for seconds in further[kind]),
            )
            for kind, points in found.items()
            if points
        ),
        transport=transport.description,
        pairs_bps=_pairs(stage, found["send"], limit_s, tell) if pairs else (),
    )


def cluster_of(
    measured: Measured, hosts: Hosts, *, bandwidth_bps: float | None = None, name: str = "", source: str = ""
) -> Cluster:
    """The cluster that was measured: hosts on a switch, with links as fast as messages between them were.

    bandwidth_bps: that of the hosts' links, where it is known. Delays hold what software takes for a message.
    """
    check_hosts(hosts)
    devices = len(hosts[0])
    neighbours = measured.curve("send")
    assert neighbours is not None
    inside = (measured.curve("send(inside)") or neighbours) if devices > 1 else None
    between = measured.curve("send(between)") or neighbours
    # A message crosses the port of both devices, and the links of both hosts.
    inside_s = inside.startup_s if inside is not None else 0.0
    delay_s = max(0.0, between.startup_s - inside_s) / 2
    link = Link(bandwidth_bps=bandwidth_bps or _bandwidth_bps(between), delay_s=_rounded_time(delay_s))
    port = Link(bandwidth_bps=_bandwidth_bps(inside), delay_s=_rounded_time(inside_s / 2)) if inside else None
    return Cluster(
        links=(link,) * len(hosts),
        devices_per_host=devices,
        inside=port,
        name=name,
        source=source,
        measured=measured,
    )


def check_hosts(hosts: Hosts) -> None:
    """Raise UsageError unless all hosts have as many ranks, numbered host by host: what a cluster can say."""
    counts = [len(host) for host in hosts]
    if len(set(counts)) > 1:
        raise UsageError(
            f"the hosts have different numbers of ranks ({', '.join(map(str, counts[:20]))}), which a cluster cannot "
            "describe. Start as many on each."
        )
    if [rank for host in hosts for rank in host] != list(range(sum(counts))):
        raise UsageError(f"ranks must be numbered host by host, as torchrun does, got {list(hosts)[:8]}.")


def _check_sizes(sizes: Sequence[int]) -> None:
    if len(set(sizes)) < 2 or min(sizes) < ELEMENT_BYTES:
        raise UsageError(f"at least two sizes of {ELEMENT_BYTES} bytes or more are needed, got {list(sizes)}.")


def _affordable(
    operations: Sequence[Operation], found: Mapping[str, list[tuple[int, float]]], nbytes: int, left_s: float
) -> list[Operation]:
    """Without the slowest, until the others should be done in the time that is left."""
    expected = {
        operation.kind: _times(nbytes) * _expected_s(found[operation.kind], nbytes)
        for operation in operations
        if len(found[operation.kind]) > 1
    }
    kept = sorted(expected, key=lambda kind: expected[kind])
    while kept and sum(expected[kind] for kind in kept) > left_s:
        kept.pop()
    return [operation for operation in operations if operation.kind in kept]


def _repeats(nbytes: int) -> int:
    return _REPEATS_OF_SMALL if nbytes <= _SMALL_BYTES else _REPEATS


def _times(nbytes: int) -> int:
    """How often an operation of that size takes place."""
    at_once = (1 + _REPEATS_AT_ONCE) * (_FEW + _MORE) if nbytes <= _FURTHER_BYTES else 0
    return 1 + _repeats(nbytes) + at_once


def _expected_s(points: list[tuple[int, float]], nbytes: int) -> float:
    """What `nbytes` should take, from how times have grown so far."""
    (low, low_s), (high, high_s) = points[-2:]
    # Small sizes are mostly start-up and say little about growth, so never less than in proportion to the last step.
    return high_s + max(high_s - low_s, 0.1 * high_s) / (high - low) * (nbytes - high)


def _further(stage: Stage, operations: Sequence[Operation], nbytes: int) -> tuple[dict[str, float], float]:
    """Of each kind: what every further one adds while others are under way; and how long it took to find out."""
    starts: list[Callable[[], Work]] = []
    for operation in operations:
        # Buffers of their own: those of an operation that is under way must not be touched.
        copies = [made[1] for _ in range(_MORE) if (made := operation.prepare(nbytes)) is not None]
        starts += [_at_once(copies[:_FEW]), _at_once(copies)]
    times, took_s = stage.by_turns(starts, _REPEATS_AT_ONCE)
    added = [max(0.0, more - few) / (_MORE - _FEW) for few, more in zip(times[::2], times[1::2], strict=True)]
    return {operation.kind: seconds for operation, seconds in zip(operations, added, strict=True)}, took_s


def _at_once(starts: Sequence[Callable[[], Work]]) -> Callable[[], Work]:
    return lambda: AllWork([start() for start in starts])


def _pairs(
    stage: Stage, sends: Sequence[tuple[int, float]], limit_s: float, tell: Callable[[str], None]
) -> tuple[tuple[float, ...], ...]:
    """Bits per second from each rank to each other, while no other pair sends: as large a message as time allows."""
    transport = stage.transport
    world_size = transport.world_size
    turns = world_size * (world_size - 1) * (1 + _REPEATS_OF_PAIRS)
    allowed = [size for size, seconds in sends if size <= _PAIR_BYTES and turns * 2 * seconds <= limit_s]
    nbytes = max(allowed, default=sends[0][0])
    large, small = stage.zeros(nbytes // ELEMENT_BYTES), stage.zeros(1)
    rates = [[0.0] * world_size for _ in range(world_size)]
    for source in range(world_size):
        for destination in range(world_size):
            if source == destination:
                continue

            def start(tensor: torch.Tensor, source: int = source, destination: int = destination) -> Work:
                sends = [(destination, tensor)] if transport.rank == source else []
                receives = [(source, tensor)] if transport.rank == destination else []
                return transport.send_receive(sends, receives, purpose="control", what="a pair")

            both = [lambda start=start: start(small), lambda start=start: start(large)]
            (empty_s, full_s), _ = stage.by_turns(both, _REPEATS_OF_PAIRS)
            # Without start-up; but where that is nearly all, chance must not make a link endlessly fast.
            rates[source][destination] = _rounded(8 * large.nbytes / max(full_s - empty_s, full_s / 2))
        tell(f"pairs: from {source + 1} of {world_size} ranks")
    return tuple(map(tuple, rates))


def _bandwidth_bps(curve: Curve) -> float:
    return min(1e13, max(1e3, _rounded(8 * curve.plateau_bytes_per_s)))


def _rounded(number: float) -> float:
    """Four digits: more would only look exact."""
    return float(f"{number:.4g}")


def _rounded_time(seconds: float) -> float:
    """Whole microseconds, where those are exact enough."""
    return round(seconds, 6) if seconds >= 1e-5 else _rounded(seconds)
