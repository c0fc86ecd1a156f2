"""Published losses of DiLoCo compared with data-parallel training: by model size, number of replicas and period.

    data-parallel      L(N) = 18.129 N^-0.0953
    DiLoCo, M = 2      L(N) = 18.768 N^-0.0969        and so on; other M: 19.226 N^-0.0985 M^0.0116

N parameters, M replicas that exchange every 30 steps, the compute-optimal number of tokens (Chinchilla), C4.

Sources: Charles et al. 2025 (Scaling Laws for DiLoCo), arXiv:2503.09799, Tables 7 and 10 (loss); Kale et al. 2025
(Eager Updates), arXiv:2502.12996, Table 6; Douillard et al. 2025 (Streaming DiLoCo), arXiv:2501.18512, Tables 1 and 5.
"""

from __future__ import annotations

import math

DATA_PARALLEL_LAW = (18.129, -0.0953)
"""A and alpha in L(N) = A N^alpha."""
DILOCO_LAWS = {
    1: (18.363, -0.0961),
    2: (18.768, -0.0969),
    4: (19.762, -0.0992),
    8: (21.051, -0.1018),
}
"""A and alpha by M; arXiv:2503.09799, Table 7."""
DILOCO_JOINT_LAW = (19.226, -0.0985, 0.0116)
"""A, alpha and beta in L(N, M) = A N^alpha M^beta; Table 10."""
LAW_PERIOD = 30
"""Steps between two rounds."""
SMALLEST, LARGEST = 35_000_000, 10_000_000_000
"""Models that the laws were fitted to, and the largest that they were checked with."""

C4_LOSSES = {
    35_000_000: (3.51, 3.54, 3.53, 3.56),
    100_000_000: (3.19, 3.21, 3.21, 3.22),
    200_000_000: (2.97, 2.98, 2.98, 3.00),
    300_000_000: (2.80, 2.81, 2.81, 2.83),
    500_000_000: (2.67, 2.68, 2.67, 2.69),
    1_000_000_000: (2.49, 2.49, 2.48, 2.50),
}
"""Parameters -> loss of data-parallel training, of DiLoCo every 30 steps, and of its streaming form in 4 bits,
overlapped with one step, every 30 and every 100 steps; two replicas. arXiv:2502.12996, Table 6."""
C4_PERIODS = (30, 100)
_DIGIT = 0.005
"""The rounding error of losses printed with two digits."""

TOKENS_AND_LOSS = ((25e9, 2.67), (100e9, 2.52), (250e9, 2.45))
"""Tokens and loss of data-parallel training of a model of 1e9 parameters on Dolma; arXiv:2501.18512, Table 1."""


def diloco_gap(num_parameters: float, replicas: int) -> float:
    """The share by which DiLoCo's loss ends above that of data-parallel training, every 30 steps, by the laws."""
    scale, power = DATA_PARALLEL_LAW
    plain = scale * num_parameters**power
    if replicas in DILOCO_LAWS:
        scale, power = DILOCO_LAWS[replicas]
        return scale * num_parameters**power / plain - 1
    scale, power, of_replicas = DILOCO_JOINT_LAW
    return scale * num_parameters**power * replicas**of_replicas / plain - 1


def period_gap(period: int) -> float:
    """The increase of DiLoCo's gap with a period longer than 30 steps, from that at 100 steps, averaged over sizes.

    The gap is assumed to grow with the logarithm of the period; shorter periods are not counted as better.
    """
    first, last = C4_PERIODS
    added = [(hundred - thirty) / plain for plain, _, thirty, hundred in C4_LOSSES.values()]
    return max(0.0, math.log(period / first) / math.log(last / first)) * sum(added) / len(added)


def rounding_gap(num_parameters: float) -> float:
    """The error of a published gap due to losses printed with two digits."""
    nearest = min(C4_LOSSES, key=lambda size: abs(math.log(size / num_parameters)))
    return 2 * _DIGIT / C4_LOSSES[nearest][0]


def powers() -> tuple[float, float]:
    """The p of L(tokens) = C tokens^-p between the lengths of one run and the next: first, then later."""
    (first, before), (second, middle), (third, after) = TOKENS_AND_LOSS
    return (
        math.log(before / middle) / math.log(second / first),
        math.log(middle / after) / math.log(third / second),
    )
