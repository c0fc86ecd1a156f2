"""Measures the cost of a compressor on a device: random gradients of several sizes, and a line fitted to the times.

    t(M) = a + b M,   a, b >= 0,   with the least sum of squares of (t(M) - measured) / measured

Errors are relative, because otherwise the largest bucket would dominate and a would be undetermined.

A method whose payloads can be decoded alone is timed by its `encode` and `decode`. A method with several rounds makes
its whole exchange with a simulated rank that has the same gradient and answers at once: the time before the last round
is encoding, the time after it is decoding, and rounds themselves do not count.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from laconic.compression import Compressor
from laconic.core.clock import Clock
from laconic.core.exchange import Exchange
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.core.transport import DoneWork, Work
from laconic.errors import UsageError
from laconic.units import KIB, MIB, human_bytes
from laconic.workload import CodecCost
from laconic.workload.device_time import DeviceTime, Mark

SIZES_BYTES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
"""Sizes of the buckets, uncompressed: powers of two, so that a nearly square matrix has exactly that size."""
GPU_SIZES_BYTES = (*SIZES_BYTES, 64 * MIB, 256 * MIB)
"""Sizes for a GPU: below these, every size takes the same time, which would not give a cost per byte."""
_REPEATS = 11
_WARMUP_REPEATS = 3
"""Runs during which kernels are compiled."""
_WORLD_SIZE = 2
_SHORTEST_S = 1e-9
"""The value for times below the clock's resolution."""


@dataclass(frozen=True)
class Trial:
    """The times of one bucket: medians."""

    nbytes: int
    encode_s: float
    decode_s: float


def measured_codec(
    compressor: Compressor,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    sizes_bytes: Sequence[int] | None = None,
    clock: Clock | None = None,
) -> CodecCost:
    """Time the compressor on gradients of these sizes, or of the device's default sizes, and fit the line."""
    if dtype not in compressor.traits.dtypes:
        raise UsageError(f"{compressor} cannot carry gradients of {str(dtype).removeprefix('torch.')}.")
    device = torch.device(device)
    timer = DeviceTime(device, clock)
    sizes_bytes = sizes_bytes or (GPU_SIZES_BYTES if device.type == "cuda" else SIZES_BYTES)
    trials = [_trial(compressor, _gradient(nbytes, device, dtype), timer) for nbytes in sizes_bytes]
    encode, encode_error = line([(trial.nbytes, trial.encode_s) for trial in trials])
    decode, decode_error = line([(trial.nbytes, trial.decode_s) for trial in trials])
    return CodecCost(
        compressor=str(compressor),
        encode_startup_s=encode[0],
        encode_byte_s=encode[1],
        decode_startup_s=decode[0],
        decode_byte_s=decode[1],
        source=(
            f"Measured on {timer.in_words}, torch {torch.__version__.partition('+')[0]}, random gradients of "
            f"{human_bytes(sizes_bytes[0])} to {human_bytes(sizes_bytes[-1])} in {str(dtype).removeprefix('torch.')}; "
            f"the line is within {encode_error:.0%} of the measured encoding and within {decode_error:.0%} of decoding."
        ),
    )


def line(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], float]:
    """Start-up a and slope b of the line through (bytes, seconds), and its largest relative error."""
    points = [(x, max(t, _SHORTEST_S)) for x, t in points]
    weights = [t**-2 for _, t in points]

    def summed(term: Callable[[float, float], float]) -> float:
        return math.fsum(weight * term(x, t) for weight, (x, t) in zip(weights, points, strict=True))

    ones, xs, xxs = summed(lambda x, t: 1.0), summed(lambda x, t: x), summed(lambda x, t: x * x)
    ts, xts = summed(lambda x, t: t), summed(lambda x, t: x * t)
    spread = ones * xxs - xs * xs
    b = (ones * xts - xs * ts) / spread if spread > 0 else 0.0
    a = (ts - b * xs) / ones
    if b < 0:
        a, b = ts / ones, 0.0
    elif a < 0:
        a, b = 0.0, xts / xxs
    return (a, b), max(abs(a + b * x - t) / t for x, t in points)


