"""The one loop that runs a graph. Imported only when one runs.

The loop handles everything that happens at one time, up to rounding, together. Flows and tasks end and release their
successors; then each free resource takes the first task in its queue; when nothing more happens at that time, rates are
recomputed where flows began or ended, and the clock advances.

A transfer that has the network to itself takes as long as it did the last time. So when a known set of flows begins,
only its end is recorded; its flows are simulated only if another transfer begins before that.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from laconic.simulator.engine.compilation import compiled
from laconic.simulator.engine.heaps_numba import pop, push
from laconic.simulator.engine.network_numba import SAME_TIME, begin_flows, catch_up, end_flows, share_links
from laconic.simulator.engine.network_state_numba import NUM_CHANGED, NUM_DUE, NUM_FREE, more_slots

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.int64]
_Small = npt.NDArray[np.int32]


class Tasks(NamedTuple):
    """The constant arrays, as in Graph."""

    duration: _Floats
    resource: _Small
    priority: _Floats
    flow_set: _Small
    first_successor: _Indices
    successors: _Small
    queue_first: _Indices
    """Start of the queue of each resource in the shared arrays."""


class Progress(NamedTuple):
    """The arrays that change. By task unless stated otherwise."""

    start: _Floats
    """When the task started; before it has started: when it was ready."""
    end: _Floats
    waited_for: _Indices
    missing: _Small
    """Predecessors that have not ended."""
    flows_left: _Indices
    """Entries of its flow set that are in flight."""
    busy: _Floats
    """By resource."""
    free: _Indices
    """By resource: the number of further tasks it can take."""
    freed_by: _Indices
    """By resource: the task that left it last."""
    queue_keys: _Floats
    queue_tasks: _Small
    queued: _Indices
    """By resource."""
    touched: _Small
    """Resources whose queue or free places changed at this time."""
    is_touched: npt.NDArray[np.bool_]
    event_times: _Floats
    event_tasks: _Small
    starting: _Small
    done: _Small
    """Transfers whose last flow is done, and its time."""
    done_at: _Floats
    alone_s: _Floats
    """By flow set: its duration when it has the network to itself; -1 if unknown."""


@compiled
def simulate(tasks, progress, flows, network, underway):
    """Fill `progress`; returns the number of tasks that ended."""
    # Unpacked here, because accessing an array of a tuple in the loop would take longer than the rest of an event.
    duration, resource, priority, flow_set = tasks.duration, tasks.resource, tasks.priority, tasks.flow_set
    first_successor, successors, queue_first = tasks.first_successor, tasks.successors, tasks.queue_first
    start, end, waited_for, missing = progress.start, progress.end, progress.waited_for, progress.missing
    flows_left, done, done_at, alone_s = progress.flows_left, progress.done, progress.done_at, progress.alone_s
    busy, free, freed_by = progress.busy, progress.free, progress.freed_by
    queue_keys, queue_tasks, queued = progress.queue_keys, progress.queue_tasks, progress.queued
    touched, is_touched = progress.touched, progress.is_touched
    event_times, event_tasks, starting = progress.event_times, progress.event_tasks, progress.starting
    flow_first, counters, flow_due, flow_heap = flows.first, network.counters, network.due, network.due_heap
    num_events = num_starting = num_ended = num_transfers = num_touched = num_needed = 0
    now = moment = limit = 0.0
    alone, alone_since, alone_until = -1, 0.0, math.inf

    for task in range(len(duration)):
        if missing[task] == 0:
            where = resource[task]
            if where < 0:
                starting[num_starting] = task
                num_starting += 1
            else:
                push(queue_keys, queue_tasks, queue_first[where], queued[where], priority[task], task)
                queued[where] += 1
    for where in range(len(free)):
        touched[where] = where
        is_touched[where] = True
    num_touched = len(free)

    while True:
        # In a loop of its own, because a variable reassigned inside a loop slows all of it down.
        if num_needed > 0:
            underway = more_slots(underway, counters, num_needed)
        while True:
            if alone_until <= limit:
                now = max(now, alone_until)
                push(event_times, event_tasks, 0, num_events, alone_until + duration[alone], alone)
                num_events += 1
                num_transfers = 0
                alone, alone_until = -1, math.inf

            elif num_starting > 0:
                task = np.int64(starting[num_starting - 1])
                group = np.int64(flow_set[task])
                num_flows = flow_first[group + 1] - flow_first[group] if group >= 0 else 0
                if num_flows == 0:
                    num_starting -= 1
                    push(event_times, event_tasks, 0, num_events, now + duration[task], task)
                    num_events += 1
                elif num_transfers == 0 and alone_s[group] >= 0.0:
                    num_starting -= 1
                    num_transfers = 1
                    alone, alone_since, alone_until = task, now, now + alone_s[group]
                else:
                    num_needed = num_flows
                    if alone_until < math.inf:
                        num_needed += flow_first[flow_set[alone] + 1] - flow_first[flow_set[alone]]
                    if num_needed > counters[NUM_FREE]:
                        break
                    if alone_until < math.inf:
                        flows_left[alone] = num_needed - num_flows
                        other, until = np.int64(flow_set[alone]), now / SAME_TIME
                        catch_up(network, underway, flows, other, alone, alone_since, until, flows_left, done, done_at)
                        alone_until = math.inf
                    num_starting -= 1
                    alone = task if num_transfers == 0 else -1
                    alone_since = now
                    num_transfers += 1
                    flows_left[task] = num_flows
                    begin_flows(network, underway, flows, group, task, now)

            elif counters[NUM_DUE] > 0 and flow_due[flow_heap[0]] <= limit:
                num_done, latest = end_flows(network, underway, flows, limit, flows_left, done, done_at)
                now = max(now, latest)
                num_transfers -= num_done
                for i in range(num_done):
                    task = done[i]
                    push(event_times, event_tasks, 0, num_events, done_at[i] + duration[task], task)
                    num_events += 1
                    if task == alone:
                        alone_s[flow_set[task]] = done_at[i] - alone_since
                        alone = -1

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
                        if start[task] < moment:  # it was ready earlier, so it waited for the resource
                            waited_for[task] = freed_by[where]
                        start[task] = now
                        starting[num_starting] = task
                        num_starting += 1
                num_touched = 0

            else:
                if counters[NUM_CHANGED] > 0:
                    share_links(network, underway, flows, now)
                moment = alone_until
                if counters[NUM_DUE] > 0:
                    moment = min(moment, flow_due[flow_heap[0]])
                if num_events > 0:
                    moment = min(moment, event_times[0])
                if moment == math.inf:
                    return num_ended
                limit = moment * SAME_TIME
