"""Compute times that vary from step to step and from rank to rank.

Each rank's step takes a random multiple of its usual time, log-normal with mean 1. Where all wait for all, what counts
is the slowest of them: the largest of as many draws as there are ranks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from laconic.simulator.engine import Graph, run
from laconic.simulator.lowering.drawing import Drawing
from laconic.simulator.prediction import Spread

_RUNS = 60
_DRAWN_ONE_BY_ONE = 4096


def spread_of(drawing: Drawing, graph: Graph, period: int, ratio: float, random: np.random.Generator) -> Spread:
    """Run the graph again and again with other compute times, and see how long steps take."""
    labels = [drawing.labels[task] for task in drawing.compute_tasks]
    tasks = np.array(drawing.compute_tasks, dtype=np.int64)
    steps = np.array([label.step for label in labels])
    classes = np.array([label.of for label in labels])
    together = drawing.inputs.strategy.synchronization.barrier
    ends = np.array([tasks_[0] for tasks_ in drawing.step_ends])
    lengths: list[npt.NDArray[np.float64]] = []
    for _ in range(_RUNS):
        factors = np.stack(
            [
                _factors(ratio, ranks.size if together else 1, len(drawing.step_ends), random)
                for ranks in drawing.inputs.classes
            ]
        )
        durations_s = graph.duration_s.copy()
        durations_s[tasks] *= factors[classes, steps]
        ended_s = run(graph, durations_s=durations_s).end_s[ends][period - 1 :: period]
        lengths.append(np.diff(ended_s)[-max(1, len(ended_s) // 2) :] / period)
    low_s, median_s, high_s = np.quantile(np.concatenate(lengths), (0.05, 0.5, 0.95))
    return Spread(low_s=float(low_s), median_s=float(median_s), high_s=float(high_s))


def _factors(ratio: float, num_ranks: int, num_steps: int, random: np.random.Generator) -> npt.NDArray[np.float64]:
    """For each step the largest of the ranks' multiples."""
    sigma = float(np.sqrt(np.log1p(ratio**2)))
    drawn = min(num_ranks, _DRAWN_ONE_BY_ONE)
    normal = random.standard_normal((num_steps, drawn)).max(axis=1)
    if num_ranks > drawn:
        # The largest of k times as many lies higher by about this much, as extremes of normal draws do.
        normal += np.sqrt(2 * np.log(num_ranks)) - np.sqrt(2 * np.log(drawn))
    return np.exp(sigma * normal - sigma**2 / 2)
