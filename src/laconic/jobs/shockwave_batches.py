"""When the batches of the published run grow: rules in epochs, as its training scripts hold them.

    accordion   the largest batch, except in the critical epochs of a model and in the first 30% of all epochs
    gns         doubled after given epochs of each model, starting batch and number of GPUs

Both look at the end of an epoch and change the batch of the next one. A transformer's batch never grows, nor does a
batch beyond the largest that a V100 holds.

Source: github.com/uw-mad-dash/shockwave (MIT), accordion_workloads, gns_workloads and scheduler/utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from laconic.errors import UsageError, one_line
from laconic.jobs.batch_growth import Training

SAMPLES = {"ResNet-18": 50_000, "ResNet-50": 100_000, "Transformer": 10_000, "LM": 59_675, "Recommendation": 117_907}
"""In one epoch: CIFAR-10, a part of ImageNet, Multi30k, WikiText-2, MovieLens-20M."""
_LARGEST = {"ResNet-18": 256, "ResNet-50": 128, "LM": 80, "Recommendation": 8192}
_CRITICAL_SHARE = 0.3
_DOUBLES: dict[tuple[str, int], dict[int, tuple[int, ...]]] = {
    ("ResNet-18", 1): {16: (31, 41, 51, 71), 32: (21, 31, 51), 64: (11, 31), 128: (11,)},
    ("ResNet-18", 2): {16: (21, 31, 91, 111), 32: (11, 21, 41), 64: (21, 41), 128: (41,)},
    ("ResNet-18", 4): {16: (11, 21, 81, 91), 32: (21, 31, 61), 64: (11, 61), 128: (11,)},
    ("ResNet-50", 1): {64: (101,)},
    ("ResNet-50", 2): {32: (101, 111), 64: (81,)},
    ("ResNet-50", 4): {32: (131, 221), 64: (191,)},
    ("LM", 1): {5: (31, 41, 61, 71), 10: (11, 21, 41), 20: (11, 41), 40: (11,)},
    ("LM", 2): {5: (31, 51, 61, 71), 10: (11, 31, 41), 20: (31, 41), 40: (11,)},
    ("LM", 4): {5: (11, 31, 71, 91), 10: (11, 31, 61), 20: (11, 61), 40: (61,)},
    ("Recommendation", 1): {512: (21, 41, 71, 91), 1024: (21, 51, 91), 2048: (21, 41), 4096: (41,)},
}
"""By model and GPUs, then by starting batch: the epochs at whose beginning the batch doubles."""


def by_epochs(training: Training, /) -> Sequence[tuple[float, int]]:
    """The batch of every epoch of a job, as a rule of growth."""
    if training.model not in SAMPLES:
        raise UsageError(
            f"{one_line(training.model, 60)} is not among the models of the published run: {', '.join(SAMPLES)}."
        )
    epochs = training.samples / SAMPLES[training.model]
    sizes = _batches(training, math.ceil(epochs))
    found: list[tuple[float, int]] = []
    before = 0
    for size, same in groupby(sizes):
        before += len(list(same))
        found.append((before / epochs, size))
    return [*found[:-1], (1.0, found[-1][1])]


def _batches(training: Training, epochs: int) -> list[int]:
    """The batch of every epoch."""
    model, batch = training.model, training.batch
    most = _LARGEST.get(model, batch)
    if training.growth == "static" or most not in training.measured:
        return [batch] * epochs
    if training.growth == "gns":
        doubles = _DOUBLES.get((model, training.gpus), {}).get(batch, ())
        return [min(most, batch * 2 ** sum(epoch >= begin for begin in doubles)) for epoch in range(epochs)]
    found = [batch]
    for ended in range(epochs - 1):
        found.append(batch if _is_critical(model, batch, ended, epochs) else most)
    return found


def _is_critical(model: str, batch: int, epoch: int, epochs: int) -> bool:
    """Whether gradients change too much for large batches."""
    if epoch < round(_CRITICAL_SHARE * epochs):
        return True
    if model == "ResNet-50":
        return epoch % 30 < 10
    if model == "ResNet-18":
        return epoch < (20 if batch == 256 else 10) or 150 <= epoch < 160 or 250 <= epoch < 260
    if model == "Recommendation":
        return epoch < {512: 30, 1024: 30, 2048: 40}.get(batch, 10)
    return epoch < 10
