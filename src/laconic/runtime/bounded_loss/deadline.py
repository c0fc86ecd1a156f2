"""How long an owner waits for rows: a percentile of recent durations of exchanges of that size, and a margin.

    limit = 1.25 x percentile of the last 64 + 20 ms,   none before 32 exchanges of that size

The duration of an exchange is the time until the last row that is in its means arrived, even if other rows did not
come. So one rank that is late does not make the next exchanges wait longer, but a network that has become slower does:
rows arrive until the limit, the percentile rises to the limit, and the limit grows by the margin.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np

_REMEMBERED = 64
_ENOUGH = 32
"""Exchanges of one size before the first is cut short: the first of a job are slower than later ones."""
_MARGIN = 1.25
_LEAST_S = 0.02
"""How long a process may wait for a core on a busy host."""
_SIZES = 256
"""Sizes that are remembered; a plan has fewer buckets of different size."""


class Deadline:
    """The recent durations of exchanges, by size."""

    def __init__(self, percentile: float) -> None:
        self._percentile = percentile
        self._taken: OrderedDict[int, deque[float]] = OrderedDict()

    def note(self, nbytes: int, seconds: float) -> None:
        """Record that the last row of an exchange of this many bytes arrived after this many seconds."""
        self._taken.setdefault(nbytes, deque(maxlen=_REMEMBERED)).append(seconds)
        self._taken.move_to_end(nbytes)
        if len(self._taken) > _SIZES:
            self._taken.popitem(last=False)

    def limit_s(self, nbytes: int) -> float | None:
        """How long an exchange of this many bytes may take; None: too few durations are known."""
        taken = self._taken.get(nbytes, ())
        if len(taken) < _ENOUGH:
            return None
        return _MARGIN * float(np.quantile(np.array(taken), self._percentile)) + _LEAST_S
