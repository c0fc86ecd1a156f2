"""The input and the result of a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from laconic.architecture import Architecture
from laconic.compression import Compressor
from laconic.scheduling import Schedule
from laconic.synchronization import Synchronization


@dataclass(frozen=True)
class Parts:
    """One choice per axis, not yet known to fit together."""

    synchronization: Synchronization
    architecture: Architecture
    compression: Compressor
    scheduling: Schedule

    def text(self) -> str:
        """Canonical text."""
        return " / ".join(map(str, (self.synchronization, self.architecture, self.compression, self.scheduling)))


@dataclass(frozen=True)
class Refusal:
    """Why a combination cannot work, and what to use instead."""

    reason: str
    nearest: Parts
    """Free of this fault; other rules may still refuse it."""


Rule = Callable[[Parts], Refusal | None]
"""Checks the parts; returns None if they are legal."""

SPLITS = "splits an all-reduce into a reduce-scatter and an all-gather"
"""What a decoupled schedule does, in refusals."""
