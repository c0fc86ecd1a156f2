"""The operations that a probe times, and how: all ranks together, in turn, and the slowest rank counts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from laconic.core.clock import Clock
from laconic.core.transport import AllWork, Transport, Work

ELEMENT_BYTES = 4

StartSum = Callable[[torch.Tensor], Work]
"""Starts an all-reduce of a tensor."""


@dataclass(frozen=True)
class Operation:
    """Something to time at any size."""

    kind: str
    """As measured.Curve calls it."""
    prepare: Callable[[int], tuple[int, Callable[[], Work]] | None]
    """For a size: the bytes it really takes, and a function that starts it; None if that takes too much memory."""


class Stage:
    """Where operations are timed: ranks, their clock and where their tensors live."""

    def __init__(self, transport: Transport, clock: Clock, device: torch.device) -> None:
        self.transport = transport
        self.clock = clock
        self.device = device

    def zeros(self, *shape: int) -> torch.Tensor:
        """Something to send."""
        return torch.zeros(*shape, device=self.device)

    def by_turns(self, starts: Sequence[Callable[[], Work]], repeats: int) -> tuple[list[float], float]:
        """The median over repeats of the slowest rank's time for each operation, and the total time."""
        began_s = self.clock.now()
        rows = [[self.time(start) for start in starts] for _ in range(1 + repeats)][1:]
        slowest = self.slowest([*(time_s for row in rows for time_s in row), self.clock.now() - began_s])
        columns = [slowest[index : -1 : len(starts)] for index in range(len(starts))]
        return [statistics.median(column) for column in columns], slowest[-1]

    def time(self, start: Callable[[], Work]) -> float:
        """The time that this rank takes for one operation that all ranks begin together."""
        self._meet()
        began_s = self.clock.now()
        start().wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock.now() - began_s

    def _meet(self) -> None:
        """Wait for all ranks: otherwise a late rank would make the others appear slow."""
        here = torch.zeros(1, device=self.transport.control_device)
        self.transport.all_reduce(here, purpose="control", what="a trial").wait()

    def slowest(self, times_s: Sequence[float]) -> list[float]:
        """The maximum over all ranks of each time."""
        times = torch.tensor(times_s, dtype=torch.float64, device=self.transport.control_device)
        self.transport.all_reduce(times, op="max", purpose="control", what="times of a probe").wait()
        return times.tolist()


def operations_of(stage: Stage, most_bytes: int, algorithms: Mapping[str, StartSum]) -> list[Operation]:
    """All operations to measure among these ranks; `most_bytes` is the largest size there will be."""
    transport = stage.transport
    world_size, what = transport.world_size, "a probe"

    def sum_with(start: StartSum) -> Callable[[int], tuple[int, Callable[[], Work]]]:
        def prepare(nbytes: int) -> tuple[int, Callable[[], Work]]:
            tensor = stage.zeros(nbytes // ELEMENT_BYTES)
            return tensor.nbytes, lambda: start(tensor)

        return prepare

    def gather(nbytes: int) -> tuple[int, Callable[[], Work]] | None:
        # The result is as many times as large, so it ends with smaller parts than the others.
        if nbytes * world_size > max(most_bytes, 1024**2):
            return None
        tensor = stage.zeros(nbytes // ELEMENT_BYTES)
        output = stage.zeros(world_size, *tensor.shape)
        return tensor.nbytes, lambda: transport.all_gather(output, tensor, purpose="control", what=what)

    def exchange(nbytes: int) -> tuple[int, Callable[[], Work]]:
        tensor = stage.zeros(world_size, max(1, nbytes // ELEMENT_BYTES // world_size))
        output = torch.empty_like(tensor)
        return tensor.nbytes, lambda: transport.all_to_all(output, tensor, purpose="control", what=what)

    def send_along(order: Sequence[int]) -> Callable[[int], tuple[int, Callable[[], Work]]]:
        def prepare(nbytes: int) -> tuple[int, Callable[[], Work]]:
            tensor = stage.zeros(nbytes // ELEMENT_BYTES)
            output = torch.empty_like(tensor)
            if transport.rank not in order:
                return tensor.nbytes, lambda: AllWork(())
            place = order.index(transport.rank)
            sends = [(order[(place + 1) % len(order)], tensor)]
            receives = [(order[place - 1], output)]
            return tensor.nbytes, lambda: transport.send_receive(sends, receives, purpose="control", what=what)

        return prepare

    operations = [
        Operation("all_reduce", sum_with(lambda tensor: transport.all_reduce(tensor, purpose="control", what=what))),
        *(Operation(f"all_reduce({name})", sum_with(start)) for name, start in algorithms.items()),
        Operation("all_gather", gather),
        Operation("all_to_all", exchange),
        Operation("send", send_along(range(world_size))),
    ]
    hosts = transport.hosts
    if 1 < len(hosts) < world_size and min(map(len, hosts)) > 1:
        # Otherwise the ring of all ranks is either all inside or all between hosts.
        own = next(host for host in hosts if transport.rank in host)
        operations.append(Operation("send(inside)", send_along(own)))
        operations.append(Operation("send(between)", send_along([host[0] for host in hosts])))
    return operations
