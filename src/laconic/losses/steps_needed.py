"""The number of steps that a strategy needs for bsp's loss, from losses measured at equal steps.

Without compression the loss falls as a power of the number of steps, so a gap in loss can be expressed in steps:

    L(n) = C n^-p,    loss = (1 + gap) L(n)    =>    steps needed = (1 + gap)^(1/p) n

    p    0.21 between 384 and 2048 steps, 0.15 between 2048 and 4096, 0.08 between 4096 and 8192

p differs between these segments of the curve. The range covers up to three values of p: that of the segment that ends
at the length of a run (or at the nearest end of a segment), that of the segment that begins there, and that of the
segment after it, as far as they exist. The range also covers one standard deviation between seeds, and all lengths at
which a method was measured. A gap of at most 1% that seeds do not tell apart from zero counts as none; a larger gap
counts even if seeds differ more, because a large spread is no sign of a small gap. A negative gap counts as zero, as no
method here is known to learn more from a step than bsp does; the lower end of the range still shows it. If only the
parts of a combination were measured, their product is taken, and the result says so.

The figure is that of the longest run of the largest model that is no larger than the one in question.

All figures are those of losses/measured.py. Neither they nor the range say how a method fares with more workers, in a
large model or in a run of weeks; losses/at_scale.py covers that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from laconic.compression import COMPRESSORS, Compressor, Wrapper
from laconic.losses.measured import (
    BASELINE,
    CELLS,
    COMPRESSION_STEPS,
    COMPRESSIONS,
    LATER_CELLS,
    OTHER_RUNS,
    SMALL,
    Measured,
    in_words,
)
from laconic.strategy import Strategy

_CELLS = (*CELLS, *LATER_CELLS)
BSP_STEPS = 1000
"""The target loss is that of bsp after this many steps."""
_SMALL_GAP = 0.01
"""A larger gap does not count as the same loss, even if seeds differ more than that."""

_ABOUT = 1.1
"""Sizes of models are rounded: one that is larger by less is of the same size."""


@dataclass(frozen=True, kw_only=True)
class StepsNeeded:
    """Steps to the same loss, as a multiple of bsp's."""

    ratio: float
    low: float
    high: float
    loss_gap: float
    """The share by which the loss ends above that of bsp at equal steps, in the longest run."""
    is_distinct: bool
    """Whether seeds tell that gap apart from zero."""
    because: str
    """The measurements, in words."""
    is_product: bool = False
    """Whether only the parts of the strategy were measured."""

    @property
    def likely(self) -> float:
        """The ratio, or 1 where the gap is small and seeds do not tell it apart from zero."""
        return self.ratio if self.is_distinct or self.loss_gap > _SMALL_GAP else 1.0

    def seconds(self, step_s: float) -> tuple[float, float, float]:
        """The time to bsp's loss after BSP_STEPS steps, and its range."""
        return self.ratio * step_s * BSP_STEPS, self.low * step_s * BSP_STEPS, self.high * step_s * BSP_STEPS

    def times(self, other: StepsNeeded) -> StepsNeeded:
        """The product of both, on the assumption that they are independent."""
        return StepsNeeded(
            ratio=self.ratio * other.ratio,
            low=self.low * other.low,
            high=self.high * other.high,
            loss_gap=(1 + max(0.0, self.loss_gap)) * (1 + max(0.0, other.loss_gap)) - 1,
            is_distinct=self.is_distinct or other.is_distinct,
            because=f"{self.because}; {other.because}; measured apart, their product was not measured",
            is_product=True,
        )


_SAME_SUMS = ("all_reduce", "parameter_server", "sharded")
"""Architectures that form the same sums of gradients as torch DDP or FSDP2, whatever their other settings."""
SAME = StepsNeeded(
    ratio=1.0, low=1.0, high=1.0, loss_gap=0.0, is_distinct=False, because="computes the same as bsp with an all-reduce"
)


