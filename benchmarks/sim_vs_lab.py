"""Does the simulator say what the lab measures? Probe the lab's links, predict, then replay on them.

    python -m benchmarks.sim_vs_lab [--bandwidths 100mbit 200mbit 400mbit] [--steps 10] [--compute 0.8s] [--json FILE]

For each bandwidth four virtual hosts are probed (`laconic probe`), which gives a cluster with measured curves. From
that and the workload alone the step time of every strategy is predicted; then all of them take turns in a replay on the
same links. Workloads are known models with every tensor a fraction of its size, so that links are slow and processors
idle: what is compared is communication and its overlap, not how fast this machine computes.

Printed are all rows, the median and the largest error, and for each workload and bandwidth how well the order of the
strategies was predicted (Spearman's rank correlation).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from laconic.cli.contest_view import watching
from laconic.cluster import Cluster, parse_bandwidth
from laconic.experiments.comparison import Comparison, uniform_network
from laconic.experiments.run import run_comparison
from laconic.experiments.tasks import TaskConfig
from laconic.simulator import simulate
from laconic.strategy import Strategy
from laconic.units import format_rate, parse_quantity
from laconic.workload import TensorShape, Workload, workload

HOSTS = 4
SHRUNK = {"resnet50": 8, "gpt2": 32, "bert-base": 32}
"""Known models, and by what each tensor's size is divided."""
STRATEGIES = (
    "bsp / all_reduce / none / sequential",
    "bsp / all_reduce / none / wfbp",
    "bsp / all_reduce / none / fusion(bytes=2MB, first_bytes=256KB)",
    "bsp / all_reduce / none / mg_wfbp",
    "bsp / all_reduce / none / priority(partition_bytes=512KB, credit_bytes=2MB)",
    "bsp / all_reduce / none / dear(bytes=1MB)",
    "bsp / parameter_server / none / fusion(bytes=2MB, first_bytes=256KB)",
    "local_sgd(period=4) / all_reduce / none / fusion(bytes=2MB, first_bytes=256KB)",
    "bsp / gossip / none / fusion(bytes=2MB, first_bytes=256KB)",
)


@dataclass(frozen=True)
class Row:
    """One strategy on one workload and one link."""

    workload: str
    bandwidth: str
    strategy: str
    predicted_ms: float
    measured_ms: float
    low_ms: float
    high_ms: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted_ms / self.measured_ms - 1

    def line(self) -> str:
        """A line of the table."""
        return (
            f"{self.workload:12} {self.bandwidth:>8}  {self.strategy:80} {self.predicted_ms:8.1f} ms predicted "
            f"{self.measured_ms:8.1f} ms measured ({self.low_ms:.0f}..{self.high_ms:.0f})  {self.error:+6.1%}"
        )


def shrunk(name: str, compute_s: float, divisor: float | None = None) -> Workload:
    """A known model with small tensors, as many as it has; divisor: of their sizes, as in SHRUNK if left out."""
    made, divisor = workload(name), divisor or SHRUNK[name]
    layers = tuple(
        replace(
            layer,
            tensors=tuple(
                TensorShape(name=tensor.name, shape=(math.ceil(tensor.numel / divisor),)) for tensor in layer.tensors
            ),
        )
        for layer in made.layers
    )
    smaller = replace(made, name=f"{name}/{divisor:g}", layers=layers, source=f"{made.source} Tensors shrunk.")
    return smaller.scaled(compute_s=compute_s)


def probed(bandwidth_bps: float, folder: Path, limit: str) -> Cluster:
    """The lab's links as a cluster with measured curves."""
    path = folder / f"{format_rate(bandwidth_bps)}.toml"
    laconic = [sys.executable, "-m", "laconic.cli"]
    lab = [*laconic, "lab", "--hosts", str(HOSTS), "--bandwidth", format_rate(bandwidth_bps)]
    probe = [*laconic, "probe", "--output", str(path), "--limit", limit]
    done = subprocess.run([*lab, "--", *probe], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"the probe failed:\n{done.stdout}\n{done.stderr}")
    return Cluster.load(path)


def measured(path: Path, bandwidth_bps: float, compute_s: float, steps: int) -> dict[str, tuple[float, float, float]]:
    """Step times of every strategy in one replay: median and quartiles."""
    comparison = Comparison(
        kind="replay",
        task=TaskConfig(kind="replay", data=str(path), compute_s=compute_s),
        strategies=STRATEGIES,
        hosts=HOSTS,
        networks=(uniform_network(HOSTS, bandwidth_bps),),
        steps=steps,
        torch_ddp=False,
    )
    with watching(comparison) as watcher:
        results, _ = run_comparison(comparison, watcher)
    return {row.strategy: (row.step_ms, row.step_ms_low, row.step_ms_high) for row in results.rows}


def rank_correlation(rows: list[Row]) -> float:
    """Spearman's, between predicted and measured times."""
    predicted, found = ([row.predicted_ms for row in rows], [row.measured_ms for row in rows])
    return (
        statistics.correlation(predicted, found, method="ranked")
        if sys.version_info >= (3, 12)
        else _ranked(predicted, found)
    )


def _ranked(left: list[float], right: list[float]) -> float:
    def ranks(values: list[float]) -> list[float]:
        order = sorted(values)
        return [order.index(value) + (order.count(value) - 1) / 2 for value in values]

    return statistics.correlation(ranks(left), ranks(right))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["resnet50", "gpt2"], choices=list(SHRUNK))
    parser.add_argument("--bandwidths", nargs="+", default=["100mbit", "200mbit", "400mbit"])
    parser.add_argument("--compute", default="0.8s", help="of a step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--probe", default="20s", help="how long each probe may take")
    parser.add_argument("--json", metavar="FILE", help="write all rows there")
    options = parser.parse_args()
    compute_s = parse_quantity(options.compute, "time", "--compute")
    rows: list[Row] = []
    correlations: list[str] = []
    with tempfile.TemporaryDirectory(prefix="laconic-") as name:
        folder = Path(name)
        for text in options.bandwidths:
            bandwidth_bps = parse_bandwidth(text, "--bandwidths")
            cluster = probed(bandwidth_bps, folder, options.probe)
            for model in options.workloads:
                job = shrunk(model, compute_s)
                path = folder / f"{model}.json"
                path.write_text(job.to_json(), encoding="utf-8")
                predicted = {
                    str(Strategy.parse(s)): simulate(s, job, cluster).prediction.step_s * 1e3 for s in STRATEGIES
                }
                found = measured(path, bandwidth_bps, compute_s, options.steps)
                group = [
                    Row(job.name, text, strategy, predicted[strategy], *times) for strategy, times in found.items()
                ]
                print("\n".join(row.line() for row in group), flush=True)
                rows += group
                correlations.append(f"{job.name:12} {text:>8}  rank correlation {rank_correlation(group):.3f}")
                print(correlations[-1], flush=True)
    errors = [abs(row.error) for row in rows]
    print(f"\n{len(rows)} cells\n" + "\n".join(row.line() for row in rows) + "\n" + "\n".join(correlations))
    print(f"median error {statistics.median(errors):.1%} (wanted 5%), largest {max(errors):.1%} (wanted 15%)")
    if options.json:
        Path(options.json).write_text(json.dumps([vars(row) for row in rows], indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
