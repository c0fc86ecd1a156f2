"""The cost of a strategy in loss for a model of a given size, and the additional steps that make up for it.

    steps needed = (1 + gap)^(1/p)

gap   the share by which the loss ends above that of bsp at equal steps:
      - published laws for DiLoCo and its streaming form, for models they were fitted to (losses/published.py). The
        laws are about trainings with 20 tokens per parameter, which are long; a training of fewer steps than the
        longest measured here is taken to be a short one, for which they do not hold;
      - else the gap measured here, after as many steps and with a model of this size: between two measured lengths
        along the logarithm of steps, and between two sizes along that of size. How such gaps change with size differs:
        by the laws DiLoCo's shrink, while those of qsgd, demo and onebit_adam were larger for GPT-2 than for smaller
        models. So for a larger model the gap grows as theirs did (losses/growth.py), and the range reaches down to a
        gap that shrinks as DiLoCo's does.
      A negative gap counts as zero: no method here is known to learn more from a step than bsp does. Of a gap that
      seeds do not tell apart from zero, and that only a compressor causes, its share counts (losses/growth.py), so that
      chance does not make 16 bits cost more than 4.
p     how fast the loss falls with steps: 0.08 for the tiny GPT in its longest run, 0.042 for a model of 1e9 parameters
      (published), between them along the logarithm of size. In a longer run it is lower: the published run says by how
      much, and the range covers that factor both ways.

A compressor that works only between hosts gets the sums of hosts: each host counts as one worker with a larger batch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from laconic.losses.growth import growth_of, share_of
from laconic.losses.measured import BASELINE, COMPRESSION_STEPS, TINY, Measured, gap_after
from laconic.losses.published import (
    C4_PERIODS,
    DILOCO_LAWS,
    SMALLEST,
    diloco_gap,
    period_gap,
    powers,
    rounding_gap,
)
from laconic.losses.steps_needed import SAME, measured_runs, only_compresses, steps_needed
from laconic.strategy import Strategy
from laconic.units import human_count

Known = Literal["same", "measured", "published", "parts"]
"""same: computes the same as bsp. parts: only the parts of the strategy were measured, each by itself."""
_MEASURED_WORKERS = 4
_LIKE_PUBLISHED = ("diloco / all_reduce / none", "streaming_diloco / all_reduce / int4 + error_feedback")
"""Strategies in published tables, with any period within C4_PERIODS or shorter."""
_PUBLISHED_SIZE = 1e9
"""Parameters of the model with published losses at several lengths."""
_SAID_GROWTH = 0.0005
"""A smaller growth of a gap would be printed as 0.0."""
_REMEMBERED = 4096
"""Size of the cache of answers: a planner asks for each strategy repeatedly."""
_WARMUP = re.compile(r"warmup\(steps=(\d+)\)")
_WARMUP_SHARE = 0.25
"""The share of warm-up steps in the runs with a warm-up: 75 of 300."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The training whose loss is in question."""

    num_parameters: int
    workers: int
    hosts: int
    steps: int
    """Optimizer steps of the whole training."""


@dataclass(frozen=True, kw_only=True)
class LossCost:
    """The cost of a strategy in loss."""

    known: Known
    gap: float
    """The share by which the loss ends above that of bsp at equal steps."""
    gap_low: float
    gap_high: float
    ratio: float
    """Steps for bsp's loss, as a multiple of those bsp takes."""
    ratio_low: float
    ratio_high: float
    because: str
    """The sources of the figures, in words."""


@lru_cache(maxsize=_REMEMBERED)
def loss_cost(strategy: Strategy, scale: Scale) -> LossCost | None:
    """The cost, or None if nothing is known."""
    if steps_needed(strategy) is SAME:
        return _cost("same", 0.0, 0.0, 0.0, scale, because="computes the same as torch DDP")
    if (published := _published(strategy, scale)) is not None:
        return published
    as_measured = _among_hosts(strategy)
    runs = measured_runs(_with_warmup_as_measured(as_measured, scale))
    if runs:
        return _from_runs(as_measured, runs, scale, among_hosts=as_measured is not strategy)
    needed = steps_needed(as_measured)
    if needed is None or not needed.is_product:
        return None
    found = _cost("parts", needed.loss_gap, needed.loss_gap, needed.loss_gap, scale, because=needed.because)
    return replace(found, ratio_low=1.0)


def power_at(num_parameters: float) -> float:
    """The p of L(n) = C n^-p late in a run."""
    (steps, before), (longest, after) = BASELINE[-2:]
    small, large = math.log(before / after) / math.log(longest / steps), powers()[0]
    along = math.log(num_parameters / TINY) / math.log(_PUBLISHED_SIZE / TINY)
    return small + (large - small) * min(1.0, max(0.0, along))


