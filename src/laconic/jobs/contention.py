"""How much jobs slow each other down on shared links.

A job on several hosts forms its sums along a ring of these hosts: every link of the ring carries

    b = 2 (h - 1) / h x gradient bytes x (bytes its strategy sends / bytes plain DDP sends)

in each step. Gradients become ready in buckets during the backward pass, which is two thirds of the compute time c.
Communication cannot begin before the first bucket is ready, and the last bucket cannot be sent before the pass is over:
with communication time m

    step = max(c + m / buckets, head + m) + encoding and decoding,    head = c (1 + 2 / buckets) / 3

While job i communicates over link l, job j does so too with probability q_j = m_j / step_j, and both share the link:

    m_i = max over its links of  b / capacity x (1 + sum of q_j of the others)

This is a fixed point, found by iterating. Jobs that are interleaved (CASSINI) never communicate at the same time as
long as their periods fit each other and the link has room for all; then only the load beyond its capacity counts.

References: max-min sharing, Bertsekas & Gallager 1992; interleaving, Rajasekaran et al. 2024 (CASSINI).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laconic.cluster import Cluster
from laconic.cluster.fabric import Floats, Indices
from laconic.jobs.pool import Placement

_BUCKETS = 10
TAIL = 1 / _BUCKETS
"""Share of the communication that follows the backward pass."""
HEAD = (1 + 2 / _BUCKETS) / 3
"""Share of a step's compute before the first bucket is ready."""
_ITERATIONS = 40
_DAMPING = 0.5
_SETTLING = 4
"""Iterations after which one job may take another option."""
_CLOSE = 1e-7
_WORTH = 1.01
"""The least gain for which a job takes another option."""
_FITTING = 0.05
"""Periods fit if one is a multiple of the other within this share."""
_MOST_MULTIPLE = 8


@dataclass(frozen=True, eq=False)
class Shared:
    """The effect of shared links on jobs that run at the same time."""

    step_s: Floats
    """Step times by job."""
    option: Indices
    """The option that each job uses."""
    link_load: Floats
    """By link: share of the time in which it is busy."""


@dataclass(frozen=True, eq=False)
class Options:
    """Ways in which jobs may exchange gradients."""

    bytes_ratio: Floats
    """[job, option]: bytes sent, compared with plain DDP."""
    steps_ratio: Floats
    """[job, option]: steps to the same loss, compared with plain DDP."""
    codec_s: Floats
    """[job, option]: encoding and decoding in each step."""

    @classmethod
    def plain(cls, num_jobs: int) -> Options:
        """Plain DDP and nothing else."""
        return cls(np.ones((num_jobs, 1)), np.ones((num_jobs, 1)), np.zeros((num_jobs, 1)))


class Links:
    """The links of a cluster, and the links that a ring of hosts crosses."""

    def __init__(self, cluster: Cluster) -> None:
        self._fabric = cluster.fabric()
        self._gpus_per_host = cluster.devices_per_host
        self.capacity_bytes_per_s = self._fabric.capacity_bytes_per_s
        self._known: dict[tuple[int, ...], tuple[Indices, Floats]] = {}

    @property
    def num_links(self) -> int:
        """The number of links."""
        return len(self.capacity_bytes_per_s)

    def name(self, link: int) -> str:
        """The name of a link, in words."""
        return self._fabric.link_name(link)

    def crossed(self, placement: Placement) -> tuple[Indices, Floats]:
        """The links a ring of these hosts crosses, and the seconds each is busy for a byte of gradients."""
        hosts = tuple(host for host, _ in placement)
        if hosts not in self._known:
            devices = np.array(hosts, dtype=np.int64) * self._gpus_per_host
            _, links = self._fabric.routes(devices, np.roll(devices, -1))
            used, times = np.unique(links, return_counts=True)
            share = 2 * (len(hosts) - 1) / len(hosts) * times
            self._known[hosts] = (used, share / self.capacity_bytes_per_s[used])
        return self._known[hosts]


