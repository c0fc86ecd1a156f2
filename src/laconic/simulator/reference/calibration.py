"""Calibrates one number on one measurement: where a decreasing prediction equals the measured value."""

from __future__ import annotations

from collections.abc import Callable

_STEPS = 50


def solve_decreasing(predict: Callable[[float], float], target: float, low: float, high: float) -> float:
    """The argument in [low, high] at which the decreasing `predict` equals `target`; the nearer end if none does."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if predict(middle) > target:
            low = middle
        else:
            high = middle
    return (low + high) / 2