def _gradient(nbytes: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A matrix, as square as its size allows."""
    numel = nbytes // dtype.itemsize
    rows = 2 ** (int(math.log2(numel)) // 2)
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(rows, numel // rows, generator=generator, device=device).to(dtype)


def _trial(compressor: Compressor, gradient: torch.Tensor, timer: DeviceTime) -> Trial:
    state = compressor.init(Bucket((TensorSpec.of("weight", gradient),)))
    state.moment = Moment.steady(_WORLD_SIZE)
    once = _payload if compressor.traits.decodes_alone else _exchange
    flat = gradient.flatten()
    taken: list[tuple[list[tuple[Mark, Mark]], tuple[Mark, Mark]]] = []
    for _ in range(_WARMUP_REPEATS + _REPEATS):
        # The bucket holds the decoded values; encoding them again would not be the same work.
        flat.copy_(gradient.view(-1))
        timer.settle()
        taken.append(once(compressor, flat, state, timer))
    timer.settle()
    counted = taken[_WARMUP_REPEATS:]
    return Trial(
        flat.nbytes,
        statistics.median(math.fsum(timer.between_s(*part) for part in encoding) for encoding, _ in counted),
        statistics.median(timer.between_s(*decoding) for _, decoding in counted),
    )


def _payload(
    compressor: Compressor, flat: torch.Tensor, state: BucketState, timer: DeviceTime
) -> tuple[list[tuple[Mark, Mark]], tuple[Mark, Mark]]:
    """The start and end times of encoding and decoding."""
    began = timer.mark()
    payload = compressor.encode(flat, state)
    encoded = timer.mark()
    timer.settle()
    again = timer.mark()
    compressor.decode(payload, flat, state)
    return [(began, encoded)], (again, timer.mark())


def _exchange(
    compressor: Compressor, flat: torch.Tensor, state: BucketState, timer: DeviceTime
) -> tuple[list[tuple[Mark, Mark]], tuple[Mark, Mark]]:
    """The times of an exchange before its last round, and after it."""
    parts: list[tuple[Mark, Mark]] = []
    exchange = compressor.exchange(flat, state, _Echo())
    while True:
        timer.settle()
        began = timer.mark()
        work = next(exchange, None)
        parts.append((began, timer.mark()))
        if work is None:
            return parts[:-1], parts[-1]
        work.wait()


class _Echo:
    """A Group of two whose other rank has the same data and answers at once, without taking time here."""

    size = _WORLD_SIZE
    rank = 0

    def sum(self, tensors: tuple[torch.Tensor, ...]) -> Work:
        """Leaves the tensor unchanged: decoding it costs the same as decoding a sum."""
        return DoneWork()

    def summed(self, tensors: tuple[torch.Tensor, ...]) -> Exchange:
        yield self.sum(tensors)

    def gather(self, tensor: torch.Tensor) -> tuple[Work, torch.Tensor]:
        rows = tensor.new_empty((self.size, *tensor.shape))
        return _Fill(rows, tensor), rows

    def scatter(self, rows: torch.Tensor) -> tuple[Work, torch.Tensor]:
        received = torch.empty_like(rows)
        return _Fill(received, rows[self.rank]), received

    def scatter_uneven(
        self, messages: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> tuple[Work, list[torch.Tensor]]:
        return DoneWork(), [messages[self.rank]] * self.size

    def swap(self, send: torch.Tensor | None, receive: torch.Tensor | None, peer: int) -> Work:
        return DoneWork() if send is None or receive is None else _Fill(receive, send)


class _Fill(DoneWork):
    """Fills in the answer during the wait."""

    def __init__(self, answer: torch.Tensor, sent: torch.Tensor) -> None:
        self._answer = answer
        self._sent = sent

    def wait(self) -> None:
        """Answers with the tensor that was sent."""
        self._answer.copy_(self._sent)