def _cost(known: Known, gap: float, low: float, high: float, scale: Scale, *, because: str) -> LossCost:
    """The gaps converted to steps; negative gaps count as zero."""
    gap, low, high = (max(0.0, value) for value in (gap, low, high))
    first, later = powers()
    power, slower = power_at(scale.num_parameters), later / first
    return LossCost(
        known=known,
        gap=gap,
        gap_low=low,
        gap_high=high,
        ratio=(1 + gap) ** (1 / power),
        ratio_low=(1 + low) ** (slower / power),
        ratio_high=(1 + high) ** (1 / (slower * power)),
        because=because,
    )


# -- published -------------------------------------------------------------------------------------------------


def _published(strategy: Strategy, scale: Scale) -> LossCost | None:
    """The cost by the published laws, for their model sizes, outer settings, periods up to 100 and long trainings."""
    rule = strategy.synchronization
    period = rule.interval
    if scale.num_parameters < SMALLEST or period > C4_PERIODS[-1]:
        return None
    usual = replace(strategy, synchronization=type(rule)()) if set(rule.changed_settings()) <= {"period"} else strategy
    if str(usual).rpartition(" / ")[0] not in _LIKE_PUBLISHED:
        return None
    if scale.steps < max(run.steps for run in measured_runs(usual)):
        return None
    gap = diloco_gap(scale.num_parameters, scale.workers) + period_gap(period)
    error = rounding_gap(scale.num_parameters)
    because = (
        f"{gap:+.1%} for {human_count(scale.num_parameters)} parameters and {scale.workers} replicas by the published "
        f"scaling laws of DiLoCo, period {period} (arXiv:2503.09799, 2502.12996)"
    )
    if scale.workers > max(DILOCO_LAWS):
        because += f"; they were fitted to at most {max(DILOCO_LAWS)} replicas"
    return _cost("published", gap, gap - error, gap + error, scale, because=because)


# -- measured --------------------------------------------------------------------------------------------------


def _among_hosts(strategy: Strategy) -> Strategy:
    """The same strategy among all workers, if the compressor works only between hosts."""
    if not strategy.architecture.compresses_sums():
        return strategy
    return replace(strategy, architecture=type(strategy.architecture)())


def _with_warmup_as_measured(strategy: Strategy, scale: Scale) -> Strategy:
    """Map a warm-up of a quarter of the training to the measured one of a quarter of 300 steps."""
    text = str(strategy)
    found = _WARMUP.search(text)
    if found is None or int(found[1]) < _WARMUP_SHARE * scale.steps:
        return strategy
    steps = round(_WARMUP_SHARE * COMPRESSION_STEPS)
    return Strategy.parse(_WARMUP.sub(f"warmup(steps={steps})", text))


def _from_runs(strategy: Strategy, runs: tuple[Measured, ...], scale: Scale, *, among_hosts: bool) -> LossCost:
    """The cost from the runs of the models nearest in size, one on either side; the range covers all of these."""
    sizes = sorted({run.num_parameters for run in runs})
    here = min(max(scale.num_parameters, sizes[0]), sizes[-1])
    around = {max(size for size in sizes if size <= here), min(size for size in sizes if size >= here)}
    nearest = [run for run in runs if run.num_parameters in around]
    more, most = growth_of(strategy.compression, sizes[-1], scale.num_parameters)
    counted = [replace(run, loss_gap=_counted(run, strategy)) for run in runs]
    by_size = [[run for run in counted if run.num_parameters == size] for size in sizes]
    gaps = [gap_after(scale.steps, those) for those in by_size]
    gap = float(np.interp(math.log(here), [math.log(size) for size in sizes], gaps)) + more
    lows = [_shrunk(one, scale) - one.noise for one in nearest]
    highs = [max(0.0, one.loss_gap) + one.noise + most for one in nearest]
    told = [
        f"{one.loss_gap:+.1%} after {one.steps} steps of a model of {human_count(one.num_parameters)} parameters"
        for one in sorted(runs, key=lambda one: (one.num_parameters, one.steps))
    ]
    because = f"measured here with {_MEASURED_WORKERS} workers: {', '.join(told)}"
    if more >= _SAID_GROWTH:
        because += f"; {more * 100:.1f} percentage points are added, as other compressors cost a larger model more"
    if among_hosts:
        because += "; between hosts it is the same with so many workers as there are hosts"
    return _cost("measured", gap, min(lows), max(highs), scale, because=because)


def _counted(run: Measured, strategy: Strategy) -> float:
    """The part of a measured gap that counts."""
    share = share_of(strategy.compression) if only_compresses(strategy) and not run.is_distinct else 1.0
    return max(0.0, run.loss_gap) * share


def _shrunk(run: Measured, scale: Scale) -> float:
    """The gap if it shrinks with size as DiLoCo's does."""
    if run.loss_gap <= 0 or scale.num_parameters <= run.num_parameters:
        return run.loss_gap
    there, here = (diloco_gap(size, _MEASURED_WORKERS) for size in (scale.num_parameters, run.num_parameters))
    return run.loss_gap * max(0.0, there / here)
