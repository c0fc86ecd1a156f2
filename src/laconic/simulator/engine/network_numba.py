"""Flows in flight: the bytes each has sent, when the next one ends, and which routes share links.

Flows on one route always get the same rate. So a route counts the bytes that each of its flows has sent (`served`), and
a flow is done when that count has grown by its size; a change of rates does not touch single flows.

When flows begin or end, rates are recomputed only where they may change: for routes that share links, directly or
through others, with those flows, and whose rates are not below `floor`. Progressive filling is unchanged until the
first changed link is full, so flows that were frozen before keep their rates.

    floor = min(rate of each flow that ended, capacity / flows of each link on which one began)

Imported only when a graph runs.
"""

from __future__ import annotations

import math

from laconic.simulator.engine.compilation import compiled_part
from laconic.simulator.engine.heaps_numba import meld, put, take_out, without_root
from laconic.simulator.engine.maxmin_numba import fill
from laconic.simulator.engine.network_state_numba import EPOCH, NUM_CHANGED, NUM_DUE, NUM_FREE

_UNCHANGED, _ENDED, _BEGAN = range(3)
"""What happened on a route since rates were computed; if both, flows began."""

_BELOW = 1.0 - 1e-9
"""Tolerance below `floor` within which rates are recomputed as well: rounding must not separate equal flows."""

SAME_TIME = 1.0 + 1e-12
"""Times that differ by less count as equal: rounding must not split events of a symmetric pattern."""


@compiled_part
def begin_flows(network, underway, flows, flow_set, task, now):
    """Start the flows of a set; there must be enough free slots."""
    served, since, rate, count, root = network.served, network.since, network.rate, network.count, network.root
    finish, child, sibling, free = underway.finish, underway.child, underway.sibling, underway.free
    slot_task, slot_count = underway.task, underway.count
    changed, change, counters = network.changed, network.change, network.counters
    entry_route, entry_bytes, entry_count = flows.route, flows.num_bytes, flows.count
    route_first, links, crossing_first = flows.route_first, flows.links, flows.crossing_first
    crossing, crossing_hop, hop_place = network.crossing, network.crossing_hop, network.hop_place
    num_crossing, num_flows = network.num_crossing, network.num_flows
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
        for hop in range(route_first[route], route_first[route + 1]):
            num_flows[links[hop]] += entry_count[entry]
        counters[NUM_FREE] -= 1
        slot = free[counters[NUM_FREE]]
        finish[slot] = served[route] + entry_bytes[entry]
        slot_task[slot] = task
        slot_count[slot] = entry_count[entry]
        child[slot] = -1
        sibling[slot] = -1
        root[route] = meld(finish, child, sibling, root[route], slot)
        _note_change(changed, change, counters, route, _BEGAN)


@compiled_part
def end_flows(network, underway, flows, limit, flows_left, done, done_at):
    """Remove the flows that end by `limit`.

    Tasks without remaining flows are written to `done`, with their times; returns their number and the time of the last
    flow.
    """
    served, since, rate, count, root = network.served, network.since, network.rate, network.count, network.root
    due, due_heap, due_place = network.due, network.due_heap, network.due_place
    finish, child, sibling, free = underway.finish, underway.child, underway.sibling, underway.free
    slot_task, slot_count = underway.task, underway.count
    changed, change, counters, floor = network.changed, network.change, network.counters, network.floor
    route_first, links, crossing_first = flows.route_first, flows.links, flows.crossing_first
    crossing, crossing_hop, hop_place = network.crossing, network.crossing_hop, network.hop_place
    num_crossing, num_flows = network.num_crossing, network.num_flows
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
        floor[0] = min(floor[0], rate[route])
        for hop in range(route_first[route], route_first[route + 1]):
            num_flows[links[hop]] -= slot_count[slot]
        _note_change(changed, change, counters, route, _ENDED)
        if root[route] >= 0:
            # At its old rate; the new one is computed with all other changes at this time.
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
    """Recompute rates where they may have changed."""
    num_routes, num_links, floor = _affected_part(network, flows)
    fill(
        network.part_routes,
        num_routes,
        network.part_links,
        num_links,
        flows.route_first,
        flows.links,
        network.count,
        flows.crossing_first,
        network.crossing,
        network.num_crossing,
        network.left,
        network.growing,
        network.keys,
        network.queue,
        network.new_rate,
        floor,
    )
    served, since, rate, root, finish = network.served, network.since, network.rate, network.root, underway.finish
    due, due_heap, due_place = network.due, network.due_heap, network.due_place
    new_rate, part_routes = network.new_rate, network.part_routes
    changed, change, counters = network.changed, network.change, network.counters
    for i in range(num_routes):
        route = part_routes[i]
        if change[route] != _UNCHANGED or new_rate[route] != rate[route]:
            _serve(served, since, rate, route, now)
            rate[route] = new_rate[route]
            if due_place[route] < 0:
                due_place[route] = counters[NUM_DUE]
                counters[NUM_DUE] += 1
            missing = max(finish[root[route]] - served[route], 0.0)
            put(due_heap, due_place, due, counters[NUM_DUE], route, now + missing / rate[route])
    for i in range(counters[NUM_CHANGED]):
        change[changed[i]] = _UNCHANGED
    counters[NUM_CHANGED] = 0
    network.floor[0] = math.inf


