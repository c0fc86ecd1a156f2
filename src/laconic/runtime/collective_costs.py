"""Facts that architectures find out when attached: which ranks share a host; for auto, how long each algorithm takes;
for a measured placement, how fast each pair of ranks exchanges.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from laconic.cluster.pairs import measure_pairs
from laconic.cluster.trials import Stage
from laconic.collectives import ALGORITHMS
from laconic.collectives.choice import NATIVE, TIMED_BYTES, Costs
from laconic.collectives.execution import WholeExchange, run
from laconic.core.clock import Clock
from laconic.core.hosts import Hosts, Pairs
from laconic.core.transport import Transport, Work
from laconic.strategy import Strategy

_REPEATS = 5
"""Timed repeats, after one warm-up."""
_LIMIT_S = 2.0
"""Measuring stops before the size with which the total time would exceed this."""


def settle(strategy: Strategy, transport: Transport, clock: Clock, device: torch.device) -> Strategy:
    """The strategy with the facts that are known only when attaching; every rank calls it and gets the same result.

    Raises AttachError if an algorithm would have no effect on these hosts.
    """
    architecture = strategy.architecture.settled(lambda: transport.hosts, _Trials(transport, clock, device))
    return strategy if architecture is strategy.architecture else replace(strategy, architecture=architecture)


@dataclass(frozen=True)
class _Trials:
    """Measurements among the ranks of a transport; all ranks make the same calls."""

    transport: Transport
    clock: Clock
    device: torch.device

    def costs(self, algorithms: Sequence[str], hosts: Hosts) -> Costs:
        return measure(algorithms, self.transport, self.clock, self.device, hosts=hosts)

    def pairs(self) -> Pairs:
        if self.transport.in_process:
            return ()  # threads have no links, and rates between them are those of the moment
        return measure_pairs(Stage(self.transport, self.clock, self.device))


def what_was_settled(strategy: Strategy) -> dict[str, str]:
    """For the event log."""
    return strategy.architecture.facts()


def measure(
    algorithms: Sequence[str],
    transport: Transport,
    clock: Clock,
    device: torch.device,
    *,
    hosts: Hosts = (),
    limit_s: float = _LIMIT_S,
) -> Costs:
    """Time the backend's own algorithm and these for a few sizes, in turn; the time of the slowest rank counts.

    hosts: ranks as algorithms group them by host; the transport's own grouping if left out.

    Sizes grow until the time is spent; a slow link stops at small sizes, which are enough there. Counted as control
    traffic.
    """
    algorithms = [NATIVE, *algorithms]
    sizes: list[int] = []
    seconds: list[list[float]] = []
    spent_s = 0.0
    for nbytes in TIMED_BYTES:
        # All ranks have the same numbers here, so all continue or all stop.
        if sizes and spent_s + (1 + _REPEATS) * _expected_s(sizes, seconds, nbytes) > limit_s:
            break
        tensor = torch.zeros(nbytes // 4, device=device)
        times = _times(algorithms, transport, clock, tensor, hosts or transport.hosts)
        sizes.append(nbytes)
        seconds.append([statistics.median(column) for column in zip(*times, strict=True)])
        spent_s += (1 + _REPEATS) * sum(seconds[-1])
    columns = zip(*seconds, strict=True)
    return Costs(tuple(sizes), tuple(zip(algorithms, columns, strict=True)))


def _expected_s(sizes: list[int], seconds: list[list[float]], nbytes: int) -> float:
    """The expected total time of all algorithms for `nbytes`, extrapolated from the sizes measured so far."""
    if len(sizes) == 1:
        return 2 * sum(seconds[0])  # one size says nothing about growth; the first two are small
    (low, high), (before_s, last_s) = sizes[-2:], map(sum, seconds[-2:])
    return last_s + max(0.0, last_s - before_s) / (high - low) * (nbytes - high)


def _times(
    algorithms: list[str], transport: Transport, clock: Clock, tensor: torch.Tensor, hosts: Hosts
) -> list[list[float]]:
    """Seconds on the slowest rank, one row per repeat, after one that only warms up."""
    rows: list[list[float]] = []
    for _ in range(1 + _REPEATS):
        rows.append([])
        for algorithm in algorithms:
            _meet(transport)
            began_s = clock.now()
            _start(algorithm, transport, tensor, hosts).wait()
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
            rows[-1].append(clock.now() - began_s)
    slowest = torch.tensor(rows[1:], dtype=torch.float64, device=transport.control_device)
    transport.all_reduce(slowest, op="max", purpose="control", what="times of algorithms").wait()
    return slowest.tolist()


def _start(algorithm: str, transport: Transport, tensor: torch.Tensor, hosts: Hosts) -> Work:
    if algorithm == NATIVE:
        return transport.all_reduce(tensor, purpose="control", what="a trial of native")
    collective = ALGORITHMS[algorithm](hosts)
    return WholeExchange(run(collective, transport, (tensor,), what=f"a trial of {algorithm}", purpose="control"))


def _meet(transport: Transport) -> None:
    """Start all ranks together: a late rank would make the others look slow."""
    here = torch.zeros(1, device=transport.control_device)
    transport.all_reduce(here, purpose="control", what="a trial").wait()
