"""The plan a strategy follows once it knows its job: found as the runtime finds it, with simulated times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from laconic.collectives.choice import NATIVE, Costs
from laconic.core.exchange import Move
from laconic.core.hosts import Hosts
from laconic.core.plan import Plan
from laconic.core.timing import Timing
from laconic.simulator.lowering.task_graph import Inputs
from laconic.simulator.network.contract import Network, seconds
from laconic.strategy import Strategy

_SMALL_BYTES, _LARGEST_BYTES = 4096, 2**25
_LONG_ENOUGH_S = 0.05
_SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
"""What the runtime measures for auto."""


def settled(strategy: Strategy, hosts: Hosts, network: Network) -> Strategy:
    """The strategy, knowing where ranks are and, for auto, what each algorithm takes."""
    world_size = sum(map(len, hosts))

    def measure(algorithms: Sequence[str]) -> Costs:
        times = tuple(
            (name, tuple(seconds(network, Move("sum", (size,), name), world_size) for size in _SIZES))
            for name in (NATIVE, *algorithms)
        )
        return Costs(_SIZES, times)

    architecture = strategy.architecture.settled(lambda: hosts, measure)
    return strategy if architecture is strategy.architecture else replace(strategy, architecture=architecture)


def candidates(inputs: Inputs) -> list[list[Plan]]:
    """The plans the runtime would try, or the one it would make; a list has one for each part of the model."""
    strategy, tensors = inputs.strategy, inputs.workload.tensors
    if not strategy.exchanges_gradients():
        return [strategy.plans(tensors, inputs.world_size)]
    schedule = strategy.scheduling
    times = timing(inputs) if schedule.needs_timing else None
    return [
        [strategy.plan(tensors, inputs.world_size, timing=times, candidate=number)]
        for number in range(schedule.candidates)
    ]


def timing(inputs: Inputs) -> Timing:
    """When rank 0's gradients are ready, and t(M) = a + b M, as the runtime would measure it on this network."""
    ready: list[float] = []
    now_s = 0.0
    for layer in reversed(inputs.workload.layers):
        now_s += inputs.first_slowdown * layer.backward_s
        ready += [now_s] * len(layer.tensors)

    def took_s(nbytes: int) -> float:
        return seconds(inputs.network, Move("sum", (nbytes,)), inputs.world_size)

    small_s, nbytes = took_s(_SMALL_BYTES), 16 * _SMALL_BYTES
    while nbytes < _LARGEST_BYTES and took_s(nbytes) < _LONG_ENOUGH_S:
        nbytes *= 2
    byte_s = max(0.0, took_s(nbytes) - small_s) / (nbytes - _SMALL_BYTES)
    # Counted from the first gradient, as only that can be seen.
    return Timing(tuple(time_s - ready[0] for time_s in ready), small_s, byte_s)