@compiled_part
def catch_up(network, underway, flows, flow_set, task, since, until, flows_left, done, done_at):
    """Start the flows of a set at `since` and run them until `until`, when some are still in flight."""
    begin_flows(network, underway, flows, flow_set, task, since)
    share_links(network, underway, flows, since)
    due, due_heap = network.due, network.due_heap
    while due[due_heap[0]] < until:
        _, latest = end_flows(network, underway, flows, due[due_heap[0]] * SAME_TIME, flows_left, done, done_at)
        share_links(network, underway, flows, latest)


@compiled_part
def _affected_part(network, flows):
    """The routes whose rates may have changed, the links they cross with their remaining capacity, and the floor."""
    rate, count, seen_route, seen_link = network.rate, network.count, network.seen_route, network.seen_link
    part_routes, part_links, changed = network.part_routes, network.part_links, network.changed
    change, counters, num_flows = network.change, network.counters, network.num_flows
    route_first, links, crossing_first, capacity = flows.route_first, flows.links, flows.crossing_first, flows.capacity
    crossing, num_crossing, left, growing = network.crossing, network.num_crossing, network.left, network.growing
    counters[EPOCH] += 1
    epoch = counters[EPOCH]
    num_routes, num_links, floor = 0, 0, network.floor[0]
    for i in range(counters[NUM_CHANGED]):
        route = changed[i]
        seen_route[route] = epoch
        if count[route] > 0:
            part_routes[num_routes] = route
            num_routes += 1
        for hop in range(route_first[route], route_first[route + 1]):
            link = links[hop]
            if change[route] == _BEGAN and num_flows[link] > 0:
                floor = min(floor, capacity[link] / num_flows[link])
            num_links = _see(seen_link, part_links, link, epoch, num_links)
    floor *= _BELOW
    looked = 0
    while looked < num_links:
        link = part_links[looked]
        looked += 1
        left[link] = capacity[link]
        growing[link] = 0
        begin = crossing_first[link]
        for i in range(begin, begin + num_crossing[link]):
            route = crossing[i]
            if change[route] == _UNCHANGED and rate[route] < floor:
                left[link] -= rate[route] * count[route]
                continue
            growing[link] += count[route]
            if seen_route[route] != epoch:
                seen_route[route] = epoch
                part_routes[num_routes] = route
                num_routes += 1
                for hop in range(route_first[route], route_first[route + 1]):
                    num_links = _see(seen_link, part_links, links[hop], epoch, num_links)
    return num_routes, num_links, floor


@compiled_part
def _see(seen_link, part_links, link, epoch, num_links):
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
def _note_change(changed, change, counters, route, kind):
    if change[route] == _UNCHANGED:
        changed[counters[NUM_CHANGED]] = route
        counters[NUM_CHANGED] += 1
    change[route] = max(change[route], kind)
