"""Extremely randomized trees: a regressor that knows nothing about serving, as a yardstick for predictions.

Every tree splits its rows until each leaf has one value. A split is the best of a few features, each cut at a random
place between its smallest and its largest value; the best one leaves the smallest sum of squared deviations. The
prediction is the mean over all trees.

Reference: Geurts, Ernst & Wehenkel 2006, "Extremely randomized trees".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


def forest(known: Values, targets: Values, asked: Values, *, trees: int = 40, tried_share: float = 0.6) -> Values:
    """The predictions for the rows of `asked`, learned from the rows of `known`; the same at every call."""
    random = np.random.default_rng(0)
    found = np.zeros(len(asked))
    everything, all_asked = np.arange(len(known)), np.arange(len(asked))
    for _ in range(trees):
        stack = [(everything, all_asked)]
        while stack:
            rows, wanted = stack.pop()
            if not len(wanted):
                continue
            split = _split(known[rows], targets[rows], random, tried_share)
            if split is None:
                found[wanted] += targets[rows].mean()
                continue
            feature, cut = split
            below, asked_below = known[rows, feature] <= cut, asked[wanted, feature] <= cut
            stack += [(rows[below], wanted[asked_below]), (rows[~below], wanted[~asked_below])]
    return found / trees


def _split(known: Values, targets: Values, random: np.random.Generator, tried_share: float) -> tuple[int, float] | None:
    """The feature and the cut, or None for a leaf."""
    if len(known) < 2 or np.ptp(targets) == 0:
        return None
    low, high = known.min(axis=0), known.max(axis=0)
    useful = np.flatnonzero(high > low)
    if not len(useful):
        return None
    tried = random.choice(useful, size=max(1, round(tried_share * len(useful))), replace=False)
    cuts = low[tried] + (high[tried] - low[tried]) * random.random(len(tried))
    below = known[:, tried] <= cuts
    count = below.sum(axis=0)
    total_below = targets @ below
    # The sum of squared deviations is smallest where this sum is largest.
    score = total_below**2 / count + (targets.sum() - total_below) ** 2 / np.maximum(1, len(known) - count)
    best = int(np.argmax(np.where(count < len(known), score, -np.inf)))
    return int(tried[best]), float(cuts[best])
