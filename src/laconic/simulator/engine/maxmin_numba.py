"""Max-min fair rates by progressive filling: all flows grow equally until a link is full, which freezes its flows.

    share(link) = remaining capacity / flows on it that still grow

The link with the smallest share fills up first; its flows get that share, and take it from the other links they cross.
Imported only when a graph runs.

Reference: Bertsekas & Gallager 1992, Data Networks, section 6.5.2.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from laconic.errors import UsageError
from laconic.simulator.engine.compilation import compiled
from laconic.simulator.engine.heaps_numba import pop, push

_ALIKE = 1.0 + 1e-12
"""Shares that differ by less count as equal: rounding must not separate equal flows."""


def fair_rates(
    capacity: npt.NDArray[np.float64],
    first: npt.NDArray[np.int64],
    links: npt.NDArray[np.integer],
    multiplicity: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.float64]:
    """The rate of each flow on links with these capacities, if flow i crosses links[first[i] : first[i + 1]].

    `multiplicity`: entry i stands for that many flows, each of which gets the rate. A flow that crosses no link has no
    limit.
    """
    num_flows, num_links = len(first) - 1, len(capacity)
    counts = np.ones(num_flows, dtype=np.int64) if multiplicity is None else multiplicity
    if not (len(counts) == num_flows and (counts > 0).all()):
        raise UsageError(f"fair_rates: each of {num_flows} flows needs a multiplicity of at least 1.")
    if not (capacity > 0).all():
        raise UsageError("fair_rates: every link must have a capacity above 0.")
    order = np.argsort(links, kind="stable")
    flow_of = np.repeat(np.arange(num_flows), np.diff(first))
    num_crossing = np.bincount(links, minlength=num_links)
    rates = np.empty(num_flows)
    fill(
        np.arange(num_flows, dtype=np.int32),
        num_flows,
        np.arange(num_links, dtype=np.int32),
        num_links,
        first.astype(np.int64),
        links.astype(np.int32),
        counts.astype(np.int64),
        np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(num_crossing)]),
        flow_of[order].astype(np.int32),
        num_crossing,
        capacity.astype(np.float64),
        np.bincount(links, counts[flow_of], minlength=num_links).astype(np.int64),
        np.empty(num_links),
        np.empty(num_links, dtype=np.int32),
        rates,
        0.0,
    )
    return rates


@compiled
def fill(
    routes,
    num_routes,
    used_links,
    num_used_links,
    route_first,
    links,
    count,
    crossing_first,
    crossing,
    num_crossing,
    left,
    growing,
    keys,
    queue,
    rate,
    level,
):
    """Write the rate of each of `routes`, which cross no other links than `used_links`; none is below `level`.

    The `growing` flows of these routes share the capacity `left` of these links. The routes that cross link l are
    among crossing[crossing_first[l] : crossing_first[l] + num_crossing[l]]; others there have a rate that is not
    negative. `keys` and `queue` are scratch arrays, one entry per link, and `left` and `growing` are used up.
    """
    for i in range(num_routes):
        route = routes[i]
        rate[route] = -1.0 if route_first[route] < route_first[route + 1] else math.inf
    size = 0
    for i in range(num_used_links):
        link = used_links[i]
        if growing[link] > 0:
            push(keys, queue, 0, size, left[link] / growing[link], link)
            size += 1
    while size > 0:
        key = keys[0]
        link = pop(keys, queue, 0, size)
        size -= 1
        if growing[link] == 0:
            continue
        share = left[link] / growing[link]
        # Its flows may have been frozen elsewhere since it was queued: then more is left for the others.
        if share > key * _ALIKE:
            push(keys, queue, 0, size, share, link)
            size += 1
            continue
        if share > level * _ALIKE:
            level = share
        begin = crossing_first[link]
        for i in range(begin, begin + num_crossing[link]):
            route = crossing[i]
            if rate[route] < 0.0:
                rate[route] = level
                for place in range(route_first[route], route_first[route + 1]):
                    other = links[place]
                    left[other] -= level * count[route]
                    growing[other] -= count[route]
