"""laconic's lossy strategies beside what torch DDP offers by itself, on the same work and the same slow links.

    python -m benchmarks.peers [--bandwidth 100mbit] [--steps 15]

A GPT of about 5 M parameters on 4 virtual hosts; torch DDP, DDP with its fp16 hook, DDP with its PowerSGD hook (rank 4,
one bucket, because with more it crashes on Gloo) and laconic's strategies take turns in one job. Printed are step
times, bytes as the kernel counted them, and ratios to the two hooks.
"""

from __future__ import annotations

import argparse

from laconic.cli.contest_view import tables, watching
from laconic.cli.terminal import emit_sections
from laconic.cluster import parse_bandwidth
from laconic.experiments.comparison import Comparison, uniform_network
from laconic.experiments.run import run_comparison
from laconic.experiments.tasks import TaskConfig
from laconic.report.results import TORCH_HOOKS

STRATEGIES = (
    "bsp / all_reduce / fp16 / fusion",
    "bsp / all_reduce / int8 + error_feedback / fusion",
    "bsp / all_reduce / int4 + error_feedback / fusion",
    "bsp / all_reduce / ef_signsgd + error_feedback / fusion",
    "bsp / all_reduce / topk(density=1%) + error_feedback / fusion",
    "bsp / all_reduce / powersgd(rank=4) + error_feedback / fusion",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", default="100mbit")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--size", default="medium")
    parser.add_argument("--batch", type=int, default=1, help="small, so that 4 hosts on few cores wait for the network")
    options = parser.parse_args()
    comparison = Comparison(
        task=TaskConfig(size=options.size, batch=options.batch),
        strategies=STRATEGIES,
        hosts=options.hosts,
        networks=(uniform_network(options.hosts, parse_bandwidth(options.bandwidth, "--bandwidth")),),
        steps=options.steps,
        torch_hooks=tuple(TORCH_HOOKS),
    )
    with watching(comparison) as watcher:
        results, folder = run_comparison(comparison, watcher)
    emit_sections(*tables(results))
    step_ms = {row.strategy: row.step_ms for row in results.rows}
    fp16, powersgd = step_ms[TORCH_HOOKS["fp16"]], step_ms[TORCH_HOOKS["powersgd"]]
    print()
    for row in results.rows:
        print(
            f"{row.name:56} {fp16 / row.step_ms:6.2f}x DDP fp16  {powersgd / row.step_ms:6.2f}x DDP PowerSGD  "
            f"{row.wire_bytes_per_step or 0:>12,} bytes/step"
        )
    print(f"\nEverything is in {folder.path}")


if __name__ == "__main__":
    main()
