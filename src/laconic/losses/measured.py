"""Losses at equal steps compared with bsp and an all-reduce, from this project's runs; tests check them against docs.

All figures are those of docs/results/convergence.md for text: the tiny GPT, 4 workers, nothing tuned for a method;
those with another number of parameters are of docs/results/time_to_loss.md, each method with its
learning rate from one grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BASELINE: tuple[tuple[int, float], ...] = ((384, 2.4434), (2048, 1.7097), (4096, 1.5461), (8192, 1.4665))
"""Steps, and the loss of bsp with an all-reduce after them, with the first seed: longer runs have no other."""
DEVIATION_RATIO = 0.019
"""Standard deviation of the baseline's loss after 384 steps between seeds, relative to that loss. It stands for the
deviation of a gap that was measured with one seed and the tiny GPT."""
_LARGER_DEVIATION_RATIO = 0.0146
"""The deviation of demo-int4's gap between seeds with the small GPT; it stands for that of larger models."""
COMPRESSION_STEPS = 300
"""Steps for which single compressors were trained; a warm-up of 75 of them is a quarter."""
TINY, SMALL, GPT2 = 120_000, 1_840_000, 124_000_000
"""Parameters of the models that were trained."""
_DISTINCT = 2.5
"""A gap of at least so many deviations is not chance: the t of two degrees of freedom (4.3 for 95%) / sqrt(3 seeds)."""


@dataclass(frozen=True)
class Measured:
    """One row of the tables."""

    text: str
    """Synchronization, architecture and compression; for a single compressor, only that."""
    steps: int
    loss_gap: float
    """0.02: the loss ended 2% above that of bsp with an all-reduce and without compression."""
    printed: str = ""
    """Its name in the table, where that is not `text`."""
    deviation: float | None = None
    """Standard deviation of the gaps of single seeds; None: one seed was trained."""
    num_parameters: int = TINY
    """Parameters of the model."""

    @property
    def noise(self) -> float:
        """The deviation, or a usual one if one seed was trained."""
        if self.deviation is not None:
            return self.deviation
        return DEVIATION_RATIO if self.num_parameters == TINY else _LARGER_DEVIATION_RATIO

    @property
    def is_distinct(self) -> bool:
        """Whether the gap differs from zero by more than three seeds differ by chance."""
        return abs(self.loss_gap) > _DISTINCT * self.noise

    @property
    def words(self) -> str:
        """E.g. "+11.6% after 384 steps (+-1.8% between seeds)"; with the model's size if it is not the tiny one."""
        spread = "" if self.deviation is None else f" (+-{self.deviation:.1%} between seeds)"
        return f"{self.loss_gap:+.1%} after {self.steps} steps{self.model}{spread}"

    @property
    def model(self) -> str:
        """The model in words, if it is not the tiny one."""
        return "" if self.num_parameters == TINY else f" with {self.num_parameters / 1e6:.3g} M parameters"


def in_words(runs: Sequence[Measured]) -> str:
    """The runs, smaller models and shorter runs first."""
    return ", ".join(run.words for run in sorted(runs, key=lambda run: (run.num_parameters, run.steps)))


def gap_after(steps: int, runs: Sequence[Measured]) -> float:
    """The gap after so many steps: between two measured lengths along the logarithm, else that of the nearest."""
    found = sorted((run.steps, run.loss_gap) for run in runs)
    lengths, gaps = [math.log(length) for length, _ in found], [gap for _, gap in found]
    return float(np.interp(math.log(steps), lengths, gaps))


