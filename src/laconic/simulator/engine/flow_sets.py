"""Flows that begin together, kept once however often they are used, and laid onto the links of a fabric."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from laconic.cluster.fabric import Fabric
from laconic.errors import UsageError

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.int64]
_Small = npt.NDArray[np.int32]


class Flows(NamedTuple):
    """Flow sets on a fabric. Flows of a set that are alike in route and bytes are one entry with a count."""

    first: _Indices
    """The entries of set s are first[s] <= entry < first[s + 1]. Flows that take no bandwidth have none."""
    route: _Small
    num_bytes: _Floats
    count: _Indices
    route_first: _Indices
    """Route r crosses links[route_first[r] : route_first[r + 1]]. No two routes cross the same links."""
    links: _Small
    crossing_first: _Indices
    """Room for the routes that cross each link, in an array as long as `links`."""
    capacity: _Floats
    """Bytes per second of each link."""


class LaidFlows(NamedTuple):
    """Flow sets on a fabric, and what is known before anything runs."""

    flows: Flows
    delay_s: _Floats
    """Of each set: of its longest route."""
    link_bytes: _Floats
    """Of each link: what all sets send over it, as often as they are used."""


class FlowSets:
    """Collects flow sets; those that are alike share a number."""

    def __init__(self) -> None:
        self._patterns: list[tuple[_Indices, _Indices]] = []
        self._sets: list[tuple[int, _Floats]] = []
        self._uses: list[int] = []
        self._known: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._sets)

    def add(self, sources: _Indices, destinations: _Indices, num_bytes: _Floats) -> int:
        """The number of the set with these flows."""
        # Kept by digest: the arrays themselves as keys would be in memory twice.
        pair = _digest(sources, destinations)
        pattern = self._known.setdefault(pair, len(self._patterns))
        if pattern == len(self._patterns):
            self._patterns.append((sources.copy(), destinations.copy()))
        number = self._known.setdefault(pair + _digest(num_bytes), len(self._sets))
        if number == len(self._sets):
            self._sets.append((pattern, num_bytes.copy()))
            self._uses.append(0)
        self._uses[number] += 1
        return number

    def lay(self, fabric: Fabric) -> LaidFlows:
        """All of them along their routes."""
        capacity = np.asarray(fabric.capacity_bytes_per_s, dtype=np.float64)
        for link in np.flatnonzero(~(capacity > 0))[:1].tolist():
            raise UsageError(
                f'link {link} of the fabric ("{fabric.link_name(link)}") must carry more than 0 bytes per second, got '
                f"{capacity[link]:g}. Leave a link that is down out of every route."
            )
        pattern_first = _offsets([len(sources) for sources, _ in self._patterns])
        pairs, pair_of = self._pairs(fabric)
        first, links = fabric.routes(*np.divmod(pairs, fabric.num_devices))
        lengths = np.diff(first)
        pair_of_link = np.repeat(np.arange(len(pairs)), lengths)
        pair_delay_s = np.bincount(pair_of_link, np.asarray(fabric.delay_s)[links], minlength=len(pairs))
        pattern_delay_s = np.zeros(len(self._patterns))
        sizes = np.diff(pattern_first)
        np.maximum.at(pattern_delay_s, np.repeat(np.arange(len(sizes)), sizes), pair_delay_s[pair_of])

        pattern_of = np.array([pattern for pattern, _ in self._sets], dtype=np.int64)
        set_sizes = sizes[pattern_of]
        # Of every flow of every set: its place among the flows of all patterns.
        place = np.repeat(pattern_first[pattern_of] - _offsets(set_sizes)[:-1], set_sizes) + np.arange(set_sizes.sum())
        flow_pair = pair_of[place]
        flow_bytes = np.concatenate([np.empty(0), *(num_bytes for _, num_bytes in self._sets)])
        uses = np.repeat(np.array(self._uses, dtype=np.float64), set_sizes)
        pair_bytes = np.bincount(flow_pair, flow_bytes * uses, minlength=len(pairs))
        link_bytes = np.bincount(links, pair_bytes[pair_of_link], minlength=len(capacity)).astype(np.float64)

        narrow = np.isfinite(capacity[links])  # a link without a limit is never what flows share
        route_of, route_first, route_links = _distinct_routes(
            np.bincount(pair_of_link[narrow], minlength=len(pairs)), links[narrow]
        )
        flow_set = np.repeat(np.arange(len(self._sets)), set_sizes)
        entry_set, route, entry_bytes, count = _merged(
            flow_set, route_of[flow_pair], flow_bytes, np.diff(route_first) > 0
        )
        flows = Flows(
            first=_offsets(np.bincount(entry_set, minlength=len(self._sets))),
            route=route.astype(np.int32),
            num_bytes=entry_bytes,
            count=count,
            route_first=route_first,
            links=route_links.astype(np.int32),
            crossing_first=_offsets(np.bincount(route_links, minlength=len(capacity))),
            capacity=capacity,
        )
        return LaidFlows(flows, pattern_delay_s[pattern_of], link_bytes)

    def _pairs(self, fabric: Fabric) -> tuple[_Indices, _Indices]:
        """The distinct pairs of devices, as one number each, and which of them every flow of every pattern takes."""
        nothing = np.empty(0, dtype=np.int64)
        sources = np.concatenate([nothing, *(pattern[0] for pattern in self._patterns)])
        destinations = np.concatenate([nothing, *(pattern[1] for pattern in self._patterns)])
        for devices in (sources, destinations):
            for device in devices[devices >= fabric.num_devices][:1].tolist():
                raise UsageError(
                    f"a transfer names device {device}, but the fabric has devices 0 to {fabric.num_devices - 1} only."
                )
        return np.unique(sources * fabric.num_devices + destinations, return_inverse=True)


def no_flows() -> Flows:
    """For a graph without transfers."""
    indices, small, floats = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32), np.empty(0)
    return Flows(_offsets([]), small, floats, indices, _offsets([]), small, _offsets([]), floats)


def _digest(*arrays: npt.NDArray[np.generic]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def _offsets(counts: npt.ArrayLike) -> _Indices:
    """Where each of several runs begins, and where the last one ends."""
    ends = np.cumsum(np.asarray(counts, dtype=np.int64))
    return np.concatenate([np.zeros(1, dtype=np.int64), ends])


def _distinct_routes(lengths: _Indices, links: _Indices) -> tuple[_Indices, _Indices, _Indices]:
    """Which route each pair takes, and the routes (first, links), none twice."""
    num_pairs, first = len(lengths), _offsets(lengths)
    table = np.full((num_pairs, int(lengths.max(initial=0)) + 1), -1, dtype=np.int64)
    row = np.repeat(np.arange(num_pairs), lengths)
    table[row, np.arange(len(links)) - first[row]] = links
    order = np.lexsort(table.T)
    ordered = table[order]
    new = np.ones(num_pairs, dtype=bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    route_of = np.empty(num_pairs, dtype=np.int64)
    route_of[order] = np.cumsum(new) - 1
    routes = ordered[new]
    kept = routes >= 0
    return route_of, _offsets(kept.sum(axis=1)), routes[kept]


def _merged(
    flow_set: _Indices, route: _Indices, num_bytes: _Floats, takes_bandwidth: npt.NDArray[np.bool_]
) -> tuple[_Indices, _Indices, _Floats, _Indices]:
    """Flows that take bandwidth, in the order of sets, those of a set that are alike as one with a count."""
    real = takes_bandwidth[route] & (num_bytes > 0)
    order = np.flatnonzero(real)[np.lexsort((num_bytes[real], route[real], flow_set[real]))]
    flow_set, route, num_bytes = flow_set[order], route[order], num_bytes[order]
    new = np.ones(len(order), dtype=np.bool_)
    for column in (flow_set, route, num_bytes):
        new[1:] &= column[1:] == column[:-1]
    new[1:] = ~new[1:]
    begins = np.flatnonzero(new)
    return flow_set[begins], route[begins], num_bytes[begins], np.diff(np.append(begins, len(order)))
