"""Maps flow sets to the links of a fabric: routes are computed once, and equal flows become one entry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from laconic.cluster.fabric import Fabric
from laconic.errors import UsageError
from laconic.simulator.engine.flow_sets import FlowSets

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.int64]
_Small = npt.NDArray[np.int32]


class Flows(NamedTuple):
    """Flow sets on a fabric. Flows of a set with equal route and bytes are one entry with a count."""

    first: _Indices
    """The entries of set s are first[s] <= entry < first[s + 1]. Flows that take no bandwidth have no entry."""
    route: _Small
    num_bytes: _Floats
    count: _Indices
    route_first: _Indices
    """Route r crosses links[route_first[r] : route_first[r + 1]]. No two routes cross the same links."""
    links: _Small
    crossing_first: _Indices
    """Start of each link's list of crossing routes, in an array as long as `links`."""
    capacity: _Floats
    """Bytes per second of each link."""


class LaidFlows(NamedTuple):
    """Flow sets on a fabric, with quantities known before a run."""

    flows: Flows
    delay_s: _Floats
    """The delay of the longest route of each set."""
    link_bytes: _Floats
    """The bytes that all sets send over each link, each set counted as often as it is used."""


def nothing_laid() -> LaidFlows:
    """Flow sets without any flow, for a graph without transfers."""
    indices, small, floats = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32), np.empty(0)
    flows = Flows(_offsets(indices), small, floats, indices, _offsets(indices), small, _offsets(indices), floats)
    return LaidFlows(flows, floats, floats)


def lay(flow_sets: FlowSets, fabric: Fabric) -> LaidFlows:
    """Map all sets to routes; every device in them must exist in the fabric."""
    capacity, sets = _capacity(fabric), flow_sets.sets
    # Each pair of devices is routed once, however many patterns have a flow between them.
    sources = _joined(pattern[0] for pattern in flow_sets.patterns)
    destinations = _joined(pattern[1] for pattern in flow_sets.patterns)
    pairs, pair_of_all = np.unique(sources * fabric.num_devices + destinations, return_inverse=True)
    pair_of = np.split(pair_of_all, np.cumsum([len(pattern[0]) for pattern in flow_sets.patterns], dtype=np.int64))
    first, links = fabric.routes(*np.divmod(pairs, fabric.num_devices))
    hop_pair = np.repeat(np.arange(len(pairs)), np.diff(first))

    pair_delay_s = np.bincount(hop_pair, np.asarray(fabric.delay_s)[links], minlength=len(pairs))
    pattern_delay_s = [float(pair_delay_s[members].max(initial=0.0)) for members in pair_of]

    # All flows of all sets, one after the other.
    set_sizes = [len(num_bytes) for _, num_bytes in sets]
    flow_set = np.repeat(np.arange(len(sets)), set_sizes)
    flow_pair = _joined(pair_of[pattern] for pattern, _ in sets)
    flow_bytes = np.concatenate([np.empty(0), *(num_bytes for _, num_bytes in sets)])
    uses = np.repeat(np.array(flow_sets.uses, dtype=np.float64), set_sizes)
    pair_bytes = np.bincount(flow_pair, flow_bytes * uses, minlength=len(pairs))

    narrow = np.isfinite(capacity[links])  # a link without a limit never constrains flows
    lengths = np.bincount(hop_pair[narrow], minlength=len(pairs))
    route_of, route_first, route_links = _distinct_routes(lengths, links[narrow])
    takes_bandwidth = (lengths[flow_pair] > 0) & (flow_bytes > 0)
    kept = _merged(flow_set, route_of[flow_pair], flow_bytes, takes_bandwidth)
    return LaidFlows(
        flows=Flows(
            first=_offsets(np.bincount(kept.flow_set, minlength=len(sets))),
            route=kept.route.astype(np.int32),
            num_bytes=kept.num_bytes,
            count=kept.count,
            route_first=route_first,
            links=route_links.astype(np.int32),
            crossing_first=_offsets(np.bincount(route_links, minlength=len(capacity))),
            capacity=capacity,
        ),
        delay_s=np.array([pattern_delay_s[pattern] for pattern, _ in sets], dtype=np.float64),
        link_bytes=np.bincount(links, pair_bytes[hop_pair], minlength=len(capacity)).astype(np.float64),
    )


def _capacity(fabric: Fabric) -> _Floats:
    capacity = np.array(fabric.capacity_bytes_per_s, dtype=np.float64)
    for link in np.flatnonzero(~(capacity > 0))[:1].tolist():
        raise UsageError(
            f'link {link} of the fabric ("{fabric.link_name(link)}") must carry more than 0 bytes per second, got '
            f"{capacity[link]:g}. Leave a link that is down out of every route."
        )
    return capacity


def _distinct_routes(lengths: _Indices, links: _Indices) -> tuple[_Indices, _Indices, _Indices]:
    """The route of each pair, and the distinct routes (first, links)."""
    num_pairs, first = len(lengths), _offsets(lengths)
    table = np.full((num_pairs, int(lengths.max(initial=0)) + 1), -1, dtype=np.int64)
    row = np.repeat(np.arange(num_pairs), lengths)
    table[row, np.arange(len(links)) - first[row]] = links
    order = np.lexsort(table.T)
    ordered = table[order]
    new = np.ones(num_pairs, dtype=np.bool_)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    route_of = np.empty(num_pairs, dtype=np.int64)
    route_of[order] = np.cumsum(new) - 1
    routes = ordered[new]
    used = routes >= 0
    return route_of, _offsets(used.sum(axis=1)), routes[used]


class _Merged(NamedTuple):
    flow_set: _Indices
    route: _Indices
    num_bytes: _Floats
    count: _Indices


def _merged(flow_set: _Indices, route: _Indices, num_bytes: _Floats, wanted: npt.NDArray[np.bool_]) -> _Merged:
    """The selected flows in the order of sets; equal flows of a set are one entry with a count."""
    order = np.flatnonzero(wanted)
    order = order[np.lexsort((num_bytes[order], route[order], flow_set[order]))]
    flow_set, route, num_bytes = flow_set[order], route[order], num_bytes[order]
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = (flow_set[1:] != flow_set[:-1]) | (route[1:] != route[:-1]) | (num_bytes[1:] != num_bytes[:-1])
    begins = np.flatnonzero(new)
    return _Merged(flow_set[begins], route[begins], num_bytes[begins], np.diff(np.append(begins, len(order))))


def _joined(parts: Iterable[_Indices]) -> _Indices:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _offsets(counts: _Indices) -> _Indices:
    """The offsets of consecutive ranges with these lengths."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])