CELLS: tuple[Measured, ...] = (
    *(
        Measured(text, 384, gap, deviation=deviation)
        for text, (gap, deviation) in {
            "bsp / parameter_server / none": (0.0, 0.0),
            "ssp / parameter_server / none": (0.093, 0.039),
            "asp / parameter_server / none": (0.141, 0.065),
            "local_sgd(period=8) / parameter_server / none": (0.081, 0.018),
            "local_sgd(period=8) / all_reduce / none": (0.081, 0.018),
            "local_sgd(period=8, post_local=96) / all_reduce / none": (0.043, 0.03),
            "slowmo(period=8) / all_reduce / none": (0.141, 0.03),
            "diloco / all_reduce / none": (0.142, 0.019),
            "streaming_diloco / all_reduce / none": (0.13, 0.016),
            "streaming_diloco / all_reduce / int4 + error_feedback": (0.116, 0.018),
            "diloco / all_reduce / topk(density=0.03) + chain(second=int4) + error_feedback": (0.425, 0.04),
            "decoupled_momentum / all_reduce / dct_topk": (0.126, 0.011),
            "demo / all_reduce / dct_topk": (-0.036, 0.023),
            "bsp / gossip / none": (0.036, 0.019),
            "bsp / gossip(topology=one_peer_exponential) / none": (0.054, 0.009),
            "bsp / push_sum / none": (0.054, 0.009),
            "bsp / choco / int8": (0.07, 0.012),
            "bsp / choco / topk(density=0.1)": (0.085, 0.022),
            "local_sgd(period=8) / gossip / none": (0.093, 0.023),
            "asp / gossip / none": (0.02, 0.028),
            "asp / choco / int8": (0.08, 0.023),
        }.items()
    ),
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
    # Local SGD continues from the undamped mean of all replicas without momentum.
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
        num_parameters=SMALL,
    ),
    Measured(
        "demo / all_reduce / dct_topk(density=0.0156) + chain(second=int4)",
        1500,
        0.0243,
        printed="demo / all_reduce / dct_topk(density=0.0156) + chain(int4)",
        deviation=0.0161,
        num_parameters=SMALL,
    ),
    Measured("demo / all_reduce / dct_cyclic", 1500, 0.0058, deviation=0.0148, num_parameters=SMALL),
    *(
        Measured(text, 1500, gap, printed=printed, deviation=deviation, num_parameters=SMALL)
        for text, printed, gap, deviation in (
            ("bsp / all_reduce / int4 + error_feedback", "", 0.0138, 0.0186),
            ("onebit_adam(first=int4) / all_reduce / onebit + error_feedback", "", 0.0251, 0.0297),
            ("local_sgd(period=8) / all_reduce / int4 + error_feedback", "", 0.0968, 0.0308),
            ("streaming_diloco(period=16) / all_reduce / int4 + error_feedback", "", 0.1432, 0.0235),
            (
                "decoupled_momentum(period=8, lr=1, beta=0.95) / all_reduce / topk(density=0.03125, chunk=4096) + "
                "chain(second=twobit)",
                "",
                0.1524,
                0.0293,
            ),
            ("bsp / all_reduce / powersgd + error_feedback", "powersgd", 0.0857, 0.0536),
        )
    ),
    Measured(
        "onebit_adam / all_reduce / onebit + error_feedback", 1000, 0.0122, printed="onebit-adam", deviation=0.0066
    ),
)
"""Synchronizations and architectures, some with a compressor; all but the first lines of the tables for text, and of
those of docs/results/time_to_loss.md that have several seeds. After 384 and 1500 steps there are three seeds each: the
change of the mean loss, and the standard deviation of the changes of single seeds."""

