"""The state of flows in flight: by route, by link, and one slot for each flow. See network_numba.

Imported only when a graph runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from laconic.simulator.engine.compilation import compiled_part
from laconic.simulator.engine.laying import Flows

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.int64]
_Small = npt.NDArray[np.int32]

NUM_DUE, NUM_CHANGED, EPOCH, NUM_FREE, NUM_COUNTERS = range(5)
"""Indices of `Network.counters`, and their number."""


class Network(NamedTuple):
    """The arrays that change while flows run. By route unless stated otherwise."""

    served: _Floats
    """Bytes that each flow has sent since the route was last idle, at the time `since`."""
    since: _Floats
    rate: _Floats
    count: _Indices
    """Flows in flight."""
    root: _Small
    """The flow that ends first; -1 if there is none."""
    due: _Floats
    """When that flow ends."""
    due_heap: _Small
    """A heap of routes with flows, the one that ends first at the front."""
    due_place: _Small
    """The position of a route in that heap."""
    crossing: _Small
    """Routes with flows that cross each link: num_crossing entries in its range, see Flows.crossing_first."""
    crossing_hop: _Small
    """For each of those entries: its index in Flows.links."""
    hop_place: _Small
    """By index in Flows.links: its position in `crossing`."""
    num_crossing: _Indices
    """By link: the number of such routes."""
    num_flows: _Indices
    """By link: flows in flight that cross it."""
    changed: _Small
    """Routes on which flows began or ended since rates were computed; the entries before counters[NUM_CHANGED]."""
    change: npt.NDArray[np.int8]
    floor: _Floats
    """One entry: the lowest rate of a flow that ended since rates were computed."""
    seen_route: _Indices
    """The epoch in which a route, or a link, was last visited."""
    seen_link: _Indices
    part_routes: _Small
    """Scratch arrays."""
    part_links: _Small
    new_rate: _Floats
    left: _Floats
    growing: _Indices
    keys: _Floats
    queue: _Small
    counters: _Indices


class Underway(NamedTuple):
    """Flows in flight, in reused slots. Those of one route form a pairing heap by `finish`."""

    finish: _Floats
    """The value of `served` at which it is done."""
    task: _Small
    count: _Indices
    """The number of equal flows it represents."""
    child: _Small
    sibling: _Small
    free: _Small
    """Free slots; the entries before counters[NUM_FREE]."""


def new_network(flows: Flows) -> Network:
    """A network with no flow in flight."""
    num_routes, num_links, num_hops = len(flows.route_first) - 1, len(flows.capacity), len(flows.links)
    return Network(
        served=np.zeros(num_routes),
        since=np.zeros(num_routes),
        rate=np.zeros(num_routes),
        count=np.zeros(num_routes, dtype=np.int64),
        root=np.full(num_routes, -1, dtype=np.int32),
        due=np.zeros(num_routes),
        due_heap=np.empty(num_routes, dtype=np.int32),
        due_place=np.full(num_routes, -1, dtype=np.int32),
        crossing=np.empty(num_hops, dtype=np.int32),
        crossing_hop=np.empty(num_hops, dtype=np.int32),
        hop_place=np.empty(num_hops, dtype=np.int32),
        num_crossing=np.zeros(num_links, dtype=np.int64),
        num_flows=np.zeros(num_links, dtype=np.int64),
        changed=np.empty(num_routes, dtype=np.int32),
        change=np.zeros(num_routes, dtype=np.int8),
        floor=np.full(1, np.inf),
        seen_route=np.zeros(num_routes, dtype=np.int64),
        seen_link=np.zeros(num_links, dtype=np.int64),
        part_routes=np.empty(num_routes, dtype=np.int32),
        part_links=np.empty(num_links, dtype=np.int32),
        new_rate=np.zeros(num_routes),
        left=np.empty(num_links),
        growing=np.empty(num_links, dtype=np.int64),
        keys=np.empty(num_links),
        queue=np.empty(num_links, dtype=np.int32),
        counters=np.zeros(NUM_COUNTERS, dtype=np.int64),
    )


def no_slots() -> Underway:
    """Slots for no flows."""
    small = np.empty(0, dtype=np.int32)
    return Underway(np.empty(0), small, np.empty(0, dtype=np.int64), small, small, small)


@compiled_part
def more_slots(underway, counters, needed):
    """The same flows in more slots, at least `needed` of them free."""
    old = len(underway.task)
    size = 2 * old + needed
    grown = Underway(
        np.empty(size),
        np.empty(size, np.int32),
        np.empty(size, np.int64),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
    )
    for slot in range(old):
        grown.finish[slot] = underway.finish[slot]
        grown.task[slot] = underway.task[slot]
        grown.count[slot] = underway.count[slot]
        grown.child[slot] = underway.child[slot]
        grown.sibling[slot] = underway.sibling[slot]
        grown.free[slot] = underway.free[slot]
    for slot in range(old, size):
        grown.free[counters[NUM_FREE]] = slot
        counters[NUM_FREE] += 1
    return grown