def shared(
    links: Links,
    placements: Sequence[Placement],
    compute_s: Floats,
    gradient_bytes: Floats,
    options: Options,
    *,
    interleaved: bool = False,
) -> Shared:
    """The step times and options of jobs that run at the same time, each on several hosts.

    Each job takes the option with the least step time x steps_ratio, given what the others do. Jobs change their
    option one after the other, the one that gains most first: if all changed at once, they would all change back when
    the link is free.
    """
    num_jobs = len(placements)
    crossed = [links.crossed(placement) for placement in placements]
    job = np.repeat(np.arange(num_jobs), [len(used) for used, _ in crossed])
    link = np.concatenate([np.zeros(0, dtype=np.int64), *(used for used, _ in crossed)])
    plain_s = np.concatenate([np.zeros(0), *(byte_s for _, byte_s in crossed)]) * gradient_bytes[job]
    rows = np.arange(num_jobs)
    option = np.zeros(num_jobs, dtype=np.int64)
    step_s, busy = compute_s.copy(), np.zeros(num_jobs)
    stretch = np.ones(links.num_links)
    # Interleaved jobs collide only with jobs they cannot be interleaved with.
    fits = _fitting(compute_s) if interleaved else None
    several = options.bytes_ratio.shape[1] > 1
    for turn in range(_ITERATIONS + (_SETTLING * num_jobs if several else 0)):
        own_s = plain_s * options.bytes_ratio[job, option[job]]
        active = np.bincount(link, busy[job], links.num_links)
        others = active[link] - busy[job]
        if fits is not None:
            others = others - _taking_turns(job, link, busy, fits)
            load = np.bincount(link, own_s / step_s[job], links.num_links)
            # Grows until no link is overloaded.
            stretch = np.maximum(1.0, stretch * load)
            factor = np.maximum(1 + others, stretch[link])
        else:
            factor = 1 + others
        plain_m = np.zeros(num_jobs)
        np.maximum.at(plain_m, job, plain_s * factor)
        m_s = plain_m[:, None] * options.bytes_ratio
        steps = overlapped(compute_s[:, None], m_s) + options.codec_s
        if several and turn % _SETTLING == _SETTLING - 1:
            _improve(option, steps * options.steps_ratio)
        before_s = step_s
        step_s = _DAMPING * step_s + (1 - _DAMPING) * steps[rows, option]
        busy = np.minimum(1.0, m_s[rows, option] / step_s)
        if turn > _SETTLING and np.allclose(step_s, before_s, rtol=_CLOSE, atol=0):
            break
    own_s = plain_s * options.bytes_ratio[job, option[job]]
    load = np.bincount(link, own_s / step_s[job], links.num_links)
    return Shared(step_s, option, np.minimum(1.0, load))


def overlapped(compute_s: Floats, communication_s: Floats) -> Floats:
    """The step time where communication overlaps with the backward pass."""
    return np.maximum(compute_s + TAIL * communication_s, HEAD * compute_s + communication_s)


def _improve(option: Indices, cost: Floats) -> None:
    """Change the option of the job that gains most."""
    gain = cost[np.arange(len(option)), option] / cost.min(axis=1)
    job = int(gain.argmax())
    if gain[job] > _WORTH:
        option[job] = int(cost[job].argmin())


def _fitting(period_s: Floats) -> np.ndarray:
    """[job, job]: whether their steps can take turns: one period is a multiple of the other."""
    ratio = np.maximum(period_s[:, None], period_s[None, :]) / np.minimum(period_s[:, None], period_s[None, :])
    nearest = np.round(ratio)
    return (np.abs(ratio / nearest - 1) <= _FITTING) & (nearest <= _MOST_MULTIPLE)


def _taking_turns(job: Indices, link: Indices, busy: Floats, fits: np.ndarray) -> Floats:
    """For each crossing, the sum of q over other jobs on that link which take turns with it."""
    found = np.zeros(len(job))
    order = np.argsort(link, kind="stable")
    edges = np.flatnonzero(np.diff(link[order])) + 1
    for group in np.split(order, edges):
        if len(group) > 1:
            members = job[group]
            turns = fits[np.ix_(members, members)] & ~np.eye(len(members), dtype=bool)
            found[group] = turns @ busy[members]
    return found
