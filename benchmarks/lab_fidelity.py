"""How close the lab's links come to the bandwidth asked for.

    python -m benchmarks.lab_fidelity [--rates 10mbit 100mbit 1gbit] [--runs 5]

A 20 MB all-reduce (Gloo) on 4 virtual hosts, several times per rate. A ring sends 2 (n-1)/n of the bytes, so the
achieved fraction is 2 (n-1)/n * bytes * 8 / rate / seconds, the time being that of the slowest rank. Headers take 4.4%
of a full Ethernet frame (66 of 1514 bytes), so 0.956 is what a perfect link gives. The spread is (largest - smallest)
/ median over the runs.

Run it alone: other processes on the same cores show up at the high rates. The load average is printed for that.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

from laconic.cluster import Cluster, Link, parse_bandwidth
from laconic.lab.launch import run_ranks
from laconic.lab.virtual_hosts import VirtualHosts, places_on

NUM_BYTES = 20_000_000


def run_rank(runs: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tensor = torch.ones(NUM_BYTES // 4)
    dist.all_reduce(tensor[: NUM_BYTES // 40])  # connections are made, TCP windows are open
    for _ in range(runs):
        dist.barrier()
        began_s = time.perf_counter()
        dist.all_reduce(tensor)
        took = torch.tensor(time.perf_counter() - began_s)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"seconds {took.item()}", flush=True)
    dist.destroy_process_group()


def measure(num_hosts: int, bandwidth_bps: float, runs: int) -> list[float]:
    """The achieved fraction of line rate, run by run."""
    seconds: list[float] = []

    def on_line(rank: int, line: str) -> None:
        if line.startswith("seconds "):
            seconds.append(float(line.split()[1]))

    command = [sys.executable, "-m", "benchmarks.lab_fidelity", "--rank", "--runs", str(runs)]
    with VirtualHosts(Cluster.uniform(num_hosts, Link(bandwidth_bps=bandwidth_bps))) as hosts:
        run_ranks(command, places_on(hosts), timeout_s=900, on_line=on_line)
    ideal_s = 2 * (num_hosts - 1) / num_hosts * NUM_BYTES * 8 / bandwidth_bps
    return [ideal_s / took for took in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rates", nargs="+", default=["10mbit", "100mbit", "1gbit"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.runs)
        return
    load = os.getloadavg()[0]
    print(f"20 MB all-reduce on {options.hosts} virtual hosts, {options.runs} runs per rate; load average {load:.1f}")
    for rate in options.rates:
        fractions = measure(options.hosts, parse_bandwidth(rate, "--rates"), options.runs)
        middle = statistics.median(fractions)
        spread = (max(fractions) - min(fractions)) / middle
        print(
            f"{rate:>8}  fraction of line rate {middle:.3f} ({min(fractions):.3f}..{max(fractions):.3f})"
            f"   spread over runs {spread:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
