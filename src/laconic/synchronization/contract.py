"""What a synchronization rule promises: when replicas agree, and on which quantity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from laconic.settings import Method

Quantity = Literal["gradient"]


@dataclass(frozen=True, kw_only=True)
class Synchronization(Method):
    """WHEN replicas agree."""

    axis: ClassVar[str] = "synchronization"
    quantity: ClassVar[Quantity]
    """What is averaged."""
    replicas_identical: ClassVar[bool]
    """All replicas hold the same parameters after every step."""

    def rounds_per_step(self) -> float:
        """How often everything is exchanged, per optimizer step."""
        raise NotImplementedError
