"""One measured curve: the time of an operation by size, among a fixed number of GPUs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from laconic.errors import UsageError


@dataclass(frozen=True)
class SizeCurve:
    """Times at a few sizes; straight lines between them, which are exact where time is start-up + bytes / rate.

    Below the smallest size time is the start-up; above the largest the curve continues at the rate of its last piece.
    """

    sizes: tuple[float, ...]
    """Bytes, increasing."""
    seconds: tuple[float, ...]
    """Not decreasing: more bytes take at least as long."""

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or len(self.sizes) != len(self.seconds):
            raise UsageError(
                f"a curve needs one time for each of at least 2 sizes, got {len(self.sizes)} sizes and "
                f"{len(self.seconds)} times."
            )
        if not all(math.isfinite(value) and value > 0 for value in (*self.sizes, *self.seconds)):
            raise UsageError("the sizes and times of a curve must be positive numbers.")
        if any(later <= earlier for earlier, later in pairwise(self.sizes)):
            raise UsageError("the sizes of a curve must increase.")
        if any(later < earlier for earlier, later in pairwise(self.seconds)):
            raise UsageError("the times of a curve must not decrease. SizeCurve.fitted removes such points.")

    @classmethod
    def fitted(cls, sizes: Sequence[float], seconds: Sequence[float]) -> SizeCurve:
        """A curve through measured points, each lowered to the lowest time of any larger size.

        Disturbances make measurements longer, so a time above that of a larger size is the disturbed one.
        """
        lowest, cleaned = math.inf, []
        for time in reversed(seconds):
            lowest = min(lowest, time)
            cleaned.append(lowest)
        return cls(tuple(sizes), tuple(reversed(cleaned)))

    @property
    def startup_s(self) -> float:
        """The time of the smallest size."""
        return self.seconds[0]

    @property
    def plateau_bytes_per_s(self) -> float:
        """Bytes per second that larger sizes add."""
        more = self.seconds[-1] - self.seconds[-2]
        return (self.sizes[-1] - self.sizes[-2]) / more if more > 0 else math.inf

    def at(self, nbytes: float) -> float:
        """The time for `nbytes`."""
        if nbytes <= self.sizes[0]:
            return self.seconds[0]
        if nbytes >= self.sizes[-1]:
            return self.seconds[-1] + (nbytes - self.sizes[-1]) / self.plateau_bytes_per_s
        right = bisect_right(self.sizes, nbytes)
        low, high = self.sizes[right - 1], self.sizes[right]
        share = (nbytes - low) / (high - low)
        return self.seconds[right - 1] + share * (self.seconds[right] - self.seconds[right - 1])
