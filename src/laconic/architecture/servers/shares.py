"""How much each server gets if every worker has one and their links differ.

    C[i, k] = 1 / r_ik for i != k, sum over j of 1 / r_kj for i = k      r_ik = measured rate of the pair i and k
    t = C s                                                              seconds that each host is busy, for a byte
    s >= 0, sum s = 1, and max(t) as small as possible

If server k gets the share s_k of all bytes, host i exchanges s_k with it, and host k exchanges s_k with every other
host. The shares are found in small units, each of which goes to the server with which the busiest host is least busy. A
host behind a slow link thus gets little or nothing, and where racks have slow uplinks, servers are in the larger one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from laconic.core.hosts import Pairs

_UNITS = 8
"""Units for each server: shares are multiples of 1 / (8 n)."""
_DEAD = 1e-3
"""The rate of a pair that exchanges nothing, as a part of the slowest that does."""
_ALIKE = 0.75
"""Rates count as equal down to this part of the fastest of them: smaller differences may be chance."""


def server_shares(pairs: Pairs) -> tuple[float, ...]:
    """The share of each server; ranks that have the same measurements get the same result."""
    size = len(pairs)
    # The slower direction counts: bytes go both ways.
    rates = np.minimum(np.array(pairs, dtype=np.float64), np.array(pairs, dtype=np.float64).T)
    known = rates[~np.eye(size, dtype=bool) & np.isfinite(rates) & (rates > 0)]
    if not len(known):
        return (1 / size,) * size
    np.fill_diagonal(rates, np.inf)
    seconds = 1 / _rounded(np.maximum(rates, known.min() * _DEAD))
    costs = seconds + np.diag(seconds.sum(axis=1))
    units, busy = np.zeros(size, dtype=np.int64), np.zeros(size)
    for _ in range(_UNITS * size):
        # Rounded, because of servers that are equally good the one with the fewest units is taken.
        then = np.round((busy + costs).max(axis=1) / costs.max(), 9)
        best = np.lexsort((units, then))[0]
        units[best] += 1
        busy += costs[best]
    return tuple((units / units.sum()).tolist())


def _rounded(rates: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Each rate replaced by the fastest one that it counts as equal to."""
    found, fastest = rates.copy(), np.inf
    for rate in sorted(set(rates[np.isfinite(rates)].tolist()), reverse=True):
        if rate < _ALIKE * fastest:
            fastest = rate
        found[rates == rate] = fastest
    return found


def in_words(shares: tuple[float, ...]) -> str:
    """E.g. "34% 34% 31% 0%"."""
    return " ".join(f"{share:.0%}" for share in shares)
