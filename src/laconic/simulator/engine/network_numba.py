"""Flows under way: what each has had, when the next one has arrived, and who shares links with whom.

Flows on one route always get the same rate. So a route keeps how many bytes each of its flows has had (`served`), and a
flow is done when that has grown by its size; when rates change, nothing is touched per flow. Rates are worked out anew
only for routes that share links, directly or through others, with a route on which something began or ended.
Imported only when a graph runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from laconic.simulator.engine.compilation import compiled
from laconic.simulator.engine.maxmin_numba import fill

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.int64]
_Small = npt.NDArray[np.int32]

NUM_DUE, NUM_CHANGED, EPOCH, NUM_FREE = range(4)
"""Places in `Network.counters`."""


class Network(NamedTuple):
    """What changes while flows run. By route unless it says otherwise."""

    served: _Floats
    """Bytes that each flow has had since the route was last idle, at the time `since`."""
    since: _Floats
    rate: _Floats
    count: _Indices
    """Flows under way."""
    root: _Small
    """The flow that is done first; -1 if there is none."""
    due: _Floats
    """When it is done."""
    due_heap: _Small
    """Routes with flows, the one that is due first in front."""
    due_place: _Small
    """Where a route is in there."""
    crossing: _Small
    """Routes with flows that cross each link: num_crossing of them in its room, see Flows.crossing_first."""
    crossing_hop: _Small
    """For each of those: the place in Flows.links that says so."""
    hop_place: _Small
    """By place in Flows.links: where it is in `crossing`."""
    num_crossing: _Indices
    """By link."""
    changed: _Small
    """Routes on which flows began or ended since rates were worked out; those before counters[NUM_CHANGED]."""
    is_changed: npt.NDArray[np.bool_]
    seen_route: _Indices
    """The epoch in which a route, or a link, was last looked at."""
    seen_link: _Indices
    part_routes: _Small
    """Room to work in."""
    part_links: _Small
    new_rate: _Floats
    left: _Floats
    growing: _Indices
    keys: _Floats
    queue: _Small
    counters: _Indices


class Underway(NamedTuple):
    """Flows under way, in slots that are used again. Those of one route are a pairing heap by `finish`."""

    finish: _Floats
    """What `served` will be when it is done."""
    task: _Small
    count: _Indices
    """How many flows alike it stands for."""
    child: _Small
    sibling: _Small
    free: _Small
    """Slots that nobody uses; those before counters[NUM_FREE]."""


@compiled
def new_network(flows):
    num_routes, num_links, num_hops = len(flows.route_first) - 1, len(flows.capacity), len(flows.links)
    return Network(
        np.zeros(num_routes),
        np.zeros(num_routes),
        np.zeros(num_routes),
        np.zeros(num_routes, np.int64),
        np.full(num_routes, -1, np.int32),
        np.zeros(num_routes),
        np.empty(num_routes, np.int32),
        np.full(num_routes, -1, np.int32),
        np.empty(num_hops, np.int32),
        np.empty(num_hops, np.int32),
        np.empty(num_hops, np.int32),
        np.zeros(num_links, np.int64),
        np.empty(num_routes, np.int32),
        np.zeros(num_routes, np.bool_),
        np.zeros(num_routes, np.int64),
        np.zeros(num_links, np.int64),
        np.empty(num_routes, np.int32),
        np.empty(num_links, np.int32),
        np.empty(num_routes),
        np.empty(num_links),
        np.empty(num_links, np.int64),
        np.empty(num_links),
        np.empty(num_links, np.int32),
        np.zeros(4, np.int64),
    )


@compiled
def no_slots():
    small = np.empty(0, np.int32)
    return Underway(np.empty(0), small, np.empty(0, np.int64), small, small, small)


@compiled
def more_slots(underway, counters, needed):
    """The same flows in at least twice as many slots, `needed` of them free."""
    old = len(underway.task)
    size = max(2 * old, old + needed)
    grown = Underway(
        np.empty(size),
        np.empty(size, np.int32),
        np.empty(size, np.int64),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
    )
    grown.finish[:old] = underway.finish
    grown.task[:old] = underway.task
    grown.count[:old] = underway.count
    grown.child[:old] = underway.child
    grown.sibling[:old] = underway.sibling
    num_free = counters[NUM_FREE]
    grown.free[:num_free] = underway.free[:num_free]
    for slot in range(old, size):
        grown.free[num_free + slot - old] = slot
    counters[NUM_FREE] = num_free + size - old
    return grown


@compiled
def begin_flows(network, underway, flows, flow_set, task, now):
    """Start the flows of a set; there are slots enough for them."""
    counters = network.counters
    for entry in range(flows.first[flow_set], flows.first[flow_set + 1]):
        route = flows.route[entry]
        counters[NUM_FREE] -= 1
        slot = underway.free[counters[NUM_FREE]]
        if network.count[route] == 0:
            network.served[route] = 0.0
            network.since[route] = now
            network.rate[route] = 0.0
            _enter(network, flows, route)
        else:
            _serve(network, route, now)
        network.count[route] += flows.count[entry]
        underway.finish[slot] = network.served[route] + flows.num_bytes[entry]
        underway.task[slot] = task
        underway.count[slot] = flows.count[entry]
        underway.child[slot] = -1
        underway.sibling[slot] = -1
        network.root[route] = _meld(underway, network.root[route], slot)
        _note_change(network, route)


@compiled
def end_flow(network, underway, flows):
    """Take out the flow that is due first, and give its task."""
    route = network.due_heap[0]
    slot = network.root[route]
    network.served[route] = underway.finish[slot]
    network.since[route] = network.due[route]
    network.count[route] -= underway.count[slot]
    network.root[route] = _without_root(underway, slot)
    underway.free[network.counters[NUM_FREE]] = slot
    network.counters[NUM_FREE] += 1
    _note_change(network, route)
    if network.root[route] < 0:
        _leave(network, flows, route)
        _remove_due(network, route)
    else:
        # At the rate it has; what it has from now on is worked out with all else that changes at this moment.
        _set_due(network, route, _done_at(network, underway, route))
    return underway.task[slot]


@compiled
def share_links(network, underway, flows, now):
    """Work out rates anew where something changed."""
    counters = network.counters
    num_routes, num_links = _connected_part(network, flows)
    fill(
        network.part_routes,
        num_routes,
        network.part_links,
        num_links,
        flows.route_first,
        flows.links,
        network.count,
        flows.capacity,
        flows.crossing_first,
        network.crossing,
        network.num_crossing,
        network.left,
        network.growing,
        network.keys,
        network.queue,
        network.new_rate,
    )
    for i in range(num_routes):
        route = network.part_routes[i]
        if network.is_changed[route] or network.new_rate[route] != network.rate[route]:
            _serve(network, route, now)
            network.rate[route] = network.new_rate[route]
            _set_due(network, route, _done_at(network, underway, route))
    for i in range(counters[NUM_CHANGED]):
        network.is_changed[network.changed[i]] = False
    counters[NUM_CHANGED] = 0


@compiled
def _connected_part(network, flows):
    """All routes with flows that share links, directly or through others, with those that changed; and the links."""
    counters = network.counters
    counters[EPOCH] += 1
    epoch = counters[EPOCH]
    num_routes = num_links = 0
    for i in range(counters[NUM_CHANGED]):
        route = network.changed[i]
        if network.seen_route[route] != epoch:
            network.seen_route[route] = epoch
            if network.count[route] > 0:
                network.part_routes[num_routes] = route
                num_routes += 1
            num_links = _see_links(network, flows, route, epoch, num_links)
    looked = 0
    while looked < num_links:
        link = network.part_links[looked]
        looked += 1
        begin = flows.crossing_first[link]
        for i in range(begin, begin + network.num_crossing[link]):
            route = network.crossing[i]
            if network.seen_route[route] != epoch:
                network.seen_route[route] = epoch
                network.part_routes[num_routes] = route
                num_routes += 1
                num_links = _see_links(network, flows, route, epoch, num_links)
    return num_routes, num_links


@compiled
def _see_links(network, flows, route, epoch, num_links):
    for hop in range(flows.route_first[route], flows.route_first[route + 1]):
        link = flows.links[hop]
        if network.seen_link[link] != epoch:
            network.seen_link[link] = epoch
            network.part_links[num_links] = link
            num_links += 1
    return num_links


@compiled
def _serve(network, route, now):
    if now > network.since[route]:
        network.served[route] += network.rate[route] * (now - network.since[route])
        network.since[route] = now


@compiled
def _done_at(network, underway, route):
    missing = underway.finish[network.root[route]] - network.served[route]
    return network.since[route] + max(missing, 0.0) / network.rate[route]


@compiled
def _note_change(network, route):
    if not network.is_changed[route]:
        network.is_changed[route] = True
        network.changed[network.counters[NUM_CHANGED]] = route
        network.counters[NUM_CHANGED] += 1


@compiled
def _enter(network, flows, route):
    """Put the route among those that cross its links."""
    for hop in range(flows.route_first[route], flows.route_first[route + 1]):
        link = flows.links[hop]
        place = flows.crossing_first[link] + network.num_crossing[link]
        network.num_crossing[link] += 1
        network.crossing[place] = route
        network.crossing_hop[place] = hop
        network.hop_place[hop] = place


@compiled
def _leave(network, flows, route):
    """Take it out again; the last one of each link takes its place."""
    for hop in range(flows.route_first[route], flows.route_first[route + 1]):
        link = flows.links[hop]
        network.num_crossing[link] -= 1
        place, last = network.hop_place[hop], flows.crossing_first[link] + network.num_crossing[link]
        moved = network.crossing_hop[last]
        network.crossing[place] = network.crossing[last]
        network.crossing_hop[place] = moved
        network.hop_place[moved] = place


@compiled
def _meld(underway, one, two):
    """One heap out of two; -1 is an empty one."""
    if one < 0:
        return two
    if two < 0:
        return one
    if underway.finish[two] < underway.finish[one]:
        one, two = two, one
    underway.sibling[two] = underway.child[one]
    underway.child[one] = two
    return one


@compiled
def _without_root(underway, root):
    """The rest of a heap: its children in pairs from the left, then all of these from the right."""
    pairs = -1
    child = underway.child[root]
    while child >= 0:
        partner = underway.sibling[child]
        following = underway.sibling[partner] if partner >= 0 else -1
        pair = _meld(underway, child, partner)
        underway.sibling[pair] = pairs
        pairs = pair
        child = following
    heap = -1
    while pairs >= 0:
        following = underway.sibling[pairs]
        underway.sibling[pairs] = -1
        heap = _meld(underway, heap, pairs)
        pairs = following
    return heap


@compiled
def _set_due(network, route, due):
    """Put the route where it belongs among those that are due."""
    heap, places, dues = network.due_heap, network.due_place, network.due
    place = places[route]
    if place < 0:
        place = network.counters[NUM_DUE]
        network.counters[NUM_DUE] += 1
    dues[route] = due
    while place > 0:
        above = (place - 1) >> 1
        other = heap[above]
        if dues[other] <= due:
            break
        heap[place] = other
        places[other] = place
        place = above
    size = network.counters[NUM_DUE]
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and dues[heap[below + 1]] < dues[heap[below]]:
            below += 1
        other = heap[below]
        if due <= dues[other]:
            break
        heap[place] = other
        places[other] = place
        place = below
    heap[place] = route
    places[route] = place


@compiled
def _remove_due(network, route):
    heap, places = network.due_heap, network.due_place
    network.counters[NUM_DUE] -= 1
    last = heap[network.counters[NUM_DUE]]
    if last != route:
        place = places[route]
        heap[place] = last
        places[last] = place
        _set_due(network, last, network.due[last])
    places[route] = -1
