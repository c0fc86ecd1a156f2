"""How many more steps a strategy needs for the loss that bsp has: from losses measured at equal steps.

Without compression the loss falls like a power of the number of steps, so a gap at equal steps is one in steps:

    L(n) = C n^-p,    loss = (1 + gap) L(n)    =>    steps needed = (1 + gap)^(1/p) n

    p    0.21 between 384 and 2048 steps, 0.15 between 2048 and 4096, 0.08 between 4096 and 8192

The range covers p before, after and soon after the length of a run, one standard deviation between seeds, and all
lengths at which a method was measured. A strategy whose range holds 1 counts as needing what bsp needs.
A combination of which only the parts were measured is taken as their product, and says so.

All figures are those of docs/results/convergence.md for text: the tiny GPT, 4 workers, nothing tuned for a method;
those after 1500 steps are of docs/results/time_to_loss.md: the small GPT, each method with its rate of one grid.
How a method fares with more workers, or in a run of weeks, is not in them, nor in the range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from laconic.compression import COMPRESSORS, Compressor, Wrapper
from laconic.strategy import Strategy

BASELINE: tuple[tuple[int, float], ...] = ((384, 2.4434), (2048, 1.7097), (4096, 1.5461), (8192, 1.4665))
"""Steps, and the loss of bsp with an all-reduce after them."""
DEVIATION_RATIO = 0.019
"""Standard deviation of that loss between seeds, relative to it."""
BSP_STEPS = 1000
"""The time to a target is that to the loss bsp has after so many steps."""
_COMPRESSION_STEPS = 300


@dataclass(frozen=True)
class Measured:
    """One row of the tables."""

    text: str
    """Synchronization, architecture and compression; of a compression by itself, that."""
    steps: int
    loss_gap: float
    """0.02: the loss ended 2% above that of bsp with an all-reduce and without compression."""
    printed: str = ""
    """What the table calls it, where that is not `text`."""
    deviation: float = DEVIATION_RATIO
    """Standard deviation of loss_gap between seeds."""


CELLS: tuple[Measured, ...] = (
    Measured("bsp / parameter_server / none", 384, 0.0),
    Measured("ssp / parameter_server / none", 384, 0.100),
    Measured("asp / parameter_server / none", 384, 0.109),
    Measured("local_sgd(period=8) / parameter_server / none", 384, 0.061),
    Measured("local_sgd(period=8) / all_reduce / none", 384, 0.061),
    Measured("local_sgd(period=8, post_local=96) / all_reduce / none", 384, 0.014),
    Measured("slowmo(period=8) / all_reduce / none", 384, 0.119),
    Measured("diloco / all_reduce / none", 384, 0.131),
    Measured("streaming_diloco / all_reduce / none", 384, 0.128),
    Measured("streaming_diloco / all_reduce / int4 + error_feedback", 384, 0.105),
    Measured("diloco / all_reduce / topk(density=0.03) + chain(second=int4) + error_feedback", 384, 0.380),
    Measured("decoupled_momentum / all_reduce / dct_topk", 384, 0.115),
    Measured("demo / all_reduce / dct_topk", 384, -0.060),
    Measured("bsp / gossip / none", 384, 0.018),
    Measured("bsp / gossip(topology=one_peer_exponential) / none", 384, 0.046),
    Measured("bsp / push_sum / none", 384, 0.046),
    Measured("bsp / choco / int8", 384, 0.056),
    Measured("bsp / choco / topk(density=0.1)", 384, 0.061),
    Measured("local_sgd(period=8) / gossip / none", 384, 0.070),
    Measured("asp / gossip / none", 384, 0.011),
    Measured("asp / choco / int8", 384, 0.060),
    Measured("diloco / all_reduce / none", 4096, 0.082),
    Measured("streaming_diloco / all_reduce / none", 4096, 0.074),
    Measured("streaming_diloco / all_reduce / int4 + error_feedback", 4096, 0.065),
    Measured("diloco / all_reduce / topk(density=0.03) + chain(second=int4) + error_feedback", 4096, 0.618),
    Measured(
        "local_sgd(post_local=512) / all_reduce / none", 2048, 0.089, printed="local_sgd(period=32, post_local=512)"
    ),
    Measured(
        "diloco(momentum=0.5) / all_reduce / none", 2048, 0.107, printed="diloco(period=32, lr=0.7, momentum=0.5)"
    ),
    Measured(
        "diloco(lr=1, momentum=0) / all_reduce / none", 2048, 0.143, printed="diloco(period=32, lr=1.0, momentum=0.0)"
    ),
    # The mean of all replicas, undamped and without momentum, is what local SGD goes on with.
    Measured("local_sgd / all_reduce / none", 2048, 0.143, printed="diloco(period=32, lr=1.0, momentum=0.0)"),
    Measured("diloco(lr=0.4) / all_reduce / none", 2048, 0.203, printed="diloco(period=32, lr=0.4, momentum=0.9)"),
    Measured(
        "diloco(lr=1, momentum=0.8) / all_reduce / none", 2048, 0.392, printed="diloco(period=32, lr=1.0, momentum=0.8)"
    ),
    Measured("slowmo / all_reduce / none", 2048, 0.404, printed="slowmo(period=32)"),
    Measured("diloco / all_reduce / none", 8192, 0.018, printed="diloco(period=32)"),
    Measured(
        "demo / all_reduce / dct_topk(density=0.03125) + chain(second=int4)",
        1500,
        -0.0036,
        printed="demo / all_reduce / dct_topk(density=0.03125) + chain(int4)",
        deviation=0.0146,
    ),
    Measured(
        "demo / all_reduce / dct_topk(density=0.0156) + chain(second=int4)",
        1500,
        0.0243,
        printed="demo / all_reduce / dct_topk(density=0.0156) + chain(int4)",
        deviation=0.0161,
    ),
)
"""When and with whom replicas agree, some with what they send; all but the first lines of the tables for text, and of
that for losses in docs/results/time_to_loss.md, which has several seeds."""

COMPRESSIONS: tuple[Measured, ...] = tuple(
    Measured(text, _COMPRESSION_STEPS, gap)
    for text, gap in {
        "ef_signsgd": 0.148,
        "ef_signsgd + error_feedback + warmup(steps=75)": 0.047,
        "onebit + error_feedback + warmup(steps=75)": 0.044,
        "powersgd(rank=16) + error_feedback": 0.057,
        "powersgd + error_feedback + warmup(steps=75)": 0.009,
        "topk": 0.091,
        "topk(density=0.1) + error_feedback": 0.105,
        "topk + error_feedback + warmup(steps=75)": 0.080,
        "topk(density=0.1) + error_feedback + warmup(steps=75)": 0.024,
        "randomk(density=0.1) + error_feedback + warmup(steps=75)": 0.104,
        "threshold(tau=0.0001) + error_feedback": 0.0,
        "dgc(density=0.01, warmup_steps=75)": -0.056,
        "sidco(density=0.1) + error_feedback + warmup(steps=75)": 0.026,
        "gtopk(density=0.1) + error_feedback + warmup(steps=75)": 0.031,
        "dct_topk + error_feedback + warmup(steps=75)": 0.085,
    }.items()
)
"""What bsp with an all-reduce sends, with other settings than defaults; for these, methods declare their loss_gap."""


@dataclass(frozen=True, kw_only=True)
class StepsNeeded:
    """For the same loss, as a multiple of the steps bsp takes."""

    ratio: float
    low: float
    high: float
    loss_gap: float
    """By which share the loss ends above that of bsp at equal steps, in the longest run that was made."""
    because: str
    """What was measured, in words."""
    is_product: bool = False
    """Whether only its parts were measured."""

    @property
    def likely(self) -> float:
        """The ratio, or 1 where what was measured does not tell them apart."""
        return 1.0 if self.low <= 1.0 <= self.high else self.ratio

    def seconds(self, step_s: float) -> tuple[float, float, float]:
        """The time to the loss bsp has after BSP_STEPS steps, and the range."""
        return self.ratio * step_s * BSP_STEPS, self.low * step_s * BSP_STEPS, self.high * step_s * BSP_STEPS

    def times(self, other: StepsNeeded) -> StepsNeeded:
        """Both together, if one does not touch what the other does."""
        return StepsNeeded(
            ratio=self.ratio * other.ratio,
            low=self.low * other.low,
            high=self.high * other.high,
            loss_gap=(1 + self.loss_gap) * (1 + other.loss_gap) - 1,
            because=f"{self.because}; {other.because}; measured apart, their product was not measured",
            is_product=True,
        )


SAME = StepsNeeded(ratio=1.0, low=1.0, high=1.0, loss_gap=0.0, because="computes what bsp with an all-reduce computes")


def steps_needed(strategy: Strategy) -> StepsNeeded | None:
    """What the strategy needs; None if that was not measured."""
    when, where = str(strategy.synchronization), _where(strategy)
    what = "none" if strategy.compression.traits.lossless else str(strategy.compression)
    if (when, what) == ("bsp", "none") and where in ("all_reduce", "parameter_server"):
        return SAME
    if whole := _steps(_of(CELLS, f"{when} / {where} / {what}")):
        return whole
    code = _steps(_compression(strategy.compression))
    if (when, where) == ("bsp", "all_reduce"):
        return code
    cell = SAME if (when, where) == ("bsp", "parameter_server") else _steps(_of(CELLS, f"{when} / {where} / none"))
    return None if cell is None or code is None else cell.times(code)


def _where(strategy: Strategy) -> str:
    """The architecture without what changes no result: how a sum is formed, and where servers are."""
    architecture = strategy.architecture
    if architecture.compresses_sums() and not strategy.compression.traits.lossless:
        return str(architecture)  # where something is lost depends on where it is added up
    defaults = {field.name: field.default for field in fields(architecture) if field.name in architecture.only_speed}
    return str(replace(architecture, **defaults))


def _of(measured: tuple[Measured, ...], text: str) -> tuple[Measured, ...]:
    return tuple(found for found in measured if found.text == text)


def _compression(compression: Compressor) -> tuple[Measured, ...]:
    """What was measured of a compression, with other settings than defaults or with them."""
    text = str(compression)
    declared = tuple(
        Measured(text, _COMPRESSION_STEPS, method.traits.loss_gap)
        for method in (kind() for kind in COMPRESSORS if not issubclass(kind, Wrapper))
        if method.traits.loss_gap is not None
        and text == f"{method.name}{' + error_feedback' if method.traits.wants_error_feedback else ''}"
    )
    return _of(COMPRESSIONS, text) or declared


def _steps(measured: tuple[Measured, ...]) -> StepsNeeded | None:
    """From all lengths at which it was measured; the longest is the nearest to what people train."""
    if not measured:
        return None
    longest = max(measured, key=lambda found: found.steps)
    possible = [
        (1 + found.loss_gap + error) ** (1 / power)
        for found in measured
        for error in (-found.deviation, found.deviation)
        for power in _powers_around(found.steps)
    ]
    told = [f"{found.loss_gap:+.1%} after {found.steps} steps" for found in measured]
    return StepsNeeded(
        ratio=(1 + longest.loss_gap) ** (1 / _power(longest.steps)),
        low=min(possible),
        high=max(possible),
        loss_gap=longest.loss_gap,
        because=f"{longest.text}: loss {', '.join(told)}",
    )


def _powers() -> list[float]:
    """The p of each stretch of the baseline's curve."""
    return [
        math.log(before / after) / math.log(steps / first) for (first, before), (steps, after) in pairwise(BASELINE)
    ]


def _powers_around(steps: int) -> list[float]:
    """The p before that length, after it, and of one stretch more, as far as there are any."""
    place = min(range(len(BASELINE)), key=lambda index: abs(BASELINE[index][0] - steps))
    return _powers()[max(0, place - 1) : place + 2]


def _power(steps: int) -> float:
    """The p from there on; after the last stretch, that of the last."""
    ends = [end for end, _ in BASELINE[1:]]
    return next((power for end, power in zip(ends, _powers(), strict=True) if steps < end), _powers()[-1])
