"""How fast the k largest magnitudes are found on a CPU, and how well thresholds without a sort come near k.

    python -m benchmarks.topk [--numel 5000000]

First the exact kernels beside torch.topk; then three published estimates of the threshold, written as their papers do:
how long one takes, how many entries pass it for every one that was wanted, and how much of the energy (sum of squares)
of the exact top-k those hold.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch

from laconic.compression.kernels.numba_cpu import topk as topk_numba
from laconic.compression.kernels.reference import topk as topk_reference

Estimator = Callable[[torch.Tensor, int], torch.Tensor]


def gaussiank(values: torch.Tensor, k: int) -> torch.Tensor:
    """Quantile of a fitted normal, then up to four corrections by half (Shi et al. 2019, arXiv:1911.08772)."""
    density = k / values.numel()
    quantile = math.sqrt(2) * float(torch.erfinv(torch.tensor(1 - density, dtype=torch.float64)))
    magnitudes = values.abs()
    threshold = float(values.mean().abs() + values.std() * quantile)
    for _ in range(4):
        count = int((magnitudes > threshold).sum())
        if count < 2 * k / 3:
            threshold *= 0.5
        elif count > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return (magnitudes > threshold).nonzero().view(-1)


def sidco(values: torch.Tensor, k: int) -> torch.Tensor:
    """Exponential fitted to what exceeds the previous threshold, a quarter each (arXiv:2101.10761)."""
    magnitudes = values.abs()
    places: torch.Tensor | None = None
    threshold, left = 0.0, values.numel()
    remaining = magnitudes
    while left > k:
        share = max(0.25, k / left)
        threshold += float(remaining.mean() - threshold) * math.log(1 / share)
        kept = (remaining > threshold).nonzero().view(-1)
        remaining = remaining[kept]
        places = kept if places is None else places[kept]
        if share > 0.25 or remaining.numel() in (0, left):
            break
        left = remaining.numel()
    assert places is not None
    return places


def mstopk(values: torch.Tensor, k: int, *, rounds: int = 25) -> torch.Tensor:
    """Bisection between mean and largest; what lies between the last two bounds fills up to k (arXiv:2010.10458)."""
    magnitudes = values.abs()
    mean, largest = float(magnitudes.mean()), float(magnitudes.max())
    low, high = 0.0, 1.0
    above, below, fewest, most = largest, 0.0, 0, values.numel()
    for _ in range(rounds):
        ratio = (low + high) / 2
        threshold = mean + ratio * (largest - mean)
        count = int((magnitudes >= threshold).sum())
        if count <= k:
            high = ratio
            if count > fewest:
                above, fewest = threshold, count
        else:
            low = ratio
            if count < most:
                below, most = threshold, count
    certain = (magnitudes >= above).nonzero().view(-1) if fewest else torch.empty(0, dtype=torch.int64)
    between = ((magnitudes >= below) & (magnitudes < above)).nonzero().view(-1)
    return torch.cat((certain, between[: k - certain.numel()]))


def gradients(numel: int) -> dict[str, torch.Tensor]:
    """Values as gradients look: light and heavy tails, layers of unlike scale in one tensor, rows that are zero."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(numel, generator=generator)
    uniform = torch.rand(numel, generator=generator)
    scales = 10 ** (3 * torch.rand(64, generator=generator) - 3)
    rows = torch.rand(numel // 64 + 1, generator=generator) < 0.05
    return {
        "normal": normal,
        "Laplace": normal.sign() * -uniform.log(),
        "Student t, 3 degrees": normal / (torch.randn(3, numel, generator=generator).square().mean(0).sqrt()),
        "64 layers of unlike scale": normal * scales.repeat_interleave(numel // 64 + 1)[:numel],
        "95% rows of zeros": normal * rows.repeat_interleave(64)[:numel],
    }


def milliseconds(function: Callable[[], object], runs: int = 7) -> float:
    """The median of several runs after one that does not count."""
    function()
    times = []
    for _ in range(runs):
        began_s = time.perf_counter()
        function()
        times.append(time.perf_counter() - began_s)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=5_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    inputs = gradients(options.numel)
    print(f"exact top-k of {options.numel} float32 values, one thread, milliseconds")
    for name, values in inputs.items():
        for density in (0.001, 0.01, 0.1):
            k = math.ceil(density * options.numel)
            assert torch.equal(topk_numba.topk_indices(values, k), topk_reference.topk_indices(values, k))
            theirs = milliseconds(lambda values=values, k=k: torch.topk(values.abs(), k), 3)
            ours = milliseconds(lambda values=values, k=k: topk_numba.topk_indices(values, k))
            print(f"  {name:27} {density:6.1%}  torch.topk {theirs:6.1f}  numba {ours:5.1f}  {theirs / ours:5.1f} x")
    estimators: dict[str, Estimator] = {"gaussiank": gaussiank, "sidco": sidco, "mstopk": mstopk}
    print(
        "threshold estimates: milliseconds, entries passed per entry wanted, energy held per energy of the exact top-k"
    )
    for name, values in inputs.items():
        for density in (0.001, 0.01, 0.1):
            k = math.ceil(density * options.numel)
            exact = float(values[topk_numba.topk_indices(values, k)].square().sum())
            line = f"  {name:27} {density:6.1%}"
            for title, estimate in estimators.items():
                places = estimate(values, k)
                spent = milliseconds(lambda values=values, k=k, estimate=estimate: estimate(values, k), 3)
                held = float(values[places].square().sum()) / exact
                line += f"   {title} {spent:6.1f} {places.numel() / k:6.2f} {held:5.2f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