def steps_needed(strategy: Strategy, num_parameters: int = SMALL) -> StepsNeeded | None:
    """The steps that a model of this size needs with the strategy; None if that was not measured."""
    when, where = str(strategy.synchronization), _where(strategy)
    if strategy.compression.traits.lossless and _sums_as_bsp(strategy):
        return SAME
    if whole := _steps(measured_runs(strategy), num_parameters):
        return whole
    code = _steps(_compression(strategy.compression), num_parameters)
    cell = _steps(_of(_CELLS, f"{when} / {where} / none"), num_parameters)
    if (when, where) == ("bsp", "parameter_server"):
        cell = SAME
    return None if cell is None or code is None else cell.times(code)


def only_compresses(strategy: Strategy) -> bool:
    """Whether the strategy computes the same as bsp, but for a lossy compressor."""
    return not strategy.compression.traits.lossless and _sums_as_bsp(strategy)


def _sums_as_bsp(strategy: Strategy) -> bool:
    return str(strategy.synchronization) == "bsp" and _where(strategy) in _SAME_SUMS


def measured_runs(strategy: Strategy) -> tuple[Measured, ...]:
    """All runs of the whole strategy, of models of any size."""
    when, where, compression = str(strategy.synchronization), _where(strategy), strategy.compression
    what = "none" if compression.traits.lossless else str(compression)
    whole = _of((*_CELLS, *OTHER_RUNS), f"{when} / {where} / {what}")
    return (*whole, *(_compression(compression) if (when, where) == ("bsp", "all_reduce") else ()))


def _where(strategy: Strategy) -> str:
    """The architecture without settings that do not affect results: how a sum is formed, and where servers are."""
    architecture = strategy.architecture
    if architecture.compresses_sums() and not strategy.compression.traits.lossless:
        return str(architecture)  # lossy sums depend on where they are formed
    defaults = {field.name: field.default for field in fields(architecture) if field.name in architecture.only_speed}
    return str(replace(architecture, **defaults))


def _of(measured: tuple[Measured, ...], text: str) -> tuple[Measured, ...]:
    return tuple(found for found in measured if found.text == text)


def _compression(compression: Compressor) -> tuple[Measured, ...]:
    """The measurements of a compressor, with default or other settings."""
    text = str(compression)
    declared = tuple(
        Measured(text, COMPRESSION_STEPS, method.traits.loss_gap, deviation=method.traits.loss_deviation)
        for method in (kind() for kind in COMPRESSORS if not issubclass(kind, Wrapper))
        if method.traits.loss_gap is not None
        and text == f"{method.name}{' + error_feedback' if method.traits.wants_error_feedback else ''}"
    )
    return _of(COMPRESSIONS, text) or declared


def _steps(measured: Sequence[Measured], num_parameters: int) -> StepsNeeded | None:
    """The result from all lengths measured with models up to this size; the longest is the closest to real training."""
    if not measured:
        return None
    largest = max(num_parameters, min(found.num_parameters for found in measured))
    runs = [found for found in measured if found.num_parameters <= _ABOUT * largest]
    longest = max(runs, key=lambda found: (found.num_parameters, found.steps))
    possible = [
        (1 + found.loss_gap + error) ** (1 / power)
        for found in runs
        for error in (-found.noise, found.noise)
        for power in _powers_around(found.steps)
    ]
    return StepsNeeded(
        ratio=(1 + max(0.0, longest.loss_gap)) ** (1 / _power(longest.steps)),
        low=min(possible),
        high=max(1.0, *possible),
        loss_gap=longest.loss_gap,
        is_distinct=longest.is_distinct,
        because=f"{longest.text}: loss {in_words(runs)}",
    )


def _powers() -> list[float]:
    """The p of each segment of the baseline's curve."""
    return [
        math.log(before / after) / math.log(steps / first) for (first, before), (steps, after) in pairwise(BASELINE)
    ]


def _powers_around(steps: int) -> list[float]:
    """The p of the segments before and after `steps` and of one more, as far as there are any."""
    place = min(range(len(BASELINE)), key=lambda index: abs(BASELINE[index][0] - steps))
    return _powers()[max(0, place - 1) : place + 2]


def _power(steps: int) -> float:
    """The p of the segment that holds `steps`; after the last segment, that of the last."""
    ends = [end for end, _ in BASELINE[1:]]
    return next((power for end, power in zip(ends, _powers(), strict=True) if steps < end), _powers()[-1])
