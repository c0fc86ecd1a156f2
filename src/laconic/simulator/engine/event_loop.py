"""Runs a graph."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from laconic.errors import UsageError
from laconic.simulator.engine.graph import Graph
from laconic.simulator.engine.outcome import Outcome


def run(graph: Graph, *, durations_s: npt.NDArray[np.float64] | None = None) -> Outcome:
    """When every task starts and ends, the same every time.

    `durations_s`: one entry per task, in place of what timed tasks take; entries of transfers are not looked at.
    """
    # Only here: numba takes its time to import.
    from laconic.simulator.engine.event_loop_numba import simulate  # noqa: PLC0415

    durations = graph.duration_s if durations_s is None else _durations(graph, durations_s)
    held = graph.resource[graph.resource >= 0]
    queue_first = np.zeros(len(graph.capacity) + 1, dtype=np.int64)
    np.cumsum(np.bincount(held, minlength=len(graph.capacity)), out=queue_first[1:])
    start_s, end_s, waited_for, busy_s, num_ended = simulate(
        durations,
        graph.resource,
        graph.priority,
        graph.flow_set,
        graph.num_predecessors,
        graph.first_successor,
        graph.successors,
        graph.capacity,
        queue_first,
        graph.flows,
    )
    assert num_ended == graph.num_tasks, f"{graph.num_tasks - num_ended} tasks of a graph without a cycle never ended"
    return Outcome(start_s, end_s, waited_for, busy_s, graph.link_bytes)


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
