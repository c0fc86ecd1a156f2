"""Where time comes from: the wall, or a number the simulator moves."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Gives the time; nothing else in laconic may."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes backwards."""
        ...


class WallClock:
    """Real time, monotonic."""

    def now(self) -> float:
        """Seconds of the performance counter."""
        return time.perf_counter()


class VirtualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """The virtual time."""
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Move to `time_s`; time never goes backwards."""
        if not time_s >= self._now_s:  # so, because it also refuses NaN
            raise ValueError(f"a clock cannot go back from {self._now_s} to {time_s}")
        self._now_s = time_s
