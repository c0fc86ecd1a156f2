"""Compute that slows down while the network is busy: both use the same memory, and on a GPU the same cores.

    duration = alone + ratio x (time of it in which something is under way)

What is under way depends on when compute ends, and that on this: so it is found by running the graph a few times.
"""

from __future__ import annotations

import numpy as np

from laconic.simulator.engine import Graph, Outcome, run
from laconic.simulator.lowering.drawing import Drawing

_ROUNDS = 8
_CLOSE = 1e-6


def slowed(drawing: Drawing, graph: Graph, ratio: float) -> Outcome:
    """Run the graph with compute slowed by what is under way at the same time."""
    outcome = run(graph)
    if not ratio:
        return outcome
    compute = np.array(drawing.compute_tasks, dtype=np.int64)
    moving = np.array([number for number, label in enumerate(drawing.labels) if label.moving_s], dtype=np.int64)
    moving_s = np.array([drawing.labels[number].moving_s for number in moving])
    alone_s = graph.duration_s[compute]
    for _ in range(_ROUNDS):
        durations_s = graph.duration_s.copy()
        durations_s[compute] = alone_s + ratio * _overlap(outcome, compute, moving, moving_s)
        before_s, outcome = outcome.makespan_s, run(graph, durations_s=durations_s)
        if abs(outcome.makespan_s - before_s) <= _CLOSE * before_s:
            break
    return outcome


def _overlap(outcome: Outcome, tasks: np.ndarray, others: np.ndarray, moving_s: np.ndarray) -> np.ndarray:
    """For each of `tasks`, how much of its time at least one of `others` was in its last `moving_s`."""
    begins = outcome.end_s[others] - moving_s
    order = np.argsort(begins, kind="stable")
    starts = begins[order]
    ends = np.maximum.accumulate(outcome.end_s[others][order])
    if not len(starts):
        return np.zeros(len(tasks))
    # Runs of intervals without a gap between them.
    new = np.concatenate([[True], starts[1:] > ends[:-1]])
    firsts = starts[new]
    lasts = ends[np.concatenate([np.flatnonzero(new)[1:] - 1, [len(ends) - 1]])]
    marks = np.stack([firsts, lasts], axis=1).ravel()
    so_far = np.concatenate([[0.0], np.cumsum(lasts - firsts)])
    totals = np.repeat(so_far, 2)[1:-1]
    return np.interp(outcome.end_s[tasks], marks, totals) - np.interp(outcome.start_s[tasks], marks, totals)
