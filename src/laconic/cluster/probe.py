"""Measures the times of operations on the ranks of a transport, and makes a cluster of them.

Every rank calls `probe` at the same time. For each size all operations are timed in turn, several times; the slowest
rank counts, and of the repeats the median. Sizes grow until the time budget is spent. All bytes are control traffic.

    further = (time of 6 operations in flight at once - time of 2) / 4
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from laconic.cluster.cluster import Cluster
from laconic.cluster.link import Link
from laconic.cluster.measured import Curve, Measured
from laconic.cluster.pairs import measure_pairs
from laconic.cluster.trials import ELEMENT_BYTES, Operation, Stage, StartSum, operations_of
from laconic.core.clock import Clock
from laconic.core.hosts import Hosts
from laconic.core.transport import AllWork, Transport, Work
from laconic.errors import UsageError
from laconic.units import human_bytes, human_seconds

SIZES: tuple[int, ...] = tuple(1024 * 4**power for power in range(9))
"""1 KiB to 64 MiB."""
LIMIT_S = 10.0
"""How long the whole probe may take, roughly."""
_REPEATS, _REPEATS_OF_SMALL, _REPEATS_AT_ONCE, _REPEATS_OF_QUICK = 5, 15, 7, 3
"""Repeats after one warm-up. Start-up varies more than bandwidth, and small messages cost little."""
_SMALL_BYTES = 64 * 1024
_ALWAYS = 2
"""The number of sizes that are measured in any case: fewer do not show how times grow."""
_FEW, _MORE = 2, 6
"""Operations in flight at once. Not one: a backend with two threads takes as long for two as for one."""
_FURTHER_BYTES = 256 * 1024
"""Up to this size the time that one more adds is measured; larger sizes hide as much: all that can be hidden."""


def probe(
    transport: Transport,
    clock: Clock,
    *,
    device: torch.device | None = None,
    sizes: Sequence[int] = SIZES,
    limit_s: float = LIMIT_S,
    algorithms: Mapping[str, StartSum] | None = None,
    pairs: bool = False,
    quick: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> Measured:
    """Time all_reduce, all_gather, all_to_all and send between these ranks; every rank gets the same result.

    algorithms: further ways to sum, by name; they become the kinds all_reduce(NAME).
    pairs: also measure the bandwidth between every two ranks while all others send too, for as long again.
    quick: for use between steps of training: few repeats, and beyond two small sizes only what the limit allows.
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
            # All ranks have the same numbers here, so all continue or all stop.
            alive = _affordable(alive, found, nbytes, limit_s - spent_s, quick=quick)
        ready = [(operation.kind, made) for operation in alive if (made := operation.prepare(nbytes)) is not None]
        if not ready:
            break
        repeats = _REPEATS_OF_QUICK if quick else _repeats(nbytes)
        times, took_s = stage.by_turns([start for _, (_, start) in ready], repeats)
        spent_s += took_s
        for (kind, (real_bytes, _)), seconds in zip(ready, times, strict=True):
            found[kind].append((real_bytes, seconds))
        shown = ", ".join(f"{kind} {human_seconds(seconds)}" for (kind, _), seconds in zip(ready, times, strict=True))
        tell(f"{human_bytes(nbytes)}: {shown}")
        allowed = not quick or spent_s + (1 + _REPEATS_AT_ONCE) * (_FEW + _MORE) * sum(times) <= limit_s
        if nbytes <= _FURTHER_BYTES and allowed:
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
        pairs_bps=measure_pairs(stage, limit_s, tell) if pairs else (),
    )


def cluster_of(
    measured: Measured, hosts: Hosts, *, bandwidth_bps: float | None = None, name: str = "", source: str = ""
) -> Cluster:
    """The measured cluster: hosts on a switch, with links at the measured rates of messages between them.

    bandwidth_bps: of the hosts' links, where it is known. Delays include the software overhead of a message.
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
    """Raise UsageError unless all hosts have the same number of ranks, numbered host by host, as a cluster requires."""
    counts = [len(host) for host in hosts]
    if len(set(counts)) > 1:
        raise UsageError(
            f"the hosts have different numbers of ranks ({', '.join(map(str, counts[:20]))}), which a cluster cannot "
            "describe. Start the same number of ranks on each host."
        )
    if [rank for host in hosts for rank in host] != list(range(sum(counts))):
        raise UsageError(f"ranks must be numbered host by host, as torchrun does, got {list(hosts)[:8]}.")


def _check_sizes(sizes: Sequence[int]) -> None:
    if len(set(sizes)) < 2 or min(sizes) < ELEMENT_BYTES:
        raise UsageError(f"at least two sizes of {ELEMENT_BYTES} bytes or more are needed, got {list(sizes)}.")


def _affordable(
    operations: Sequence[Operation],
    found: Mapping[str, list[tuple[int, float]]],
    nbytes: int,
    left_s: float,
    *,
    quick: bool,
) -> list[Operation]:
    """The kinds without the slowest ones, so that the others fit into the remaining time."""
    times = 1 + _REPEATS_OF_QUICK if quick else _times(nbytes)
    expected = {
        operation.kind: times * _expected_s(found[operation.kind], nbytes)
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
    """The number of repeats for a size, with those in flight at once."""
    at_once = (1 + _REPEATS_AT_ONCE) * (_FEW + _MORE) if nbytes <= _FURTHER_BYTES else 0
    return 1 + _repeats(nbytes) + at_once


def _expected_s(points: list[tuple[int, float]], nbytes: int) -> float:
    """The expected time of `nbytes`, extrapolated from the sizes so far."""
    (low, low_s), (high, high_s) = points[-2:]
    # Small sizes are mostly start-up and say little about growth, so never less than in proportion to the last step.
    return high_s + max(high_s - low_s, 0.1 * high_s) / (high - low) * (nbytes - high)


def _further(stage: Stage, operations: Sequence[Operation], nbytes: int) -> tuple[dict[str, float], float]:
    """For each kind, the time that every further operation adds while others are in flight; and the time spent."""
    starts: list[Callable[[], Work]] = []
    for operation in operations:
        # Buffers of their own: those of an operation that is in flight must not be touched.
        copies = [made[1] for _ in range(_MORE) if (made := operation.prepare(nbytes)) is not None]
        starts += [_at_once(copies[:_FEW]), _at_once(copies)]
    times, took_s = stage.by_turns(starts, _REPEATS_AT_ONCE)
    added = [max(0.0, more - few) / (_MORE - _FEW) for few, more in zip(times[::2], times[1::2], strict=True)]
    return {operation.kind: seconds for operation, seconds in zip(operations, added, strict=True)}, took_s


def _at_once(starts: Sequence[Callable[[], Work]]) -> Callable[[], Work]:
    return lambda: AllWork([start() for start in starts])


def _bandwidth_bps(curve: Curve) -> float:
    return min(1e13, max(1e3, _rounded(8 * curve.plateau_bytes_per_s)))


def _rounded(number: float) -> float:
    """Four digits: more would suggest false precision."""
    return float(f"{number:.4g}")


def _rounded_time(seconds: float) -> float:
    """Whole microseconds, where those are exact enough."""
    return round(seconds, 6) if seconds >= 1e-5 else _rounded(seconds)
