"""Predicts a measurement of pairs: how fast every two devices exchange while all others exchange too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from laconic.cluster import Cluster
from laconic.cluster.pairs import meetings
from laconic.core.hosts import Pairs


def pair_rates(cluster: Cluster, devices: Sequence[int]) -> Pairs:
    """Bits per second between ranks on these devices; measured rates, where a probe has measured as many ranks.

    In each round of the measurement a message gets its share of the busiest link that it crosses.
    """
    size, measured = len(devices), cluster.measured
    if measured is not None and len(measured.pairs_bps) == size:
        return measured.pairs_bps
    fabric, places = cluster.fabric(), np.array(devices, dtype=np.int64)
    byte_s, times = np.zeros((size, size)), np.zeros((size, size))
    for meeting in meetings(size):
        one, other = np.array(meeting, dtype=np.int64).reshape(-1, 2).T
        sources, destinations = np.concatenate([one, other]), np.concatenate([other, one])
        first, links = fabric.routes(places[sources], places[destinations])
        busy_s = np.bincount(links, minlength=len(fabric.capacity_bytes_per_s)) / fabric.capacity_bytes_per_s
        # Ranks on one device would cross no link, but each has one of its own.
        byte_s[sources, destinations] += np.maximum.reduceat(busy_s[links], first[:-1])
        times[sources, destinations] += 1
    mean_s = byte_s / np.maximum(1, times)
    rates = np.divide(8.0, np.maximum(mean_s, mean_s.T), out=np.zeros_like(mean_s), where=mean_s > 0)
    return tuple(map(tuple, rates.tolist()))
