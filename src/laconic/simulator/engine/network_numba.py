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

from laconic.simulator.engine.compilation import compiled_part
from laconic.simulator.engine.heaps_numba import meld, put, take_out, without_root
from laconic.simulator.engine.laying import Flows
from laconic.simulator.engine.maxmin_numba import fill

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.int64]
_Small = npt.NDArray[np.int32]

NUM_DUE, NUM_CHANGED, EPOCH, NUM_FREE, NUM_COUNTERS = range(5)
"""Places in `Network.counters`, and how many those are."""

SAME_TIME = 1.0 + 1e-12
"""Times that differ by less are one moment: rounding must not make many of what is one in a symmetric pattern."""


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


def new_network(flows: Flows) -> Network:
    """Nothing under way."""
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
        changed=np.empty(num_routes, dtype=np.int32),
        is_changed=np.zeros(num_routes, dtype=np.bool_),
        seen_route=np.zeros(num_routes, dtype=np.int64),
        seen_link=np.zeros(num_links, dtype=np.int64),
        part_routes=np.empty(num_routes, dtype=np.int32),
        part_links=np.empty(num_links, dtype=np.int32),
        new_rate=np.empty(num_routes),
        left=np.empty(num_links),
        growing=np.empty(num_links, dtype=np.int64),
        keys=np.empty(num_links),
        queue=np.empty(num_links, dtype=np.int32),
        counters=np.zeros(NUM_COUNTERS, dtype=np.int64),
    )


def no_slots() -> Underway:
    """For no flow at all."""
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


@compiled_part
def begin_flows(network, underway, flows, flow_set, task, now):
    """Start the flows of a set; there are slots enough for them."""
    served, since, rate, count, root = network.served, network.since, network.rate, network.count, network.root
    finish, child, sibling, free = underway.finish, underway.child, underway.sibling, underway.free
    slot_task, slot_count = underway.task, underway.count
    changed, is_changed, counters = network.changed, network.is_changed, network.counters
    entry_route, entry_bytes, entry_count = flows.route, flows.num_bytes, flows.count
    route_first, links, crossing_first = flows.route_first, flows.links, flows.crossing_first
    crossing, crossing_hop, hop_place = network.crossing, network.crossing_hop, network.hop_place
    num_crossing = network.num_crossing
    for entry in range(flows.first[flow_set], flows.first[flow_set + 1]):
        route = entry_route[entry]
        if count[route] > 0:
            _serve(served, since, rate, route, now)
        else:
            served[route] = 0.0
            since[route] = now
            rate[route] = 0.0
            for hop in range(route_first[route], route_first[route + 1]):
                link = links[hop]
                place = crossing_first[link] + num_crossing[link]
                num_crossing[link] += 1
                crossing[place] = route
                crossing_hop[place] = hop
                hop_place[hop] = place
        count[route] += entry_count[entry]
        counters[NUM_FREE] -= 1
        slot = free[counters[NUM_FREE]]
        finish[slot] = served[route] + entry_bytes[entry]
        slot_task[slot] = task
        slot_count[slot] = entry_count[entry]
        child[slot] = -1
        sibling[slot] = -1
        root[route] = meld(finish, child, sibling, root[route], slot)
        _note_change(changed, is_changed, counters, route)


@compiled_part
def end_flows(network, underway, flows, limit, flows_left, done, done_at):
    """Take out the flows that are due until `limit`.

    Tasks that have no flows left are written into `done`, with their times; gives how many those are, and the time of
    the last flow.
    """
    served, since, rate, count, root = network.served, network.since, network.rate, network.count, network.root
    due, due_heap, due_place = network.due, network.due_heap, network.due_place
    finish, child, sibling, free = underway.finish, underway.child, underway.sibling, underway.free
    slot_task, slot_count = underway.task, underway.count
    changed, is_changed, counters = network.changed, network.is_changed, network.counters
    route_first, links, crossing_first = flows.route_first, flows.links, flows.crossing_first
    crossing, crossing_hop, hop_place = network.crossing, network.crossing_hop, network.hop_place
    num_crossing = network.num_crossing
    num_done, latest = 0, 0.0
    while counters[NUM_DUE] > 0 and due[due_heap[0]] <= limit:
        route = due_heap[0]
        slot = root[route]
        latest = due[route]
        served[route] = finish[slot]
        since[route] = latest
        count[route] -= slot_count[slot]
        root[route] = without_root(finish, child, sibling, slot)
        free[counters[NUM_FREE]] = slot
        counters[NUM_FREE] += 1
        _note_change(changed, is_changed, counters, route)
        if root[route] >= 0:
            # At the rate it has; the one it gets is worked out with all else that changes at this moment.
            following = latest + (finish[root[route]] - served[route]) / rate[route]
            put(due_heap, due_place, due, counters[NUM_DUE], route, following)
        else:
            counters[NUM_DUE] -= 1
            take_out(due_heap, due_place, due, counters[NUM_DUE], route)
            for hop in range(route_first[route], route_first[route + 1]):
                link = links[hop]
                num_crossing[link] -= 1
                # The last route of the link takes its place.
                place, last = hop_place[hop], crossing_first[link] + num_crossing[link]
                moved = crossing_hop[last]
                crossing[place] = crossing[last]
                crossing_hop[place] = moved
                hop_place[moved] = place
        task = slot_task[slot]
        flows_left[task] -= 1
        if flows_left[task] == 0:
            done[num_done] = task
            done_at[num_done] = latest
            num_done += 1
    return num_done, latest


