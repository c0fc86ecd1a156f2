"""Runs a graph."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from laconic.errors import UsageError
from laconic.simulator.engine.graph import Graph
from laconic.simulator.engine.outcome import Outcome

_MOST_SHOWN = 8
"""The most tasks of a cycle that an error message names."""


def run(graph: Graph, *, durations_s: npt.NDArray[np.float64] | None = None) -> Outcome:
    """Run the graph: when every task starts and ends. The result is deterministic.

    `durations_s`: one entry per task, which replaces the durations of timed tasks; entries of transfers are ignored.
    """
    # Only here: numba is slow to import.
    from laconic.simulator.engine.event_loop_numba import Progress, Tasks, simulate  # noqa: PLC0415
    from laconic.simulator.engine.network_state_numba import new_network, no_slots  # noqa: PLC0415

    num_tasks, num_resources, flows = graph.num_tasks, len(graph.capacity), graph.flows
    queue_first = np.zeros(num_resources + 1, dtype=np.int64)
    np.cumsum(np.bincount(graph.resource[graph.resource >= 0], minlength=num_resources), out=queue_first[1:])
    tasks = Tasks(
        duration=graph.duration_s if durations_s is None else _durations(graph, durations_s),
        resource=graph.resource,
        priority=graph.priority,
        flow_set=graph.flow_set,
        first_successor=graph.first_successor,
        successors=graph.successors,
        queue_first=queue_first,
    )
    progress = Progress(
        start=np.zeros(num_tasks),
        end=np.full(num_tasks, np.nan),
        waited_for=np.full(num_tasks, -1, dtype=np.int64),
        missing=graph.num_predecessors.copy(),
        flows_left=np.zeros(num_tasks, dtype=np.int64),
        busy=np.zeros(num_resources),
        free=graph.capacity.copy(),
        freed_by=np.full(num_resources, -1, dtype=np.int64),
        queue_keys=np.empty(queue_first[-1]),
        queue_tasks=np.empty(queue_first[-1], dtype=np.int32),
        queued=np.zeros(num_resources, dtype=np.int64),
        touched=np.empty(num_resources, dtype=np.int32),
        is_touched=np.zeros(num_resources, dtype=np.bool_),
        event_times=np.empty(num_tasks),
        event_tasks=np.empty(num_tasks, dtype=np.int32),
        starting=np.empty(num_tasks, dtype=np.int32),
        done=np.empty(num_tasks, dtype=np.int32),
        done_at=np.empty(num_tasks),
        alone_s=np.full(len(flows.first) - 1, -1.0),
    )
    num_ended = simulate(tasks, progress, flows, new_network(flows), no_slots())
    if num_ended < graph.num_tasks:
        cycle = _cycle(graph, np.isnan(progress.end))
        raise UsageError(
            f"task {cycle[0]} waits for itself: {_in_turn(cycle)}, where each waits for the next. Take one of these "
            "dependencies out."
        )
    return Outcome(progress.start, progress.end, progress.waited_for, progress.busy, graph.link_bytes)


def _cycle(graph: Graph, never_ended: npt.NDArray[np.bool_]) -> list[int]:
    """A cycle of tasks, each waiting for the next; found among the tasks that never ended."""
    earlier = np.repeat(np.arange(graph.num_tasks), np.diff(graph.first_successor))
    stuck = never_ended[earlier]
    waits_for = np.full(graph.num_tasks, -1, dtype=np.int64)
    waits_for[graph.successors[stuck]] = earlier[stuck]
    task, place = int(never_ended.argmax()), dict[int, int]()
    while task not in place:
        place[task] = len(place)
        task = int(waits_for[task])
    return list(place)[place[task] :]


def _in_turn(cycle: list[int]) -> str:
    shown = [str(task) for task in cycle]
    if len(shown) > _MOST_SHOWN:
        shown[_MOST_SHOWN // 2 : -_MOST_SHOWN // 2] = [f"({len(shown) - _MOST_SHOWN} more)"]
    return " -> ".join([*shown, shown[0]])


def _durations(graph: Graph, given: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    durations = np.array(given, dtype=np.float64)
    if durations.shape != (graph.num_tasks,):
        raise UsageError(
            f"durations_s must have one entry for each of {graph.num_tasks} tasks, got {durations.shape}.",
        )
    transfers = graph.flow_set >= 0
    durations[transfers] = graph.duration_s[transfers]
    for task in np.flatnonzero(~((durations >= 0) & (durations < np.inf)))[:1].tolist():
        raise UsageError(f"task {task}: durations_s must be finite and not negative, got {durations[task]}.")
    return durations