LATER_CELLS: tuple[Measured, ...] = tuple(
    Measured(text, 384, gap, deviation=deviation)
    for text, (gap, deviation) in {
        "lag / all_reduce / none": (0.0, 0.0),
        "adacomm / all_reduce / none": (0.1, 0.029),
        "delayed / all_reduce / none": (0.017, 0.022),
        "easgd / all_reduce / none": (0.106, 0.016),
        "fedprox / all_reduce / none": (0.1, 0.034),
        "scaffold / all_reduce / none": (0.103, 0.023),
        "dssp / parameter_server / none": (0.114, 0.067),
        "backup / parameter_server(shards=1) / none": (0.051, 0.02),
        "async_diloco / parameter_server / none": (0.277, 0.054),
        "noloco / gossip / none": (0.118, 0.013),
        "bsp / power_gossip / powersgd": (0.032, 0.01),
        "dion / all_reduce / powersgd": (0.127, 0.029),
        "des_loc / all_reduce / none": (0.101, 0.03),
        "zero_one_adam / all_reduce / onebit + error_feedback": (0.037, 0.018),
    }.items()
)
"""Synchronizations added later, with three seeds each: the change of the mean loss, and the standard deviation of the
changes of single seeds."""

OTHER_RUNS: tuple[Measured, ...] = (
    Measured(
        "demo / all_reduce / dct_topk(density=0.03125) + chain(second=int4)",
        600,
        0.0175,
        printed="demo-int4",
        num_parameters=GPT2,
    ),
    Measured(
        "demo / all_reduce / dct_topk(density=0.0156) + chain(second=int4)",
        600,
        0.0134,
        printed="demo / all_reduce / dct_topk(density=0.0156) + chain(int4)",
        num_parameters=GPT2,
    ),
    Measured("demo / all_reduce / dct_cyclic", 600, 0.0703, printed="demo-cyclic", num_parameters=GPT2),
    Measured(
        "onebit_adam(first=int4) / all_reduce / onebit + error_feedback",
        600,
        0.0729,
        printed="onebit_adam(first=int4)",
        num_parameters=GPT2,
    ),
    Measured("bsp / all_reduce / qsgd", 600, 0.046, num_parameters=GPT2),
    Measured("bsp / all_reduce / int8", 600, 0.0003, num_parameters=GPT2),
    Measured(
        "onebit_adam / all_reduce / onebit + error_feedback",
        600,
        0.0396,
        printed="onebit-adam",
        num_parameters=GPT2,
    ),
    Measured("onebit_adam / all_reduce / onebit + error_feedback", 300, 0.002),
)
"""Also from docs/results/time_to_loss.md, for questions about models of a given size: GPT-2 on a GPU, one seed each
(qsgd after 41 steps of DDP, int8 after 22), demo with the longest warm-up; onebit-adam after 300 steps."""

COMPRESSIONS: tuple[Measured, ...] = tuple(
    Measured(text, COMPRESSION_STEPS, gap, deviation=deviation)
    for text, (gap, deviation) in {
        "ef_signsgd": (0.101, 0.033),
        "ef_signsgd + error_feedback + warmup(steps=75)": (0.056, 0.022),
        "onebit + error_feedback + warmup(steps=75)": (0.058, 0.023),
        "powersgd(rank=16) + error_feedback": (-0.013, 0.013),
        "powersgd + error_feedback + warmup(steps=75)": (0.005, 0.004),
        "topk": (0.066, 0.039),
        "topk(density=0.1) + error_feedback": (0.084, 0.019),
        "topk + error_feedback + warmup(steps=75)": (0.056, 0.022),
        "topk(density=0.1) + error_feedback + warmup(steps=75)": (0.019, 0.012),
        "randomk(density=0.1) + error_feedback + warmup(steps=75)": (0.08, 0.033),
        "threshold(tau=0.0001) + error_feedback": (-0.004, 0.035),
        "dgc(density=0.01, warmup_steps=75)": (-0.06, 0.006),
        "sidco(density=0.1) + error_feedback + warmup(steps=75)": (0.02, 0.011),
        "gtopk(density=0.1) + error_feedback + warmup(steps=75)": (0.031, 0.011),
        "dct_topk + error_feedback + warmup(steps=75)": (0.058, 0.026),
    }.items()
)
"""Compressors of bsp with an all-reduce, with other settings than defaults, with three seeds each; for defaults,
methods declare loss_gap and loss_deviation."""
