"""The GPUs of a cluster: which hosts have free ones, and which hosts a job gets.

    first    the lowest-numbered hosts with a free GPU
    pack     the fullest host that has room for all; else as few hosts as possible
    spread   the emptiest hosts, one GPU at a time
    racks    like pack, but a job that needs several hosts stays in one rack wherever one has room

Hosts are grouped by their number of free GPUs, so that a place is found without visiting every host.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal

Placement = tuple[tuple[int, int], ...]
"""(host, number of its GPUs), hosts in order."""
PlacementRule = Literal["first", "pack", "spread", "racks"]
PLACEMENT_RULES: tuple[PlacementRule, ...] = ("first", "pack", "spread", "racks")


class GpuPool:
    """Free GPUs by host."""

    def __init__(self, num_hosts: int, gpus_per_host: int, rack_of: Sequence[int] = ()) -> None:
        self.num_hosts = num_hosts
        self.gpus_per_host = gpus_per_host
        self.num_free = num_hosts * gpus_per_host
        self._racks = list(rack_of) or [0] * num_hosts
        self._hosts_of: dict[int, list[int]] = {}
        for host, rack in enumerate(self._racks):
            self._hosts_of.setdefault(rack, []).append(host)
        self._free = [gpus_per_host] * num_hosts
        self._free_in = {rack: gpus_per_host * len(hosts) for rack, hosts in self._hosts_of.items()}
        # By number of free GPUs a heap of hosts; an entry counts only while its host still has that number.
        self._with_free: list[list[int]] = [[] for _ in range(gpus_per_host + 1)]
        self._with_free[gpus_per_host] = list(range(num_hosts))

    def take(self, gpus: int, rule: PlacementRule) -> Placement:
        """Allocate `gpus` GPUs; the caller has checked that so many are free."""
        assert 1 <= gpus <= self.num_free, (gpus, self.num_free)
        one = self._tightest(gpus) if rule in {"pack", "racks"} and gpus <= self.gpus_per_host else None
        if one is not None:
            counts = {one: gpus}
        elif rule == "first":
            counts = self._greedy(gpus, range(self.num_hosts))
        elif rule == "spread":
            counts = self._one_by_one(gpus)
        else:
            counts = self._few_hosts(gpus, rule)
        for host, count in counts.items():
            self._change(host, -count)
        return tuple(sorted(counts.items()))

    def take_again(self, placement: Placement) -> bool:
        """Allocate these GPUs again, if all are free."""
        if any(self._free[host] < count for host, count in placement):
            return False
        for host, count in placement:
            self._change(host, -count)
        return True

    def give_back(self, placement: Placement) -> None:
        """Free GPUs."""
        for host, count in placement:
            self._change(host, count)

    def free(self, host: int) -> int:
        """GPUs that one host has left."""
        return self._free[host]

    def has_room(self, gpus: int) -> bool:
        """Whether some host has so many left."""
        return self._tightest(gpus) is not None

    def racks_of(self, placement: Placement) -> set[int]:
        """The racks that a placement touches."""
        return {self._racks[host] for host, _ in placement}

    def _change(self, host: int, by: int) -> None:
        self._free[host] += by
        assert 0 <= self._free[host] <= self.gpus_per_host, f"host {host} has {self._free[host]} free GPUs"
        self._free_in[self._racks[host]] += by
        self.num_free += by
        heapq.heappush(self._with_free[self._free[host]], host)

    def _tightest(self, gpus: int) -> int | None:
        """The host with the fewest free GPUs that still suffice."""
        for count in range(gpus, self.gpus_per_host + 1):
            host = self._lowest(count)
            if host is not None:
                return host
        return None

    def _lowest(self, count: int) -> int | None:
        heap = self._with_free[count]
        while heap and self._free[heap[0]] != count:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _greedy(self, gpus: int, hosts: Sequence[int]) -> dict[int, int]:
        """All free GPUs of each host, in this order, until they suffice."""
        counts: dict[int, int] = {}
        for host in hosts:
            if gpus == 0:
                break
            count = min(gpus, self._free[host])
            if count:
                counts[host] = count
                gpus -= count
        return counts

    def _one_by_one(self, gpus: int) -> dict[int, int]:
        counts: dict[int, int] = {}
        heap = [(-free, host) for host, free in enumerate(self._free) if free]
        heapq.heapify(heap)
        for _ in range(gpus):
            free, host = heapq.heappop(heap)
            counts[host] = counts.get(host, 0) + 1
            if free < -1:
                heapq.heappush(heap, (free + 1, host))
        return counts

    def _few_hosts(self, gpus: int, rule: PlacementRule) -> dict[int, int]:
        if rule == "racks":
            fitting = [rack for rack, free in self._free_in.items() if free >= gpus]
            if fitting:
                rack = min(fitting, key=lambda number: (self._free_in[number], number))
                return self._greedy(gpus, self._emptiest(self._hosts_of[rack]))
            # No rack has room: as few racks as possible.
            racks = sorted(self._free_in, key=lambda number: (-self._free_in[number], number))
            return self._greedy(gpus, [host for rack in racks for host in self._emptiest(self._hosts_of[rack])])
        return self._greedy(gpus, self._emptiest(range(self.num_hosts)))

    def _emptiest(self, hosts: Sequence[int]) -> list[int]:
        return sorted(hosts, key=lambda host: (-self._free[host], host))
