"""How much more a compressor costs a larger model, from the strategies that were trained with models of two sizes.

    gap(N) = gap(n) + growth * share * ln(N / n)

growth   of such a strategy: the gap of GPT-2 less that of the smaller model after as many steps, or after the nearest
         number of steps that was measured, per unit of the logarithm of size. The mean is used, and the largest for
         the upper end of a range. Beyond the largest model that was trained, gaps are taken to grow no further.
share    of a compressor: its relative squared error on normally distributed values, at most 1, where 1 stands for the
         least error with which a gap grew by more than seeds differ; only strategies with such errors count for the
         growth. So what rounds little (int8) does not cost a larger model what coarse compressors do. The share is 1
         where errors depend on the magnitude of gradients (threshold).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import lru_cache

import torch

from laconic.architecture.all_reduce import Everyone
from laconic.compression import Compressor
from laconic.core.in_process import InProcessCluster
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.core.transport import Transport
from laconic.losses.measured import CELLS, OTHER_RUNS, Measured, gap_after
from laconic.losses.steps_needed import measured_runs
from laconic.strategy import Strategy

_SIDE = 64
"""Rows and columns of the matrix whose error is taken."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What a gap grows by, with a compressor whose share is 1."""

    mean: float
    """Per unit of the logarithm of size."""
    most: float
    coarse: float
    """The relative error from which on the share is 1."""
    largest: int
    """Parameters of the largest model that was trained."""


def growth_of(compression: Compressor, trained: int, num_parameters: int) -> tuple[float, float]:
    """What the gap of a model of `trained` parameters grows by up to a model of `num_parameters`: mean and most."""
    if compression.traits.lossless:
        return 0.0, 0.0
    found, share = growth(), share_of(compression)
    sizes = math.log(max(1.0, min(num_parameters, found.largest) / trained))
    return found.mean * share * sizes, found.most * share * sizes


def share_of(compression: Compressor) -> float:
    """How coarse a compressor is, between 0 and 1."""
    return min(1.0, relative_error(compression) / growth().coarse)


@lru_cache(maxsize=1)
def growth() -> Growth:
    """From all strategies that were trained with the largest model and with a smaller one."""
    largest = max(run.num_parameters for run in (*CELLS, *OTHER_RUNS))
    pairs = [
        _Pair.of(run, smaller, relative_error(strategy.compression))
        for run in (*CELLS, *OTHER_RUNS)
        if run.num_parameters == largest
        for strategy in [Strategy.parse(run.text)]
        if (smaller := [other for other in measured_runs(strategy) if other.num_parameters < largest])
    ]
    coarse = min(pair.error for pair in pairs if pair.grew > pair.deviation)
    rates = [pair.grew / pair.sizes for pair in pairs if pair.error >= coarse]
    return Growth(mean=statistics.fmean(rates), most=max(rates), coarse=coarse, largest=largest)


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """One strategy, trained with models of two sizes."""

    grew: float
    """The gap of the larger model less that of the smaller."""
    deviation: float
    """Of both, between seeds."""
    sizes: float
    """The logarithm of the ratio of sizes."""
    error: float

    @classmethod
    def of(cls, run: Measured, smaller: list[Measured], error: float) -> _Pair:
        """From the run of the larger model and those of smaller ones, of which the largest counts."""
        size = max(other.num_parameters for other in smaller)
        runs = [other for other in smaller if other.num_parameters == size]
        return cls(
            grew=run.loss_gap - max(0.0, gap_after(run.steps, runs)),
            deviation=math.hypot(run.noise, max(other.noise for other in runs)),
            sizes=math.log(run.num_parameters / size),
            error=error,
        )


@lru_cache(maxsize=256)
def relative_error(compression: Compressor) -> float:
    """The squared norm of what the exchange of one rank leaves out, relative to that of its input."""
    if not compression.traits.scale_equivariant:
        return 1.0
    values = torch.randn(_SIDE * _SIDE, generator=torch.Generator().manual_seed(0))

    def exchanged(transport: Transport) -> torch.Tensor:
        state = compression.init(Bucket((TensorSpec("weight", (_SIDE, _SIDE), torch.float32),)))
        state.moment = Moment.steady(1)
        flat = values.clone()
        for work in compression.exchange(flat, state, Everyone(transport, "a bucket")):
            work.wait()
        return flat

    (found,) = InProcessCluster(1).run(exchanged)
    return float((found - values).square().sum() / values.square().sum())
