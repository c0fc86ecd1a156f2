"""Where in the job an exchange takes place: all that a method may depend on beside its input and its state."""

from __future__ import annotations

from dataclasses import dataclass

_LATE_STEP = 2**31
"""Beyond any warm-up."""


@dataclass(frozen=True)
class Moment:
    """One exchange, as one rank sees it."""

    step: int = 0
    rank: int = 0
    world_size: int = 1
    round: int = 0
    """How many times everything was exchanged before; the step itself where that happens in every step."""

    momentum: float = 0.0
    """betas[0] of the optimizer, for what takes part in its momentum; 0 where nothing does."""

    @classmethod
    def steady(cls, world_size: int, rank: int = 0) -> Moment:
        """A moment after every warm-up."""
        return cls(_LATE_STEP, rank, world_size, _LATE_STEP)
