"""What all_reduce learns when it is attached: which ranks share a host, and for auto how long each algorithm takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from laconic.collectives import ALGORITHMS
from laconic.collectives.choice import NATIVE, Costs
from laconic.collectives.execution import WholeExchange, run
from laconic.core.clock import Clock
from laconic.core.transport import Transport, Work
from laconic.strategy import Strategy

_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_REPEATS = 5
"""After one that only warms up."""
_LIMIT_S = 2.0
"""No further size is measured if it would, with all before it, take longer than this."""


def settle(strategy: Strategy, transport: Transport, clock: Clock, device: torch.device) -> Strategy:
    """The strategy, knowing what only attaching tells; every rank calls it and comes to the same.

    Raises AttachError if an algorithm would have no effect on these hosts.
    """
    architecture = strategy.architecture.settled(
        lambda: transport.hosts, lambda algorithms: measure(algorithms, transport, clock, device)
    )
    return strategy if architecture is strategy.architecture else replace(strategy, architecture=architecture)


def what_was_settled(strategy: Strategy) -> dict[str, str]:
    """For the event log."""
    return strategy.architecture.facts()


def measure(
    algorithms: Sequence[str], transport: Transport, clock: Clock, device: torch.device, *, limit_s: float = _LIMIT_S
) -> Costs:
    """Time the backend's own algorithm and these for a few sizes, by turns; what the slowest rank takes counts.

    Sizes grow until the time is spent: a slow link stops early, and needs to know no more. Counted as control traffic.
    """
    algorithms = [NATIVE, *algorithms]
    sizes: list[int] = []
    seconds: list[list[float]] = []
    spent_s = 0.0
    for nbytes in _SIZES:
        # All ranks have the same numbers here, so all go on or stop alike.
        if sizes and spent_s + (1 + _REPEATS) * _expected_s(sizes, seconds, nbytes) > limit_s:
            break
        times = _times(algorithms, transport, clock, torch.zeros(nbytes // 4, device=device))
        sizes.append(nbytes)
        seconds.append([statistics.median(column) for column in zip(*times, strict=True)])
        spent_s += (1 + _REPEATS) * sum(seconds[-1])
    columns = zip(*seconds, strict=True)
    return Costs(tuple(sizes), tuple(zip(algorithms, columns, strict=True)))


def _expected_s(sizes: list[int], seconds: list[list[float]], nbytes: int) -> float:
    """What all algorithms together should take for `nbytes`, from how times have grown so far."""
    if len(sizes) == 1:
        return 2 * sum(seconds[0])  # one size says nothing about growth; the first two are small
    (low, high), (before_s, last_s) = sizes[-2:], map(sum, seconds[-2:])
    return last_s + max(0.0, last_s - before_s) / (high - low) * (nbytes - high)


def _times(algorithms: list[str], transport: Transport, clock: Clock, tensor: torch.Tensor) -> list[list[float]]:
    """Seconds on the slowest rank, one row per repeat, after one that only warms up."""
    rows: list[list[float]] = []
    for _ in range(1 + _REPEATS):
        rows.append([])
        for algorithm in algorithms:
            _meet(transport)
            began_s = clock.now()
            _start(algorithm, transport, tensor).wait()
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
            rows[-1].append(clock.now() - began_s)
    slowest = torch.tensor(rows[1:], dtype=torch.float64, device=transport.control_device)
    transport.all_reduce(slowest, op="max", purpose="control", what="times of algorithms").wait()
    return slowest.tolist()


def _start(algorithm: str, transport: Transport, tensor: torch.Tensor) -> Work:
    if algorithm == NATIVE:
        return transport.all_reduce(tensor, purpose="control", what="a trial of native")
    collective = ALGORITHMS[algorithm](transport.hosts)
    return WholeExchange(run(collective, transport, (tensor,), what=f"a trial of {algorithm}", purpose="control"))


def _meet(transport: Transport) -> None:
    """Begin together: who comes late would seem to make the others slow."""
    here = torch.zeros(1, device=transport.control_device)
    transport.all_reduce(here, purpose="control", what="a trial").wait()
