"""Hosts in a grid whose edges wrap around, each with a cable to both neighbours of every dimension.

Messages go the shorter way round, one dimension after the other, the first dimension first; where both ways are
equally short, a hash of the two ends decides. Intermediate hosts forward messages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from laconic.cluster.fabric import Indices
from laconic.cluster.link_table import LinkTable
from laconic.cluster.topologies.contract import NOT_CROSSED, Messages, Paths, Ports, Topology, wholes
from laconic.cluster.values import Whole
from laconic.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Torus(Topology):
    """A grid of hosts whose edges wrap around; every cable out of a host is like the host's link."""

    kind: ClassVar[str] = "torus"

    dims: tuple[int, ...] = wholes(least=1, most=3, of=Whole(least=2))
    """Hosts along each dimension; host numbers grow fastest along the last."""

    def check(self, num_hosts: int, nics: int, devices_per_host: int) -> None:
        held = math.prod(self.dims)
        if held != num_hosts:
            grid = " x ".join(map(str, self.dims))
            raise UsageError(
                f"topology torus: dims {grid} hold {held} hosts, but there are {num_hosts}. Change one of the two."
            )
        if nics != 1:
            raise UsageError(
                f"topology torus: nics must be 1, got {nics}. A host has a cable to each of its neighbours anyway."
            )

    def connect(self, ports: Ports, table: LinkTable) -> Paths:
        dims, num_dims = self.dims, len(self.dims)
        strides = [math.prod(dims[axis + 1 :]) for axis in range(num_dims)]

        def name(at: int) -> str:
            host, way = divmod(at, 2 * num_dims)
            axis, backwards = divmod(way, 2)
            place = host // strides[axis] % dims[axis]
            next_place = (place + (-1 if backwards else 1)) % dims[axis]
            return f"host {host} -> host {host + (next_place - place) * strides[axis]}"

        # Number (host * dimensions + axis) * 2 + (1 if backwards).
        first = table.add(
            np.repeat(ports.capacity_bytes_per_s, 2 * num_dims), np.repeat(ports.delay_s, 2 * num_dims), name
        )

        def paths(messages: Messages) -> list[Indices]:
            columns: list[Indices] = []
            at = messages.source.copy()
            for axis, (extent, stride) in enumerate(zip(dims, strides, strict=True)):
                goal = messages.destination // stride % extent
                forwards = (goal - at // stride % extent) % extent
                tie = messages.choose(2, level=axis) == 1
                backwards = (2 * forwards > extent) | ((2 * forwards == extent) & tie)
                hops = np.where(backwards, extent - forwards, forwards)
                for hop in range(int(hops.max(initial=0))):
                    moves = hop < hops
                    columns.append(np.where(moves, first + (at * num_dims + axis) * 2 + backwards, NOT_CROSSED))
                    place = at // stride % extent
                    next_place = (place + np.where(backwards, -1, 1)) % extent
                    at = np.where(moves, at + (next_place - place) * stride, at)
            return columns

        return paths

    def describe(self) -> str:
        return f"torus of {' x '.join(map(str, self.dims))}"
