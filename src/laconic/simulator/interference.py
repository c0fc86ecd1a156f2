"""Compute that slows down while the network is busy: both use the same memory, and on a GPU the same cores.

    duration = alone + ratio x (time of it in which something is under way)

What is under way depends on when compute ends, and that on this: so the graph is run until nothing changes any more.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from laconic.simulator.engine import Graph, Outcome, run
from laconic.simulator.lowering.task_graph import TaskGraph

_Floats = npt.NDArray[np.float64]
_MOST_ROUNDS = 40
_CLOSE = 1e-5


def slowed(drawing: TaskGraph, graph: Graph, ratio: float) -> Outcome:
    """Run the graph with compute slowed by what is under way at the same time."""
    outcome = run(graph)
    if not ratio:
        return outcome
    compute = np.array(drawing.compute_tasks, dtype=np.int64)
    moving = np.array([number for number, label in enumerate(drawing.labels) if label.moving_s], dtype=np.int64)
    moving_s = np.array([drawing.labels[number].moving_s for number in moving])
    durations_s = graph.duration_s.copy()
    for _ in range(_MOST_ROUNDS):
        ends_s = outcome.end_s[moving]
        marks_s, busy_s = busy_until(ends_s - moving_s, ends_s)
        before_s, durations_s = durations_s, graph.duration_s.copy()
        durations_s[compute] = stretched(outcome.start_s[compute], graph.duration_s[compute], marks_s, busy_s, ratio)
        outcome = run(graph, durations_s=durations_s)
        if np.abs(durations_s - before_s).sum() <= _CLOSE * outcome.makespan_s:
            break
    return outcome


def busy_until(begins_s: _Floats, ends_s: _Floats) -> tuple[_Floats, _Floats]:
    """Moments, and how long until each of them at least one of these intervals has lasted; on a line between two."""
    if not len(begins_s):
        return np.zeros(1), np.zeros(1)
    order = np.argsort(begins_s, kind="stable")
    begins_s, latest_s = begins_s[order], np.maximum.accumulate(ends_s[order])
    # Runs of intervals without a gap between them.
    is_first = np.concatenate([[True], begins_s[1:] > latest_s[:-1]])
    firsts_s, lasts_s = begins_s[is_first], latest_s[np.concatenate([is_first[1:], [True]])]
    so_far_s = np.concatenate([[0.0], np.cumsum(lasts_s - firsts_s)])
    return np.stack([firsts_s, lasts_s], axis=1).ravel(), np.repeat(so_far_s, 2)[1:-1]


def stretched(start_s: _Floats, alone_s: _Floats, marks_s: _Floats, busy_s: _Floats, ratio: float) -> _Floats:
    """How long tasks take from their start on: work done until t is t - ratio x (busy until t), which only grows."""
    longest_s = float(alone_s.max(initial=0.0)) / (1 - ratio)
    before_s, beyond_s = min(0.0, marks_s[0]) - 1.0, max(marks_s[-1], start_s.max(initial=0.0)) + longest_s + 1.0
    moments_s = np.concatenate([[before_s], marks_s, [beyond_s]])
    work_s = moments_s - ratio * np.concatenate([[0.0], busy_s, busy_s[-1:]])
    ends_s = np.interp(np.interp(start_s, moments_s, work_s) + alone_s, work_s, moments_s)
    return np.maximum(ends_s - start_s, alone_s)  # never less, but for rounding
