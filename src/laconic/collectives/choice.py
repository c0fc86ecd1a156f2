"""The fastest algorithm for a tensor of some size, from measured times."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

NATIVE = "native"
"""The backend's own all-reduce."""
TIMED_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Sizes for which algorithms are timed, on real links and on simulated ones."""

_MARGIN = 0.1
"""Another algorithm must have been faster than the backend's own by this share: less may be chance."""


@dataclass(frozen=True)
class Costs:
    """Measured times, the same on every rank."""

    sizes: tuple[int, ...]
    """Bytes of the tensors, in ascending order."""
    seconds: tuple[tuple[str, tuple[float, ...]], ...]
    """algorithm, and how long it took for each size; the backend's own is among them."""

    def estimate(self, algorithm: str, nbytes: int) -> float:
        """Seconds `algorithm` takes for `nbytes`.

        Interpolated between the nearest measured sizes, extrapolated from the last two beyond them, and constant below
        the smallest.
        """
        times = dict(self.seconds)[algorithm]
        if nbytes <= self.sizes[0] or len(self.sizes) == 1:
            return times[0]
        right = min(bisect_left(self.sizes, nbytes), len(self.sizes) - 1)
        low, high = self.sizes[right - 1], self.sizes[right]
        per_byte = (times[right] - times[right - 1]) / (high - low)
        return times[right - 1] + (nbytes - low) * per_byte


def fastest(costs: Costs | None, nbytes: int) -> str:
    """The algorithm for a tensor of `nbytes`: the backend's own, unless another one is clearly faster.

    Between two measured sizes it must have been clearly faster at both, and beyond the largest at the two largest.
    """
    if costs is None:
        return NATIVE
    looked_at = [nbytes]
    if nbytes > costs.sizes[-1]:
        if len(costs.sizes) == 1:
            return NATIVE
        looked_at += costs.sizes[-2:]
    elif nbytes > costs.sizes[0] and nbytes not in costs.sizes:
        right = bisect_left(costs.sizes, nbytes)
        looked_at += costs.sizes[right - 1 : right + 1]
    best = NATIVE
    for algorithm, _ in costs.seconds:
        clearly = all(
            costs.estimate(algorithm, size) < (1 - _MARGIN) * costs.estimate(NATIVE, size) for size in looked_at
        )
        if clearly and costs.estimate(algorithm, nbytes) < costs.estimate(best, nbytes):
            best = algorithm
    return best


def in_words(costs: Costs) -> str:
    """The algorithm from each size on, e.g. "tree from 0 B, native from 1048576 B"."""
    # Between two sizes the choice changes at most a few times; a fine scale finds where.
    scale = sorted({0, *(2**power for power in range(8, 33)), *costs.sizes})
    changes: list[str] = []
    before = ""
    for nbytes in scale:
        chosen = fastest(costs, nbytes)
        if chosen != before:
            changes.append(f"{chosen} from {nbytes} B")
        before = chosen
    return ", ".join(changes)
