"""The plan a strategy follows once it knows its job: found as the runtime finds it, with simulated times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from laconic.architecture import AllReduce
from laconic.architecture.all_reduce import sensible
from laconic.collectives.choice import NATIVE, Costs
from laconic.core.exchange import Move
from laconic.core.hosts import Hosts
from laconic.core.tensor import TensorSpec
from laconic.core.timing import Timing
from laconic.simulator.network.contract import Network, seconds
from laconic.strategy import Strategy
from laconic.workload import Workload

_SMALL_BYTES, _LARGEST_BYTES = 4096, 2**25
_LONG_ENOUGH_S = 0.05
_SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
"""What the runtime measures for auto."""


def settled(strategy: Strategy, hosts: Hosts, network: Network) -> Strategy:
    """The strategy, knowing where ranks are and, for auto, what each algorithm takes."""
    architecture, world_size = strategy.architecture, sum(map(len, hosts))
    if not isinstance(architecture, AllReduce) or architecture.algorithm == NATIVE or world_size == 1:
        return strategy
    known = architecture.settled(hosts)
    if known.algorithm == "auto":
        times = tuple(
            (name, tuple(seconds(network, Move("sum", (size,), name), world_size) for size in _SIZES))
            for name in (NATIVE, *sensible(hosts))
        )
        known = architecture.settled(hosts, Costs(_SIZES, times))
    return replace(strategy, architecture=known)


def timing(workload: Workload, tensors: Sequence[TensorSpec], network: Network, world_size: int) -> Timing:
    """When gradients are ready, and t(M) = a + b M as the runtime would measure it on this network."""
    ready: dict[str, float] = {}
    now_s = 0.0
    for layer in reversed(workload.layers):
        now_s += layer.backward_s
        ready |= {tensor.name: now_s for tensor in layer.tensors}
    # Counted from the first gradient, as only that can be seen.
    first_s = min(ready.values())

    def took_s(nbytes: int) -> float:
        return seconds(network, Move("sum", (nbytes,)), world_size)

    small_s, nbytes = took_s(_SMALL_BYTES), 16 * _SMALL_BYTES
    while nbytes < _LARGEST_BYTES and took_s(nbytes) < _LONG_ENOUGH_S:
        nbytes *= 2
    byte_s = max(0.0, took_s(nbytes) - small_s) / (nbytes - _SMALL_BYTES)
    return Timing(tuple(ready[tensor.name] - first_s for tensor in tensors), small_s, byte_s)
