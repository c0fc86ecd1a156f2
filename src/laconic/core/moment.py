"""The position of an exchange in the job: all that a method may depend on besides its input and its state."""

from __future__ import annotations

from dataclasses import dataclass

_LATE_STEP = 2**31
"""A step after any warm-up."""


@dataclass(frozen=True)
class Moment:
    """One exchange, as one rank sees it."""

    step: int = 0
    rank: int = 0
    world_size: int = 1
    round: int = 0
    """The number of earlier exchanges of the whole model; equal to the step where every step exchanges it."""

    momentum: float = 0.0
    """betas[0] of the optimizer, where its momentum is exchanged; otherwise 0."""

    @classmethod
    def steady(cls, world_size: int, rank: int = 0) -> Moment:
        """A moment after every warm-up."""
        return cls(_LATE_STEP, rank, world_size, _LATE_STEP)
