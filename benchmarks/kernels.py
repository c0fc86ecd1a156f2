"""What kernels cost: quantizers beside a plain copy, top-k, adacomp and sketch beside torch.topk, PowerSGD.

    python -m benchmarks.kernels [--device cuda] [--elements 5000000] [--only int8]

One float32 gradient of one parameter, one CPU thread. Times are medians: of the processor's time in that thread, so
that other work on the machine hardly shows; on a GPU of the device's, with the host kept ahead of it. "with host" is
how long one call takes by the clock when nothing else is going on. "of copy" is the bytes that encode + decode read and
write each second (values and packed bytes, each twice) as a share of what a copy of the gradient moves in that time; "x
reference" is how much faster the fused kernels are than plain torch; "extra" is the most memory an encode needs beyond
its input, payload included, as a share of the input.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from laconic.architecture.all_reduce import Everyone
from laconic.compression import (
    AdaComp,
    Bf16,
    Compressor,
    EfSignSgd,
    Fp8,
    Fp16,
    Int4,
    Int8,
    IntSgd,
    Natural,
    NuqSgd,
    OneBit,
    PowerSgd,
    Qsgd,
    SignSgd,
    Sketch,
    TernGrad,
    Thc,
)
from laconic.compression.families.quantizer import Quantizer
from laconic.compression.kernels import count_sketch, rotated_grid, shared_grid
from laconic.compression.kernels.approximate_topk import approximate_topk
from laconic.compression.kernels.bins import take_reaching
from laconic.compression.kernels.lanes import new_numbers, pack, unpack
from laconic.compression.kernels.loader import has_faster
from laconic.compression.kernels.quantizers import decode, encode
from laconic.compression.kernels.reference import approximate_topk as approximate_topk_reference
from laconic.compression.kernels.reference import lowrank as lowrank_reference
from laconic.compression.kernels.reference import topk as topk_reference
from laconic.compression.kernels.rotation import sums_of_squares
from laconic.compression.kernels.shared_grid import Grid
from laconic.compression.kernels.topk import topk_indices
from laconic.compression.wire.chunks import Chunks
from laconic.compression.wire.lanes import Lanes
from laconic.compression.wire.rotation import Rotation
from laconic.core.in_process import InProcessCluster
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.core.transport import DoneWork, Work


@dataclass(frozen=True)
class Trial:
    """One method on one gradient: what is timed."""

    encode: Callable[[], object]
    decode: Callable[[], object]
    wire_bytes: int
    reference: Callable[[], object] | None = None
    """Encode and decode without fused kernels, where there is such a thing."""


@dataclass(frozen=True)
class Case:
    """A row of the table; add one for a method of another family."""

    label: str
    prepare: Callable[[torch.Tensor], Trial]


def plain(compressor: Compressor) -> Case:
    """Any compressor with one payload."""

    def prepare(flat: torch.Tensor) -> Trial:
        state, out = _state(compressor, flat), torch.empty_like(flat)
        payload = compressor.encode(flat, state)
        return Trial(
            lambda: compressor.encode(flat, state), lambda: compressor.decode(payload, out, state), payload.nbytes
        )

    return Case(str(compressor), prepare)


def quantizer(method: Quantizer) -> Case:
    """A quantizer, and the same through the reference."""

    def prepare(flat: torch.Tensor) -> Trial:
        state, out = _state(method, flat), torch.empty_like(flat)
        chunks, packed = method.chunks(state), method.pack(flat, state)

        def reference() -> None:
            again = encode(method.encoder, flat, chunks, 1, reference=True, **method.encoder_settings())
            # pyrefly: ignore[bad-argument-type]  # no setting of a kernel is called add
            decode(method.decoder, again, chunks, out, reference=True, **method.decoder_settings())

        return Trial(
            lambda: method.pack(flat, state), lambda: method.unpack(packed, out, state), packed.nbytes, reference
        )

    return Case(str(method), prepare)


def on_grid(method: IntSgd) -> Case:
    """Whole numbers that are added up, of four ranks: codes and words, and the same through the reference."""

    def prepare(flat: torch.Tensor) -> Trial:
        bucket, out = Bucket((TensorSpec.of("weight", flat),)), torch.empty_like(flat)
        chunks, lanes = Chunks(bucket, 4096, 8, 0), Lanes(flat.numel(), 2 * method.largest, 4)
        units = torch.full((chunks.num_chunks,), 1.0 / method.largest, device=flat.device)
        grid = Grid(units, torch.zeros_like(units), -method.largest, 2 * method.largest)

        def coded(*, reference: bool = False) -> torch.Tensor:
            numbers = new_numbers(lanes, grid.dtype, flat.device)
            shared_grid.encode(flat, chunks, grid, 1, numbers[: flat.numel()], reference=reference)
            return pack(lanes, numbers, reference=reference)

        def decoded(words: torch.Tensor, *, reference: bool = False) -> None:
            sums = unpack(lanes, words, reference=reference)
            shared_grid.decode(sums, 4, chunks, grid, out, reference=reference)

        words = coded()
        return Trial(
            coded, lambda: decoded(words), words.nbytes, lambda: decoded(coded(reference=True), reference=True)
        )

    return Case(str(method), prepare)


def rotated(method: Thc, world_size: int) -> Case:
    """Rotated blocks as whole numbers that are added up, and the same through the reference."""

    def prepare(flat: torch.Tensor) -> Trial:
        bucket, out = Bucket((TensorSpec.of("weight", flat),)), torch.empty_like(flat)
        rotation, lanes = Rotation(bucket, method.block), Lanes(flat.numel(), method.levels, world_size)
        reach = torch.full((rotation.num_chunks,), method.clip, device=flat.device)
        grid = Grid(2 * reach / method.levels, reach, 0, method.levels)

        def coded(*, reference: bool = False) -> torch.Tensor:
            sums_of_squares(flat, rotation, reference=reference)
            codes = new_numbers(lanes, grid.dtype, flat.device)
            rotated_grid.encode(flat, rotation, 1, grid, 1, codes=codes[: flat.numel()], reference=reference)
            return pack(lanes, codes, reference=reference)

        def decoded(words: torch.Tensor, *, reference: bool = False) -> None:
            sums = unpack(lanes, words, reference=reference)
            rotated_grid.decode(sums, world_size, rotation, 1, grid, out=out, reference=reference)

        words = coded()
        return Trial(
            coded, lambda: decoded(words), words.nbytes, lambda: decoded(coded(reference=True), reference=True)
        )

    return Case(f"{method}, {world_size} ranks", prepare)


def _state(compressor: Compressor, flat: torch.Tensor) -> BucketState:
    state = compressor.init(Bucket((TensorSpec.of("weight", flat),)))
    state.moment = Moment(1, 0, 4)
    return state


CASES = [
    plain(Fp16()),
    plain(Fp16(rounding="stochastic")),
    plain(Bf16(rounding="stochastic")),
    quantizer(Fp8()),
    quantizer(Fp8(rounding="stochastic")),
    quantizer(Int8()),
    quantizer(Int8(rounding="stochastic")),
    quantizer(Int4()),
    quantizer(Int4(rounding="stochastic")),
    quantizer(Qsgd(levels=1)),
    quantizer(Qsgd()),
    quantizer(Qsgd(levels=15)),
    quantizer(Qsgd(levels=127)),
    quantizer(NuqSgd()),
    on_grid(IntSgd()),
    rotated(Thc(), 4),
    rotated(Thc(), 8),
    quantizer(TernGrad()),
    quantizer(Natural()),
    quantizer(SignSgd()),
    quantizer(EfSignSgd()),
    quantizer(OneBit()),
]


def median_s(run: Callable[[], object], device: str, repeats: int) -> float:
    """Seconds one run takes: the median, after one that does not count; of the device or processor alone."""
    run()
    times = []
    if device == "cuda":
        for _ in range(repeats):
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # While the device sleeps the host gets ahead, so that launching is not measured.
            torch.cuda._sleep(2_000_000)
            began.record()
            run()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / 1e3)
        return statistics.median(times)
    for _ in range(repeats):
        began_s = time.thread_time()
        run()
        times.append(time.thread_time() - began_s)
    return statistics.median(times)


def extra_bytes(case: Case, trial: Trial, options: argparse.Namespace) -> int | None:
    """The most memory an encode needs beyond its input; None where that cannot be found out."""
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trial.encode()
        return torch.cuda.max_memory_allocated() - before
    if sys.platform != "linux":
        return None
    # In a new process: memory that an earlier row has freed would serve again, and nothing would be seen.
    settings = ["--elements", str(options.elements), "--memory-of", case.label]
    command = [sys.executable, "-m", "benchmarks.kernels", *settings]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_extra_bytes(case: Case, elements: int) -> None:
    """The same, here: how far the process grows when it first encodes, as the kernel counts."""
    case.prepare(torch.randn(1000))
    flat = torch.randn(elements)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = _status_kib("VmRSS")
    # Its output is made too but not written to, so it takes no memory yet.
    case.prepare(flat)
    print(1024 * (_status_kib("VmHWM") - before))


def _status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def with_host_s(run: Callable[[], object], device: str) -> float:
    """Seconds from the call until the device has nothing left to do: the median."""
    times = []
    for _ in range(15):
        began_s = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def row(case: Case, flat: torch.Tensor, copy_s: float, options: argparse.Namespace) -> str:
    trial, device = case.prepare(flat), options.device
    encode_s, decode_s = median_s(trial.encode, device, 15), median_s(trial.decode, device, 15)
    both_s = encode_s + decode_s
    reference = "        -"
    if trial.reference is not None:
        reference = f"{median_s(trial.reference, device, 3) / both_s:9.1f}"
    extra = extra_bytes(case, trial, options)
    moved_share = (flat.nbytes + trial.wire_bytes) / flat.nbytes * copy_s / both_s
    return (
        f"{case.label:28} {encode_s * 1e3:9.4f} {decode_s * 1e3:9.4f} {flat.nbytes / both_s / 1e9:8.2f} "
        f"{flat.nbytes / trial.wire_bytes:8.2f} {moved_share:8.2f} {reference}   "
        f"{'-' if extra is None else f'{extra / flat.nbytes:6.2f}'}"
    )


def print_largest(flat: torch.Tensor, device: str) -> None:
    """The k largest magnitudes, exactly and about, and other selections, beside torch.topk on the magnitudes."""
    k = math.ceil(0.01 * flat.numel())
    assert torch.equal(topk_indices(flat, k), topk_reference.topk_indices(flat, k))
    theirs_s = median_s(lambda: torch.topk(flat.abs(), k), device, 15)
    largest: dict[str, Callable[[], object]] = {
        "torch.topk(values.abs(), k)": lambda: torch.topk(flat.abs(), k),
        "exact (topk, gtopk, dgc)": lambda: topk_indices(flat, k),
        "exact, plain torch": lambda: topk_reference.topk_indices(flat, k),
        "estimated (sidco)": lambda: approximate_topk(flat, k, 1),
        "estimated, plain torch": lambda: approximate_topk_reference.approximate_topk(flat, k, 1),
    }
    others = selections(flat, "", reference=False) | selections(flat, ", plain torch", reference=True)
    for title, runs in {"1% largest magnitudes": largest, "other work before entries are sent": others}.items():
        print(f"\n{title:34}    ms with host  x torch.topk")
        for label, run in runs.items():
            taken_s = median_s(run, device, 15)
            taken_ms, by_clock_ms = taken_s * 1e3, with_host_s(run, device) * 1e3
            print(f"{label:30} {taken_ms:9.4f} {by_clock_ms:9.4f} {theirs_s / taken_s:13.1f}", flush=True)


def selections(flat: torch.Tensor, suffix: str, *, reference: bool) -> dict[str, Callable[[], object]]:
    """What `adacomp` and `sketch` do before entries are sent."""
    bins, residual = Chunks(Bucket((TensorSpec.of("weight", flat),)), AdaComp().bin, 8, 0), torch.zeros_like(flat)
    # Not the same gradient again and again, under which all residuals would grow and many entries be sent.
    gradients = itertools.cycle([flat.roll(997 * turn) for turn in range(8)])
    columns, seeds = round(Sketch().width * flat.numel()), torch.arange(Sketch().rows, device=flat.device)
    cells = count_sketch.sketched(flat, seeds, columns, reference=reference)
    return {
        f"adacomp{suffix}": lambda: take_reaching(next(gradients), residual, bins, reference=reference),
        f"sketch, cells{suffix}": lambda: count_sketch.sketched(flat, seeds, columns, reference=reference),
        f"sketch, estimates{suffix}": lambda: count_sketch.estimated(cells, seeds, len(flat), reference=reference),
    }


class _Alone(Everyone):
    """A group of one rank: its sums are there at once."""

    def sum(self, tensors: tuple[torch.Tensor, ...]) -> Work:
        return DoneWork()


def print_powersgd(flat: torch.Tensor, device: str) -> None:
    """A whole exchange with nobody: P = orth(M Q), Q = M^T P, decoded = P Q^T."""
    side, method = math.isqrt(flat.numel()), PowerSgd(rank=4)
    matrix = flat[: side * side].clone().view(side, side)
    state = method.init(Bucket((TensorSpec.of("weight", matrix),)))
    group = _Alone(InProcessCluster(1).transport(0), "a bucket")
    q = state.whole["powersgd.q"]["weight"].clone()
    p, noise = matrix.new_empty(side, 4), torch.rand(side, 4, device=matrix.device)

    def exchange() -> None:
        for work in method.exchange(matrix.view(-1), state, group):
            work.wait()

    def plain_torch() -> None:
        lowrank_reference.times_right(matrix, q, p)
        basis = lowrank_reference.orthonormal(p.unsqueeze(0), noise).squeeze(0)
        lowrank_reference.times_left(matrix, basis, q)
        lowrank_reference.product(basis, q, matrix)

    print(f"\n{f'{side} x {side}':28}        ms with host")
    for label, run in {"powersgd(rank=4)": exchange, "plain torch": plain_torch}.items():
        print(f"{label:28} {median_s(run, device, 15) * 1e3:9.4f} {with_host_s(run, device) * 1e3:9.4f}")


def gradient(elements: int) -> torch.Tensor:
    """Values of mixed magnitudes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(elements, generator=generator) * torch.rand(elements, generator=generator) ** 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--elements", type=int, default=None, help="5 million on a CPU, 25 million on a GPU")
    parser.add_argument("--only", default="", help="rows whose label holds this text")
    parser.add_argument("--memory-of", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.elements = options.elements or {"cpu": 5_000_000, "cuda": 25_000_000}[options.device]
    torch.set_num_threads(1)
    if options.memory_of:
        print_extra_bytes(next(case for case in CASES if case.label == options.memory_of), options.elements)
        return
    flat = gradient(options.elements).to(options.device)
    copy = torch.empty_like(flat)
    copy_s = median_s(lambda: copy.copy_(flat), options.device, 30)
    fused = "fused kernels" if has_faster("quantizers", options.device) else "no fused kernels here: plain torch"
    print(f"{options.elements / 1e6:g} M float32 values, {options.device}, {fused}; a copy takes {copy_s * 1e3:.4f} ms")
    print(f"{'method':28} encode ms decode ms    GB/s  smaller  of copy x reference  extra")
    for case in CASES:
        if options.only in case.label:
            print(row(case, flat, copy_s, options), flush=True)
    if options.only in "topk sidco adacomp sketch":
        print_largest(flat, options.device)
    if options.only in "powersgd":
        print_powersgd(flat, options.device)


if __name__ == "__main__":
    main()
