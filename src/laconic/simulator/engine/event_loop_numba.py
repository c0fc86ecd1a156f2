"""The one loop that runs a graph. Imported only when one runs.

A moment is everything that happens at one time, up to rounding. In it flows and tasks end and set free what waited for
them; then each resource that is free takes the first in its queue; and when nothing more happens at that time, rates
are worked out where flows began or ended, and the clock moves on.
"""

from __future__ import annotations

import math

import numpy as np

from laconic.simulator.engine.compilation import compiled
from laconic.simulator.engine.heaps_numba import pop, push
from laconic.simulator.engine.network_numba import (
    NUM_CHANGED,
    NUM_DUE,
    NUM_FREE,
    begin_flows,
    end_flow,
    more_slots,
    new_network,
    no_slots,
    share_links,
)

_SAME_TIME = 1.0 + 1e-12
"""Times that differ by less are one moment: rounding must not make many of what is one in a symmetric pattern."""


@compiled
def simulate(
    duration, resource, priority, flow_set, num_predecessors, first_successor, successors, capacity, queue_first, flows
):
    """When each task starts and ends, what it waited for, how long resources were held; and how many tasks ended."""
    num_tasks, num_resources = len(duration), len(capacity)
    start, end = np.zeros(num_tasks), np.full(num_tasks, math.nan)
    waited_for = np.full(num_tasks, -1, np.int64)
    busy = np.zeros(num_resources)
    missing = num_predecessors.copy()
    free = capacity.copy()
    freed_by = np.full(num_resources, -1, np.int64)
    queue_keys, queue_tasks = np.empty(queue_first[-1]), np.empty(queue_first[-1], np.int32)
    queued = np.zeros(num_resources, np.int64)
    touched, is_touched, num_touched = np.empty(num_resources, np.int64), np.zeros(num_resources, np.bool_), 0
    event_times, event_tasks, num_events = np.empty(num_tasks), np.empty(num_tasks, np.int32), 0
    starting, num_starting = np.empty(num_tasks, np.int32), 0
    network, underway = new_network(flows), no_slots()
    # By themselves, because handing over a whole tuple of arrays takes longer than the rest of an event.
    counters, flow_due, flow_heap = network.counters, network.due, network.due_heap
    flows_left = np.zeros(num_tasks if len(flows.first) > 1 else 0, np.int64)
    flow_first = flows.first
    num_ended = 0
    now = moment = limit = 0.0

    for task in range(num_tasks):
        if missing[task] == 0:
            where = resource[task]
            if where < 0:
                starting[num_starting] = task
                num_starting += 1
            else:
                push(queue_keys, queue_tasks, queue_first[where], queued[where], priority[task], task)
                queued[where] += 1
    for where in range(num_resources):
        touched[where] = where
        is_touched[where] = True
    num_touched = num_resources

    num_needed = 0
    while True:
        # In a loop of its own, because a variable that is replaced inside a loop slows all of it down.
        if num_needed > 0:
            underway = more_slots(underway, counters, num_needed)
        while True:
            if num_starting > 0:
                task = starting[num_starting - 1]
                flow_group = flow_set[task]
                num_flows = flow_first[flow_group + 1] - flow_first[flow_group] if flow_group >= 0 else 0
                if num_flows > counters[NUM_FREE]:
                    num_needed = num_flows
                    break
                num_starting -= 1
                if num_flows == 0:
                    push(event_times, event_tasks, 0, num_events, now + duration[task], task)
                    num_events += 1
                else:
                    flows_left[task] = num_flows
                    begin_flows(network, underway, flows, flow_group, task, now)

            elif counters[NUM_DUE] > 0 and flow_due[flow_heap[0]] <= limit:
                due = flow_due[flow_heap[0]]
                task = end_flow(network, underway, flows)
                now = max(now, due)
                flows_left[task] -= 1
                if flows_left[task] == 0:
                    push(event_times, event_tasks, 0, num_events, due + duration[task], task)
                    num_events += 1

            elif num_events > 0 and event_times[0] <= limit:
                when = event_times[0]
                task = pop(event_times, event_tasks, 0, num_events)
                num_events -= 1
                num_ended += 1
                end[task] = when
                now = max(now, when)
                where = resource[task]
                if where >= 0:
                    busy[where] += when - start[task]
                    free[where] += 1
                    freed_by[where] = task
                    if not is_touched[where]:
                        is_touched[where] = True
                        touched[num_touched] = where
                        num_touched += 1
                for place in range(first_successor[task], first_successor[task + 1]):
                    following = successors[place]
                    missing[following] -= 1
                    if missing[following] > 0:
                        continue
                    start[following] = now
                    waited_for[following] = task
                    where = resource[following]
                    if where < 0:
                        starting[num_starting] = following
                        num_starting += 1
                        continue
                    push(queue_keys, queue_tasks, queue_first[where], queued[where], priority[following], following)
                    queued[where] += 1
                    if not is_touched[where]:
                        is_touched[where] = True
                        touched[num_touched] = where
                        num_touched += 1

            elif num_touched > 0:
                for i in range(num_touched):
                    where = touched[i]
                    is_touched[where] = False
                    while free[where] > 0 and queued[where] > 0:
                        task = pop(queue_keys, queue_tasks, queue_first[where], queued[where])
                        queued[where] -= 1
                        free[where] -= 1
                        if start[task] < moment:  # it was ready before: the resource is what it waited for
                            waited_for[task] = freed_by[where]
                        start[task] = now
                        starting[num_starting] = task
                        num_starting += 1
                num_touched = 0

            else:
                if counters[NUM_CHANGED] > 0:
                    share_links(network, underway, flows, now)
                moment = flow_due[flow_heap[0]] if counters[NUM_DUE] > 0 else math.inf
                if num_events > 0:
                    moment = min(moment, event_times[0])
                if moment == math.inf:
                    num_needed = 0
                    break
                limit = moment * _SAME_TIME
        if num_needed == 0:
            break
    return start, end, waited_for, busy, num_ended
