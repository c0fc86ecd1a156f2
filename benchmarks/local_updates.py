"""What exchanging parameters in the background costs: streaming DiLoCo in 4 bits beside no communication at all.

    python -m benchmarks.local_updates [--bandwidth 100mbit 10mbit] [--steps 134]

A GPT of about 5 M parameters on 4 virtual hosts. Every replica training alone, torch DDP and laconic's strategies take
turns of one period each in one job. Printed are mean step times, their ratio to no communication, and bytes as the
kernel counted them.
"""

from __future__ import annotations

import argparse

from laconic.cli.contest_view import tables, watching
from laconic.cli.terminal import emit_sections
from laconic.cluster import parse_bandwidth
from laconic.experiments.comparison import Comparison, uniform_network
from laconic.experiments.run import run_comparison
from laconic.experiments.tasks import TaskConfig
from laconic.report.results import NO_COMMUNICATION, Results

STREAMING = "streaming_diloco(period=64, overlap=8) / all_reduce / int4 + error_feedback / fusion"
WANTED = {"100mbit": 1.15, "10mbit": 1.30}
"""How much longer a step may take than without communication."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", nargs="+", default=["100mbit", "10mbit"])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=137, help="of each; the default is two turns")
    parser.add_argument("--size", default="medium")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--strategy", action="append", default=[], help="in addition to streaming DiLoCo")
    options = parser.parse_args()
    comparison = Comparison(
        task=TaskConfig(size=options.size, batch=options.batch),
        strategies=(STREAMING, *options.strategy),
        hosts=options.hosts,
        networks=tuple(
            uniform_network(options.hosts, parse_bandwidth(rate, "--bandwidth")) for rate in options.bandwidth
        ),
        steps=options.steps,
        no_communication=True,
        torch_ddp=False,
    )
    with watching(comparison) as watcher:
        results, folder = run_comparison(comparison, watcher)
    emit_sections(*tables(results))
    print()
    print_ratios(results)
    print(f"\nEverything is in {folder.path}")


def print_ratios(results: Results) -> None:
    """Each strategy beside no communication on the same link."""
    for link in dict.fromkeys(row.link for row in results.rows):
        rows = [row for row in results.rows if row.link == link]
        alone_ms = next(row.step_ms for row in rows if row.strategy == NO_COMMUNICATION)
        for row in rows:
            wanted = f"   wanted {WANTED[link]:.2f}" if row.strategy == STREAMING and link in WANTED else ""
            print(
                f"{link:8} {row.name:84} {row.step_ms:8.1f} ms {row.step_ms / alone_ms:6.3f}x no communication  "
                f"{row.wire_bytes_per_step or 0:>12,} bytes/step{wanted}"
            )


if __name__ == "__main__":
    main()