@compiled_part
def share_links(network, underway, flows, now):
    """Work out rates anew where something changed."""
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
    served, since, rate, root, finish = network.served, network.since, network.rate, network.root, underway.finish
    due, due_heap, due_place = network.due, network.due_heap, network.due_place
    new_rate, part_routes = network.new_rate, network.part_routes
    changed, is_changed, counters = network.changed, network.is_changed, network.counters
    for i in range(num_routes):
        route = part_routes[i]
        if is_changed[route] or new_rate[route] != rate[route]:
            _serve(served, since, rate, route, now)
            rate[route] = new_rate[route]
            if due_place[route] < 0:
                due_place[route] = counters[NUM_DUE]
                counters[NUM_DUE] += 1
            missing = max(finish[root[route]] - served[route], 0.0)
            put(due_heap, due_place, due, counters[NUM_DUE], route, now + missing / rate[route])
    for i in range(counters[NUM_CHANGED]):
        is_changed[changed[i]] = False
    counters[NUM_CHANGED] = 0


@compiled_part
def catch_up(network, underway, flows, flow_set, task, since, until, flows_left, done, done_at):
    """Start the flows of a set at `since` and let them run until `until`, before which not all of them are done."""
    begin_flows(network, underway, flows, flow_set, task, since)
    share_links(network, underway, flows, since)
    due, due_heap = network.due, network.due_heap
    while due[due_heap[0]] < until:
        _, latest = end_flows(network, underway, flows, due[due_heap[0]] * SAME_TIME, flows_left, done, done_at)
        share_links(network, underway, flows, latest)


@compiled_part
def _connected_part(network, flows):
    """All routes with flows that share links, directly or through others, with those that changed; and the links."""
    count, seen_route, seen_link = network.count, network.seen_route, network.seen_link
    part_routes, part_links, changed, counters = (
        network.part_routes,
        network.part_links,
        network.changed,
        network.counters,
    )
    route_first, links, crossing_first = flows.route_first, flows.links, flows.crossing_first
    crossing, num_crossing = network.crossing, network.num_crossing
    counters[EPOCH] += 1
    epoch = counters[EPOCH]
    num_routes = num_links = 0
    for i in range(counters[NUM_CHANGED]):
        route = changed[i]
        if seen_route[route] != epoch:
            seen_route[route] = epoch
            if count[route] > 0:
                part_routes[num_routes] = route
                num_routes += 1
            num_links = _see_links(route_first, links, seen_link, part_links, route, epoch, num_links)
    looked = 0
    while looked < num_links:
        link = part_links[looked]
        looked += 1
        begin = crossing_first[link]
        for i in range(begin, begin + num_crossing[link]):
            route = crossing[i]
            if seen_route[route] != epoch:
                seen_route[route] = epoch
                part_routes[num_routes] = route
                num_routes += 1
                num_links = _see_links(route_first, links, seen_link, part_links, route, epoch, num_links)
    return num_routes, num_links


@compiled_part
def _see_links(route_first, links, seen_link, part_links, route, epoch, num_links):
    for hop in range(route_first[route], route_first[route + 1]):
        link = links[hop]
        if seen_link[link] != epoch:
            seen_link[link] = epoch
            part_links[num_links] = link
            num_links += 1
    return num_links


@compiled_part
def _serve(served, since, rate, route, now):
    if now > since[route]:
        served[route] += rate[route] * (now - since[route])
        since[route] = now


@compiled_part
def _note_change(changed, is_changed, counters, route):
    if not is_changed[route]:
        is_changed[route] = True
        changed[counters[NUM_CHANGED]] = route
        counters[NUM_CHANGED] += 1
