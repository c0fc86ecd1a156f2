"""What packing and unpacking cost: each method's kernels beside the plain torch reference and beside a plain copy.

    python -m benchmarks.kernels [--device cuda] [--elements 5000000] [--only int8]

One float32 gradient of one parameter, one CPU thread. Times are medians; "x copy" is encode + decode beside copying the
same gradient, "x reference" how much faster the fused kernels are than plain torch. "extra" is the most memory an
encode needs beyond its input, payload included, as a share of the input.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from laconic.compression import (
    Bf16,
    Compressor,
    EfSignSgd,
    Fp8,
    Fp16,
    Int4,
    Int8,
    Natural,
    OneBit,
    Qsgd,
    SignSgd,
    TernGrad,
    kernels,
)
from laconic.compression.kernels.quantizer import Quantizer
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec


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
            again = kernels.encode(method.encoder, flat, chunks, 1, backend="reference", **method.encoder_settings())
            kernels.decode(method.decoder, again, chunks, out, backend="reference", **method.decoder_settings())

        return Trial(
            lambda: method.pack(flat, state), lambda: method.unpack(packed, out, state), packed.nbytes, reference
        )

    return Case(str(method), prepare)


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
    quantizer(TernGrad()),
    quantizer(Natural()),
    quantizer(SignSgd()),
    quantizer(EfSignSgd()),
    quantizer(OneBit()),
]


def median_s(run: Callable[[], object], device: str, repeats: int) -> float:
    """Seconds one run takes: the median, after one that does not count; on a GPU, of the device alone."""
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
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
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
    command = [
        sys.executable,
        "-m",
        "benchmarks.kernels",
        "--elements",
        str(options.elements),
        "--memory-of",
        case.label,
    ]
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


def row(case: Case, flat: torch.Tensor, copy_s: float, options: argparse.Namespace) -> str:
    trial, device = case.prepare(flat), options.device
    encode_s, decode_s = median_s(trial.encode, device, 15), median_s(trial.decode, device, 15)
    both_s = encode_s + decode_s
    reference = "        -"
    if trial.reference is not None:
        reference = f"{median_s(trial.reference, device, 3) / both_s:9.1f}"
    extra = extra_bytes(case, trial, options)
    return (
        f"{case.label:28} {encode_s * 1e3:8.2f} {decode_s * 1e3:8.2f} {flat.nbytes / both_s / 1e9:8.2f} "
        f"{flat.nbytes / trial.wire_bytes:8.2f} {both_s / copy_s:8.1f} {reference}   "
        f"{'-' if extra is None else f'{extra / flat.nbytes:6.2f}'}"
    )


def gradient(elements: int) -> torch.Tensor:
    """Values of mixed magnitudes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(elements, generator=generator) * torch.rand(elements, generator=generator) ** 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--elements", type=int, default=5_000_000)
    parser.add_argument("--only", default="", help="rows whose label holds this text")
    parser.add_argument("--memory-of", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        print_extra_bytes(next(case for case in CASES if case.label == options.memory_of), options.elements)
        return
    flat = gradient(options.elements).to(options.device)
    copy = torch.empty_like(flat)
    copy_s = median_s(lambda: copy.copy_(flat), options.device, 30)
    fused = "fused kernels" if kernels.has_fused(options.device) else "no fused kernels here: plain torch"
    print(f"{options.elements / 1e6:g} M float32 values, {options.device}, {fused}; a copy takes {copy_s * 1e3:.2f} ms")
    print(f"{'method':28} encode ms decode ms    GB/s  smaller   x copy x reference  extra")
    for case in CASES:
        if options.only in case.label:
            print(row(case, flat, copy_s, options))


if __name__ == "__main__":
    main()
