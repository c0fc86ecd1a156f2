"""The costs of strategies for a job under contention: bytes, encoding and decoding time, steps to the same loss.

Bytes are those that a Strategy declares, the time of encoding is predicted as by `laconic plan` for a V100, and steps
follow from the losses that this package knows. A strategy whose loss is not known is never chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from laconic.core.tensor import TensorSpec
from laconic.jobs.contention import Options
from laconic.jobs.job import Job
from laconic.losses import Scale, loss_cost
from laconic.prices.codec_costs import codec_cost
from laconic.strategy import Strategy, as_strategy
from laconic.workload.devices import DEVICES

CANDIDATES = (
    "ddp",
    "ddp-bf16",
    "bsp / all_reduce / int8",
    "bsp / all_reduce / int4 + error_feedback",
    "powersgd",
    "topk-int8-ef",
    "diloco",
    "streaming-diloco-int4",
)
"""Strategies that may be chosen, where their loss is known."""
_DEVICE = "v100"
_SIDE = 1024
"""Gradients are taken to be square matrices of this size, the last one smaller."""
_ITEM_BYTES = 4


@dataclass(frozen=True)
class Price:
    """The cost of one strategy for one job."""

    strategy: str
    bytes_ratio: float
    """Bytes sent per step, compared with plain DDP."""
    steps_ratio: float
    """Steps to the same loss, compared with plain DDP."""
    codec_s: float
    """Encoding and decoding in each step."""


class StrategyPrices:
    """Prices by job, each computed once."""

    def __init__(self, candidates: Sequence[str] = CANDIDATES) -> None:
        self._candidates = tuple(candidates)
        self._known: dict[tuple[str, int, int], Price | None] = {}

    def options(self, jobs: Sequence[Job], *, choose: bool) -> tuple[Options, list[list[str]]]:
        """The options of each of these jobs, and their names; the first is the job's own strategy.

        choose: whether strategies other than the job's own are offered.
        """
        prices = [self._of(job, choose=choose) for job in jobs]
        most = max(map(len, prices), default=1)
        padded = [[*row, *[row[0]] * (most - len(row))] for row in prices]
        arrays = [
            np.array([[getattr(price, key) for price in row] for row in padded], dtype=np.float64).reshape(-1, most)
            for key in ("bytes_ratio", "steps_ratio", "codec_s")
        ]
        return Options(*arrays), [[price.strategy for price in row] for row in padded]

    def _of(self, job: Job, *, choose: bool) -> list[Price]:
        assert job.traffic is not None, "only jobs that are known to send something are priced"
        own = job.traffic.strategy
        nbytes, workers = round(job.traffic.gradient_bytes), max(2, job.gpus)
        first = self._price(own, nbytes, workers)
        if first is None:
            # Its loss in steps is unknown, so no other strategy can be compared with it.
            return [Price(own, _bytes_ratio(as_strategy(own), nbytes, workers), 1.0, 0.0)]
        others = [self._price(text, nbytes, workers) for text in self._candidates if choose and text != own]
        # The trace counts steps of the job as it is.
        return [
            replace(price, steps_ratio=price.steps_ratio / first.steps_ratio)
            for price in (first, *others)
            if price is not None
        ]

    def _price(self, text: str, nbytes: int, workers: int) -> Price | None:
        key = (text, nbytes, workers)
        if key not in self._known:
            self._known[key] = self._priced(text, nbytes, workers)
        return self._known[key]

    def _priced(self, text: str, nbytes: int, workers: int) -> Price | None:
        strategy = as_strategy(text)
        scale = Scale(num_parameters=max(1, nbytes // _ITEM_BYTES), workers=workers, hosts=workers, steps=100_000)
        loss = loss_cost(strategy, scale)
        if loss is None or loss.known == "parts":
            return None
        return Price(text, _bytes_ratio(strategy, nbytes, workers), loss.ratio, _codec_s(strategy, nbytes))


def _bytes_ratio(strategy: Strategy, nbytes: int, workers: int) -> float:
    """Bytes sent per step, compared with plain DDP."""
    tensors = _tensors(nbytes)
    if not tensors:
        return 1.0
    plain = as_strategy("ddp").wire_bytes_per_step(tensors, workers)
    return strategy.wire_bytes_per_step(tensors, workers) / plain


def _tensors(nbytes: int) -> list[TensorSpec]:
    count, whole = nbytes // _ITEM_BYTES, _SIDE * _SIDE
    shapes = [(_SIDE, _SIDE)] * (count // whole)
    if rest := count % whole:
        shapes.append((1, rest))
    return [TensorSpec(f"gradient{place}", shape) for place, shape in enumerate(shapes)]


def _codec_s(strategy: Strategy, nbytes: int) -> float:
    """Encoding and decoding time per step; lossless strategies need none, and local steps encode rarely."""
    if strategy.compression.traits.lossless:
        return 0.0
    cost = codec_cost(strategy.compression, DEVICES[_DEVICE])
    if cost is None:
        return 0.0
    once_s = cost.encode_startup_s + cost.decode_startup_s + nbytes * (cost.encode_byte_s + cost.decode_byte_s)
    return once_s * strategy.synchronization.rounds_per_step("")
