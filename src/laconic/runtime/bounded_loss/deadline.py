"""How long an owner waits for rows: a percentile of what recent exchanges of the same size have taken, and a margin.

    limit = 1.25 x percentile of the last 64 + 20 ms,   none before 32 exchanges of that size

An exchange has taken the time until the last row arrived that was in its means, also if others did not come. So one
rank that is late does not make the next exchanges wait longer, and a network that has become slower does: rows arrive
until the limit, the percentile comes to it, and the limit grows by the margin.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np

_REMEMBERED = 64
_ENOUGH = 32
"""Exchanges of one size before the first is cut short: the first of a job are slower than later ones."""
_MARGIN = 1.25
_LEAST_S = 0.02
"""What a busy host may keep a process waiting for a core."""
_SIZES = 256
"""Sizes that are remembered; a plan has fewer buckets of different size."""


class Deadline:
    """What exchanges of each size have taken."""

    def __init__(self, percentile: float) -> None:
        self._percentile = percentile
        self._taken: OrderedDict[int, deque[float]] = OrderedDict()

    def note(self, nbytes: int, seconds: float) -> None:
        """An exchange of so many bytes has had its last row after so many seconds."""
        self._taken.setdefault(nbytes, deque(maxlen=_REMEMBERED)).append(seconds)
        self._taken.move_to_end(nbytes)
        if len(self._taken) > _SIZES:
            self._taken.popitem(last=False)

    def limit_s(self, nbytes: int) -> float | None:
        """How long an exchange of so many bytes may take; None: too few are known."""
        taken = self._taken.get(nbytes, ())
        if len(taken) < _ENOUGH:
            return None
        return _MARGIN * float(np.quantile(np.array(taken), self._percentile)) + _LEAST_S
