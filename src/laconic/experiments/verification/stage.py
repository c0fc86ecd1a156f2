"""The environment of a check on one rank: its number, the observations of the others, and a way to attach.

A check is the same function on every rank. It trains a little, gathers the observations of all ranks, and every rank
comes to the same verdict; so the same check runs on threads and on processes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.core.hosts import Hosts
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.torch_distributed import TorchTransport
from laconic.core.transport import Transport
from laconic.runtime import Session, attach
from laconic.runtime.agreement import gather_bytes
from laconic.strategy import Strategy

Fact = TypeVar("Fact")
"""An observation of a rank, as JSON: numbers, text, lists and objects."""
Result = TypeVar("Result")
_WAIT_S = 120.0
"""How long ranks wait for each other between steps: one of them may be busy with a search of its own."""
_EXCHANGE_S = 60.0
"""How long an exchange of a few kilobytes may take, on a machine that has much else to do."""
_RANKS_PER_HOST = 2


def virtual_hosts(world_size: int) -> Hosts:
    """Which ranks are to count as sharing a host: pairs, and one by itself if their number is odd.

    Strategies that distinguish hosts then have several to distinguish; others are not affected. Two ranks share a host.
    """
    firsts = range(0, world_size, _RANKS_PER_HOST)
    return tuple(tuple(range(first, min(first + _RANKS_PER_HOST, world_size))) for first in firsts)


class Stage:
    """One rank's place in a check."""

    def __init__(self, control: Transport, transport: Callable[[], Transport | None]) -> None:
        self._control = control
        self._transport = transport
        self.rank = control.rank
        self.world_size = control.world_size
        self.in_process = control.in_process
        """Whether all ranks are threads of one process, and see each other's threads and files."""

    def attach(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> Session:
        """A session with a transport of its own."""
        transport = self._transport()
        timeout_s = _EXCHANGE_S if transport is None else None
        # Some checks have trained the same model before, each rank by itself; a sharded model is made once.
        equal = not strategy.architecture.holds_shards
        return attach(model, optimizer, strategy, transport=transport, timeout_s=timeout_s, sync_optimizer=equal)

    def gather(self, fact: Fact) -> list[Fact]:
        """Gather a value of every rank, in the order of ranks."""
        text = json.dumps(fact).encode()
        sizes = gather_bytes(self._control, len(text).to_bytes(8, "big"), "sizes of facts")
        longest = max(int.from_bytes(size, "big") for size in sizes)
        rows = gather_bytes(self._control, text.ljust(longest), "facts")
        return [cast(Fact, json.loads(row)) for row in rows]

    def meet(self) -> None:
        """Return when every rank has called this."""
        gather_bytes(self._control, b"here", "ranks meeting")

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` over all ranks."""
        summed = values.clone()
        self._control.all_reduce(summed, purpose="control", what="sums of a check").wait()
        return summed


def on_threads(world_size: int, work: Callable[[Stage], Result]) -> list[Result]:
    """Run `work` once per rank, each in a thread of this process; results in the order of ranks."""
    wires: dict[int, InProcessCluster] = {}
    lock = threading.Lock()

    def one_rank(control: InProcessTransport) -> Result:
        taken = 0

        def transport() -> Transport:
            nonlocal taken
            with lock:
                # The k-th session of every rank is one and the same.
                cluster = InProcessCluster(world_size, hosts=virtual_hosts(world_size), timeout_s=_EXCHANGE_S)
                wire = wires.setdefault(taken, cluster)
            taken += 1
            return wire.transport(control.rank)

        return work(Stage(control, transport))

    try:
        return InProcessCluster(world_size, timeout_s=_WAIT_S).run(one_rank)
    except KeyboardInterrupt:
        with lock:
            for wire in wires.values():
                wire.stop("was interrupted")
        raise


def on_this_process() -> Stage:
    """The stage of this rank of the default process group."""
    return Stage(TorchTransport(None, timeout_s=_WAIT_S), lambda: None)
