"""The plan that a strategy follows on a job: made as in the runtime, with simulated times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from laconic.collectives.choice import NATIVE, TIMED_BYTES, Costs
from laconic.core.exchange import Move
from laconic.core.hosts import Hosts, Pairs
from laconic.core.plan import Plan
from laconic.core.timing import Timing
from laconic.simulator.lowering.task_graph import Inputs
from laconic.simulator.network.contract import Network, seconds
from laconic.strategy import Strategy

_SMALL_BYTES, _LARGEST_BYTES = 4096, 2**25
_LONG_ENOUGH_S = 0.05


@dataclass(frozen=True)
class _Simulated:
    """The measurements that the runtime would make, predicted by the network model."""

    hosts: Hosts
    network: Network
    rates: Callable[[], Pairs]

    def costs(self, algorithms: Sequence[str], hosts: Hosts) -> Costs:
        groups = () if hosts == self.hosts else hosts

        def times(name: str) -> tuple[float, ...]:
            move = Move("sum", (), name, groups=groups if name != NATIVE else ())
            ranks = sum(map(len, hosts))
            return tuple(seconds(self.network, replace(move, sizes=(size,)), ranks) for size in TIMED_BYTES)

        return Costs(TIMED_BYTES, tuple((name, times(name)) for name in (NATIVE, *algorithms)))

    def pairs(self) -> Pairs:
        return self.rates()


def settled(strategy: Strategy, hosts: Hosts, network: Network, pairs: Callable[[], Pairs]) -> Strategy:
    """The strategy with its architecture adapted to the hosts of ranks and the predicted measurements among them."""
    architecture = strategy.architecture.settled(lambda: hosts, _Simulated(hosts, network, pairs))
    return strategy if architecture is strategy.architecture else replace(strategy, architecture=architecture)


def candidates(inputs: Inputs) -> list[list[Plan]]:
    """The plans the runtime would try, or the one it would make; each is a list with one plan per fragment."""
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
    """When rank 0's gradients are ready, and t(M) = a + b M, as the runtime would find it on this network."""
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
    line = inputs.strategy.exchange_line(inputs.workload.tensors, inputs.world_size, small_s, byte_s)
    # Relative to the first gradient, which is all the runtime can observe.
    return Timing(tuple(time_s - ready[0] for time_s in ready), *line)
