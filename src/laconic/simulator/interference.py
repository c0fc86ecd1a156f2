"""Compute and exchanges that slow each other down: both use the same memory, and on a GPU the same cores.

    compute     duration = alone + ratio x (time of it in which bytes move)
    exchange    duration = alone + min(launch, time for which the device still computes)

The first is contention for memory. The second is the kernel of an exchange, which must wait for the running kernel, but
not once the device is idle. The bytes in flight depend on when compute ends, and vice versa, so the graph is run until
nothing changes any more.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from laconic.simulator.engine import Graph, Outcome, run
from laconic.simulator.lowering.task_graph import TaskGraph

_Floats = npt.NDArray[np.float64]
_MOST_ROUNDS = 40
_CLOSE = 1e-5
_GAP_S = 1e-9
"""Gaps below this are rounding: a task that begins when another ends leaves no gap."""


def slowed(task_graph: TaskGraph, graph: Graph, ratio: float) -> Outcome:
    """Run the graph with compute slowed by bytes that move at the same time, and exchanges delayed by compute."""
    outcome = run(graph)
    launches = np.array([number for number, label in enumerate(task_graph.labels) if label.launch_s], dtype=np.int64)
    if not ratio and not len(launches):
        return outcome
    launch_s = np.array([task_graph.labels[number].launch_s for number in launches])
    compute = np.array(task_graph.compute_tasks, dtype=np.int64)
    moving = np.array([number for number, label in enumerate(task_graph.labels) if label.moving_s], dtype=np.int64)
    moving_s = np.array([task_graph.labels[number].moving_s for number in moving])
    durations_s = graph.duration_s.copy()
    for _ in range(_MOST_ROUNDS):
        ends_s = outcome.end_s[moving]
        marks_s, busy_s = busy_until(ends_s - moving_s, ends_s)
        before_s, durations_s = durations_s, graph.duration_s.copy()
        durations_s[compute] = stretched(outcome.start_s[compute], graph.duration_s[compute], marks_s, busy_s, ratio)
        left_s = still_busy(outcome.start_s[launches], outcome.start_s[compute], outcome.end_s[compute])
        durations_s[launches] += np.minimum(launch_s, left_s)
        outcome = run(graph, durations_s=durations_s)
        if np.abs(durations_s - before_s).sum() <= _CLOSE * outcome.makespan_s:
            break
    return outcome


def busy_until(begins_s: _Floats, ends_s: _Floats) -> tuple[_Floats, _Floats]:
    """Times, and how much of the time until each of them is covered by intervals; linear between two."""
    if not len(begins_s):
        return np.zeros(1), np.zeros(1)
    order = np.argsort(begins_s, kind="stable")
    begins_s, latest_s = begins_s[order], np.maximum.accumulate(ends_s[order])
    # Sequences of intervals without a gap between them.
    is_first = np.concatenate([[True], begins_s[1:] > latest_s[:-1]])
    firsts_s, lasts_s = begins_s[is_first], latest_s[np.concatenate([is_first[1:], [True]])]
    so_far_s = np.concatenate([[0.0], np.cumsum(lasts_s - firsts_s)])
    return np.stack([firsts_s, lasts_s], axis=1).ravel(), np.repeat(so_far_s, 2)[1:-1]


def still_busy(moments_s: _Floats, begins_s: _Floats, ends_s: _Floats) -> _Floats:
    """How long after each time the intervals continue without a gap; 0 where none covers it."""
    order = np.argsort(begins_s, kind="stable")
    begins_s, latest_s = begins_s[order], np.maximum.accumulate(ends_s[order])
    is_first = np.concatenate([[True], begins_s[1:] > latest_s[:-1] + _GAP_S])
    firsts_s, lasts_s = begins_s[is_first], latest_s[np.concatenate([is_first[1:], [True]])]
    place = np.maximum(np.searchsorted(firsts_s, moments_s, side="right") - 1, 0)
    return np.where(moments_s >= firsts_s[place], np.maximum(0.0, lasts_s[place] - moments_s), 0.0)


def stretched(start_s: _Floats, alone_s: _Floats, marks_s: _Floats, busy_s: _Floats, ratio: float) -> _Floats:
    """The durations of tasks: the work done until t is t - ratio x (busy until t), which only grows."""
    longest_s = float(alone_s.max(initial=0.0)) / (1 - ratio)
    before_s, beyond_s = min(0.0, marks_s[0]) - 1.0, max(marks_s[-1], start_s.max(initial=0.0)) + longest_s + 1.0
    moments_s = np.concatenate([[before_s], marks_s, [beyond_s]])
    work_s = moments_s - ratio * np.concatenate([[0.0], busy_s, busy_s[-1:]])
    ends_s = np.interp(np.interp(start_s, moments_s, work_s) + alone_s, work_s, moments_s)
    return np.maximum(ends_s - start_s, alone_s)  # never less, but for rounding
