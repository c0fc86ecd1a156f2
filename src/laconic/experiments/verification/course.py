"""The steps that a check observes: enough to see everything a strategy does, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.core.moment import Moment
from laconic.core.tensor import TensorSpec
from laconic.strategy import Strategy

_FEW = 6
"""Steps that show what happens in every step."""
_MANY = 48
"""More steps than this are made only if nothing shorter shows a round."""
_LATE = 2**20
"""A step beyond any warm-up of a compressor."""


_LENGTH = 100
"""The total number of steps given to a strategy that needs it."""


@dataclass(frozen=True)
class Course:
    """Some steps in a row."""

    start: int
    """Steps that count as made before the first of these."""
    count: int

    @property
    def steps(self) -> range:
        """The number of each step."""
        return range(self.start, self.start + self.count)


def with_length(strategy: Strategy) -> Strategy:
    """The same strategy with the length of training, if it needs that."""
    return strategy.planned(_LENGTH) if strategy.synchronization.asks_for_length else strategy


def course(strategy: Strategy, tensors: Sequence[TensorSpec], world_size: int) -> Course:
    """Steps in which every recurring operation happens.

    A compressor with a warm-up is observed after it, when it works as intended.
    """
    late = warms_up(strategy, tensors, world_size)
    rule = with_length(strategy).synchronization
    if rule.quantity != "change":
        if rule.beginning:
            # It builds on the optimizer's state from the first steps, so those must have been made.
            return Course(0, max(_FEW, rule.warmup + 2 * rule.interval + 2))
        return Course(_LATE if late else 0, _FEW)
    period = rule.interval
    two_periods = 2 * period + rule.delay + 1
    first = -(-max(_LATE, rule.warmup) // period) * period if late else 0
    if two_periods > _MANY:
        # One round: shortly before the first that is not part of a warm-up, until it has taken effect.
        return Course(max(first, (rule.warmup // period + 1) * period) - 3, 3 + rule.delay + 2)
    if late:
        return Course(first, two_periods)
    start = max(0, rule.warmup - 2)
    return Course(start, rule.warmup - start + two_periods)


def opening(strategy: Strategy, tensors: Sequence[TensorSpec], world_size: int) -> Course | None:
    """The first steps, if a compressor works differently in them."""
    if not warms_up(strategy, tensors, world_size):
        return None
    return Course(0, max(_FEW, min(strategy.synchronization.interval, 1000)))


def warms_up(strategy: Strategy, tensors: Sequence[TensorSpec], world_size: int) -> bool:
    """Whether the first round sends a different number of bytes than later ones."""
    plans = strategy.plans(tensors, world_size)
    early, steady = Moment(0, 0, world_size), Moment.steady(world_size)
    return any(strategy.plan_bytes(plan, early) != strategy.plan_bytes(plan, steady) for plan in plans)
