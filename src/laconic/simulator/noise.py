"""Compute times that vary from step to step and from rank to rank.

Each rank's step takes a random multiple of its usual time, log-normal with mean 1. Where all wait for all, the slowest
rank counts; where replicas synchronize every H steps, the slowest sum over H steps counts, which varies less:

    largest of n draws of a normal distribution = inverse(U^(1/n)),   deviation over H steps = deviation / sqrt(H)

A rank that waits only for neighbours is delayed by the slowest of these; a rank without a barrier is never delayed.
Where the first k of n gradients are used, the k-th fastest rank counts: U^(1/n) becomes a draw of Beta(k, n - k + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from laconic.simulator.engine import run
from laconic.simulator.lowering.task_graph import Inputs
from laconic.simulator.prediction import Spread
from laconic.simulator.steps import Steady

_Floats = npt.NDArray[np.float64]
_RUNS = 60


def spread_of(steady: Steady, ratio: float, random: np.random.Generator) -> Spread:
    """The spread of step times over many runs of the graph with random compute times."""
    task_graph, inputs, period = steady.task_graph, steady.task_graph.inputs, steady.period
    tasks = np.array(task_graph.compute_tasks, dtype=np.int64)
    labels = [task_graph.labels[task] for task in task_graph.compute_tasks]
    steps, classes = np.array([label.step for label in labels]), np.array([label.of for label in labels])
    ends = np.array(task_graph.step_ends)
    # Simulated durations, which include delays by other tasks.
    usual_s = steady.outcome.end_s - steady.outcome.start_s
    counted = np.array(inputs.counted)
    lengths_s: list[_Floats] = []
    for _ in range(_RUNS):
        durations_s = usual_s.copy()
        durations_s[tasks] *= _factors(inputs, len(ends), ratio, random)[classes, steps]
        ended_s = run(steady.graph, durations_s=durations_s).end_s[ends][period - 1 :: period]
        taken_s = np.diff(ended_s, axis=0)[-max(1, len(ended_s) // 2) :] / period
        # For all ranks together: the time in which they process the samples of one step.
        lengths_s.append(inputs.world_size / (counted / np.maximum(taken_s, 1e-12)).sum(axis=1))
    low_s, median_s, high_s = np.quantile(np.concatenate(lengths_s), (0.05, 0.5, 0.95))
    return Spread(low_s=float(low_s), median_s=float(median_s), high_s=float(high_s))


def _factors(inputs: Inputs, num_steps: int, ratio: float, random: np.random.Generator) -> _Floats:
    """For each class and step, the factor on compute times."""
    strategy = inputs.strategy
    rule = strategy.synchronization
    apart = max(1, rule.interval // rule.num_parts)
    num_draws = -(-num_steps // apart)
    waits_for = [ranks.size for ranks in inputs.classes]
    if rule.takes_first:
        pairs = zip(inputs.counted, waits_for, strict=True)
        return np.array([_first(ratio, count, size, num_steps, random) for count, size in pairs])
    if not rule.barrier:
        waits_for = [1 for _ in waits_for]
    elif strategy.architecture.scope == "neighbours":
        around = len(strategy.architecture.neighbours(inputs.moment).receives)
        waits_for = [min(size, 1 + around) for size in waits_for]
    drawn = [_slowest(ratio / apart**0.5, count, random.random(num_draws)) for count in waits_for]
    return np.repeat(np.array(drawn), apart, axis=1)[:, :num_steps]


def _first(ratio: float, count: int, num_ranks: int, num_steps: int, random: np.random.Generator) -> _Floats:
    """For each step, the factor of the `count`-th fastest rank of a class; of any rank if none is waited for."""
    if not count:
        return _slowest(ratio, 1, random.random(num_steps))
    return _slowest(ratio, 1, random.beta(count, num_ranks - count + 1, num_steps))


def _slowest(ratio: float, num_ranks: int, uniform: Sequence[float] | _Floats) -> _Floats:
    """For each uniform number, the largest factor among the ranks."""
    sigma = float(np.sqrt(np.log1p(ratio**2)))
    # The upper tail probability, which keeps more digits.
    above = -np.expm1(np.log(np.clip(uniform, 1e-300, 1 - 1e-16)) / num_ranks)
    normal = np.array([-NormalDist().inv_cdf(chance) for chance in np.clip(above, 1e-300, 1 - 1e-16)])
    return np.exp(sigma * normal - sigma**2 / 2)
