"""Lossless schedules beside torch DDP, with replayed compute on real links.

    python -m benchmarks.schedules [--workloads resnet50] [--ratios 0.5 1 2] [--compute 1s]
                                   [--schedules fusion wfbp mg_wfbp priority dear]

Four virtual hosts sleep each layer's compute while its gradients cross links whose bandwidth is chosen so that an
all-reduce of everything takes 0.5, 1 and 2 times as long as the compute. All take turns in one job. Printed are medians
and their ratio to torch DDP, to the limit max(compute, bytes / achievable bandwidth), and to what can be reached: a
model whose first layer is large, such as one that ties its output to the word embedding, has bytes nothing can hide.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from laconic.cli.contest_view import watching
from laconic.core.sent_bytes import all_reduce_sent
from laconic.experiments.comparison import Comparison, uniform_network
from laconic.experiments.run import run_comparison
from laconic.experiments.tasks import TaskConfig
from laconic.report.results import TORCH_DDP, Row
from laconic.units import parse_quantity
from laconic.workload import workload

SCHEDULES = ("fusion", "wfbp", "mg_wfbp", "priority", "dear")
ACHIEVABLE = 0.955
"""Share of a virtual link's bandwidth that a large all-reduce reaches; see docs/results/lab_fidelity.md."""


@dataclass(frozen=True)
class Cell:
    """One workload on one link."""

    workload: str
    ratio: float
    compute_s: float
    bandwidth_bps: float
    hosts: int

    @property
    def limit_s(self) -> float:
        """No schedule can be faster."""
        return max(self.compute_s, self.ratio * self.compute_s)

    @property
    def reachable_s(self) -> float:
        """No schedule can be faster either, as the first layers' gradients come last and are needed first."""
        job = workload(self.workload).scaled(compute_s=self.compute_s)
        return job.least_step_s(self.ratio * self.compute_s / job.gradient_bytes)


def cell(name: str, ratio: float, compute_s: float, hosts: int) -> Cell:
    """The link on which exchanging everything takes `ratio` times the compute."""
    nbytes = 4 * workload(name).num_parameters
    bandwidth_bps = round(8 * all_reduce_sent(nbytes, hosts) / (ratio * compute_s * ACHIEVABLE), -6)
    return Cell(name, ratio, compute_s, bandwidth_bps, hosts)


def measured(one: Cell, schedules: list[str], steps: int) -> list[Row]:
    """Rows of all contenders."""
    comparison = Comparison(
        kind="replay",
        task=TaskConfig(kind="replay", data=one.workload, compute_s=one.compute_s),
        strategies=tuple(f"bsp / all_reduce / none / {schedule}" for schedule in schedules),
        hosts=one.hosts,
        networks=(uniform_network(one.hosts, one.bandwidth_bps),),
        steps=steps,
    )
    with watching(comparison) as watcher:
        results, _ = run_comparison(comparison, watcher)
    return list(results.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["resnet50", "bert-base", "gpt2"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 1.0, 2.0])
    parser.add_argument("--compute", default="1s", help="for resnet50; others in proportion to their parameters")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, help="each as a strategy spells it")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    seconds = parse_quantity(options.compute, "time", "--compute")
    smallest = workload("resnet50").num_parameters
    table: list[str] = []
    for name in options.workloads:
        compute_s = seconds * workload(name).num_parameters / smallest
        for ratio in options.ratios:
            one = cell(name, ratio, compute_s, options.hosts)
            rows = measured(one, options.schedules, options.steps)
            ddp_ms = next(row.step_ms for row in rows if row.strategy == TORCH_DDP)
            for row in rows:
                table.append(
                    f"{name:10} {ratio:4.1f}x  {one.bandwidth_bps / 1e9:6.3f} Gbit/s  {row.name:20} "
                    f"{row.step_ms:8.1f} ms ({row.step_ms_low:.0f}..{row.step_ms_high:.0f})  "
                    f"{ddp_ms / row.step_ms:5.3f}x DDP  {row.step_ms / 1e3 / one.limit_s:5.3f}x the limit  "
                    f"{row.step_ms / 1e3 / one.reachable_s:5.3f}x what can be reached"
                )
                print(table[-1], flush=True)
            best = min(row.step_ms for row in rows if row.strategy != TORCH_DDP)
            table.append(
                f"{name:10} {ratio:4.1f}x  best lossless: {ddp_ms / best:.3f}x DDP, "
                f"{best / 1e3 / one.limit_s:.3f}x the limit of {one.limit_s * 1e3:.0f} ms, "
                f"{best / 1e3 / one.reachable_s:.3f}x the {one.reachable_s * 1e3:.0f} ms that can be reached"
            )
            print(table[-1], flush=True)
    print("\n" + "\n".join(table))


if __name__ == "__main__":
    main()
