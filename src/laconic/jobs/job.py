"""A training job as a scheduler sees it: its arrival, the number of GPUs it asks for, and its speed on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from laconic.errors import UsageError, one_line

MOST_GPUS = 65_536
_LONGEST_S = 3.2e8
"""Ten years; longer times are typing errors."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of a job with constant speed."""

    until: float
    """Share of the job's work that is done when the phase ends; 1 for the last."""
    work_per_s: float
    """Share of the job's whole work done per second, on the GPUs it asks for, all on one host."""
    steps_per_s: float
    """Optimizer steps per second, as the job itself counts them."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The traffic of a job between hosts."""

    gradient_bytes: float
    """Bytes of all gradients, uncompressed."""
    strategy: str = "ddp"
    """The strategy that exchanges gradients."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One line of a trace."""

    name: str
    arrival_s: float
    gpus: int
    phases: tuple[Phase, ...]
    model: str = ""
    after: str = ""
    """The job that must have ended before this one may start; empty: none."""
    max_gpus: int = 0
    """An elastic job may run on 1 GPU up to this number; 0: only on `gpus`."""
    scaling: tuple[tuple[int, float], ...] = ()
    """Measured speeds: (GPUs, steps per second). Left out: see `speed_on`."""
    spread_slowdown: float = 1.0
    """How many times as long a step takes if its GPUs are not all on one host, where that was measured."""
    traffic: Traffic | None = None
    """None: nothing is known about its bytes, and links do not slow it down."""

    def __post_init__(self) -> None:
        where = f'job "{one_line(self.name, 60)}"'
        if not (math.isfinite(self.arrival_s) and 0 <= self.arrival_s <= _LONGEST_S):
            raise UsageError(f"{where}: arrival_s must be between 0 and {_LONGEST_S:g}, got {self.arrival_s:g}.")
        for key, value in (("gpus", self.gpus), ("max_gpus", self.max_gpus or self.gpus)):
            if not 1 <= value <= MOST_GPUS:
                raise UsageError(f"{where}: {key} must be between 1 and {MOST_GPUS}, got {value}.")
        if self.max_gpus and self.max_gpus < self.gpus:
            raise UsageError(f"{where}: max_gpus must be at least gpus = {self.gpus}, got {self.max_gpus}.")
        ends = [0.0, *(phase.until for phase in self.phases)]
        if len(ends) < 2 or ends[-1] != 1.0 or any(before >= end for before, end in pairwise(ends)):
            raise UsageError(f"{where}: phases must end at growing shares of the work, the last at 1, got {ends[1:]}.")
        if any(not 1 / _LONGEST_S <= phase.work_per_s < math.inf for phase in self.phases):
            raise UsageError(f"{where}: its work must take more than 0 s and at most {_LONGEST_S:g} s.")

    @property
    def duration_s(self) -> float:
        """Its duration on the GPUs it asks for, undisturbed."""
        ends = [0.0, *(phase.until for phase in self.phases)]
        return sum(
            (end - begin) / phase.work_per_s for (begin, end), phase in zip(pairwise(ends), self.phases, strict=True)
        )

    @property
    def most_gpus(self) -> int:
        """The most GPUs it can use."""
        return self.max_gpus or self.gpus

    def speed_on(self, gpus: int) -> float:
        """Samples per second on this many GPUs, relative to the number it asks for.

        Between measured numbers the logarithm of the speed is interpolated; beyond them, and without measurements, it
        grows with the number of GPUs to the power of 0.9.
        """
        if gpus == self.gpus:
            return 1.0
        return self._log_speed(gpus) / self._log_speed(self.gpus)

    def _log_speed(self, gpus: int) -> float:
        # Steps of twice as many GPUs hold twice as many samples.
        known = [(count, count * steps_per_s) for count, steps_per_s in self.scaling] or [(1, 1.0)]
        least, most = known[0], known[-1]
        for (few, slow), (many, fast) in pairwise(known):
            if few <= gpus <= many:
                along = math.log(gpus / few) / math.log(many / few)
                return math.exp(math.log(slow) + along * math.log(fast / slow))
        count, speed = least if gpus < least[0] else most
        return speed * (gpus / count) ** 0.9
