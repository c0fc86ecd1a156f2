"""Jobs whose batch grows while they train, so that their speed changes.

    accordion   the starting batch in the first share of the work, then the largest that was measured
    gns         the starting batch in that share, then doubled at equal intervals of the rest, up to the largest

A batch that was not measured is left out. Larger batches take fewer steps for the same samples.

References: Accordion (Agarwal et al. 2021, arXiv:2010.16248); gradient noise scale (McCandlish et al. 2018,
arXiv:1812.06162).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from laconic.jobs.job import Phase

Growth = Literal["static", "accordion", "gns"]
GROWTHS: tuple[Growth, ...] = ("static", "accordion", "gns")
DEFAULT_FIRST = 0.3
"""Share of the work at the starting batch: assumed, as traces do not tell when batches grow."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The facts that a rule of batch growth may use."""

    growth: Growth
    model: str
    """The name of the model, without its batch size."""
    batch: int
    """The batch size at the beginning."""
    gpus: int
    samples: float
    """Samples of the whole training."""
    measured: Sequence[int]
    """Batches whose speed is known, small ones first; the one at the beginning is among them."""


class Rule(Protocol):
    """When a batch grows."""

    def __call__(self, training: Training, /) -> Sequence[tuple[float, int]]:
        """(share of the work that is done, batch until then); the last share is 1."""
        ...


@dataclass(frozen=True)
class AfterShare:
    """The batch grows after the same share of the work in every job."""

    first: float = DEFAULT_FIRST

    def __call__(self, training: Training, /) -> Sequence[tuple[float, int]]:
        larger = [other for other in training.measured if other > training.batch]
        if training.growth == "static" or not larger or self.first >= 1:
            return [(1.0, training.batch)]
        if training.growth == "accordion":
            return [(self.first, training.batch), (1.0, larger[-1])]
        part = (1 - self.first) / len(larger)
        ends = [self.first + part * (place + 1) for place in range(len(larger))]
        return [(self.first, training.batch), *zip([*ends[:-1], 1.0], larger, strict=True)]


def phases(rule: Rule, training: Training, steps_per_s: Sequence[float]) -> tuple[Phase, ...]:
    """The phases of a job; steps_per_s: by measured batch."""
    speeds = dict(zip(training.measured, steps_per_s, strict=True))
    return tuple(
        Phase(until=until, work_per_s=speeds[size] * size / training.samples, steps_per_s=speeds[size])
        for until, size in rule(training)
        if until > 0
    )
