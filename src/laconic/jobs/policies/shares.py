"""Policies that assign each job a share of the time; rounds then follow the shares.

    priority = share / (time received since the last reset / time all jobs received)

The jobs with the highest priority run. A job with a share of 0 runs only where GPUs are left. Shares are computed anew
when jobs have come or ended, or their batch has changed. Only then, and at most every 1,000 s, the time received is
reset; the time by which a job fell short of its share counts as its deficit, which decides between equal priorities.
This is how Gavel's scheduler works on a real cluster; its simulator keeps shares between resets. Two jobs never share a
GPU (Gavel's policies without packing), and all jobs have the same weight.

Shares are the optimum of a linear program on a cluster of one type of GPU:

    0 <= x_i <= 1,    sum of gpus_i x_i <= number of GPUs

Where the optimum leaves some x free, `center` takes the middle of what is allowed, as interior-point solvers do.

Reference: Narayanan et al. 2020 (Gavel), arXiv:2008.09213, sections 3 and 5; _update_priorities and
_reset_time_run_so_far of its scheduler.py.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import numpy as np

from laconic.cluster.fabric import Floats, Indices
from laconic.jobs.policies.contract import Chooser, Policy, Turn, View
from laconic.settings import duration

_BISECTIONS = 60
_TIGHT = 1e-9


class Memory:
    """The state of one policy between calls, by job number."""

    def __init__(self) -> None:
        self.matched: set[int] = set()
        """Jobs that have been matched with a machine (allox)."""
        self.isolated: dict[int, tuple[float, float, float]] = {}
        """Steps left, steps per second and time on a share of its own so far (finish_time_fairness)."""


@dataclass(frozen=True, kw_only=True)
class SharePolicy(Policy):
    """A share of the time for each job."""

    reset: float = duration(1000.0)
    """Time after which the time received may be reset."""

    @abstractmethod
    def shares(self, view: View, memory: Memory) -> Floats:
        """The share of each job, between 0 and 1."""
        ...

    def start(self) -> Chooser:
        return _ByShare(self)


@dataclass(eq=False)
class _ByShare:
    policy: SharePolicy
    memory: Memory = field(default_factory=Memory)
    last_reset_s: float = 0.0
    has_changed: bool = False
    """Whether shares have been computed anew since the last reset."""
    share: dict[int, float] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)
    """The time that a job had received at the last reset."""
    deficit: dict[int, float] = field(default_factory=dict)

    def choose(self, view: View) -> Turn:
        numbers = view.number.tolist()
        for number, received_s in zip(numbers, view.received_s.tolist(), strict=True):
            self.since.setdefault(number, received_s)
            self.deficit.setdefault(number, 0.0)
        self.has_changed |= view.has_changed
        if self.has_changed and (view.now_s - self.last_reset_s >= self.policy.reset or not self.share):
            self._reset(view, numbers)
        if view.has_changed or not self.share:
            self.share = dict(zip(numbers, self.policy.shares(view, self.memory).tolist(), strict=True))
        # A job that has not run yet must not count as infinitely far behind: half a round is credited to each.
        recent_s = view.received_s - _values(self.since, numbers) + view.round_s / 2
        share = _values(self.share, numbers)
        priority = share * recent_s.sum() / recent_s
        order = np.lexsort((view.number, -share, -_values(self.deficit, numbers), -priority))
        return Turn(order, view.gpus)

    def _reset(self, view: View, numbers: list[int]) -> None:
        elapsed_s = view.now_s - self.last_reset_s
        for number, received_s in zip(numbers, view.received_s.tolist(), strict=True):
            due_s = self.share.get(number, 0.0) * elapsed_s
            self.deficit[number] += due_s - (received_s - self.since[number])
            self.since[number] = received_s
        self.last_reset_s, self.has_changed = view.now_s, False


def _values(by_number: dict[int, float], numbers: list[int]) -> Floats:
    return np.fromiter((by_number[number] for number in numbers), dtype=np.float64, count=len(numbers))


def center(least: Floats, gpus: Indices, num_gpus: int) -> Floats:
    """The analytic centre of  least <= x <= 1,  sum of gpus x <= num_gpus.

        maximize  sum of log(x - least) + log(1 - x)  +  log(num_gpus - sum of gpus x)

    For a given slope mu = 1 / (num_gpus - sum of gpus x) each x is the root of a quadratic; mu is found by bisection.
    """
    least = np.minimum(least, 1.0)
    room = 1.0 - least
    spare = num_gpus - float(gpus @ least)
    if spare <= _TIGHT * num_gpus:
        return least
    low, high = 1e-9, 1e9

    def at(slope: float) -> Floats:
        cost = slope * gpus
        linear = cost * room + 2
        return least + 2 * room / (linear + np.sqrt(np.maximum(0.0, linear**2 - 4 * cost * room)))

    for _ in range(_BISECTIONS):
        slope = float(np.sqrt(low * high))
        left = num_gpus - float(gpus @ at(slope))
        if left <= 0 or 1 / left > slope:
            low = slope
        else:
            high = slope
    return at(high)
