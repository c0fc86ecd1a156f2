"""How long each all-reduce algorithm takes beside the backend's own (Gloo), and what auto makes of it.

    python -m benchmarks.collectives [--links shaped|none] [--rate 1gbit] [--hosts 4] [--ranks-per-host 1] [--repeats 5]

All contenders take turns in one run, size by size; a time is that of the slowest rank, and medians are shown. First
auto measures as it does when attaching; then what it has chosen runs as one more contender.

--links shaped: virtual hosts behind links of --rate. --links none: processes side by side over loopback, which stand
for hosts of --ranks-per-host ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

from laconic.architecture.all_reduce import sensible
from laconic.cluster import Cluster, Link, parse_bandwidth
from laconic.collectives import ALGORITHMS
from laconic.collectives.choice import NATIVE, fastest, in_words
from laconic.collectives.execution import WholeExchange, run
from laconic.core.clock import WallClock
from laconic.core.hosts import HOST_VARIABLE
from laconic.core.torch_distributed import TorchTransport
from laconic.core.transport import Work
from laconic.lab.launch import places_here, run_ranks
from laconic.lab.virtual_hosts import VirtualHosts, places_on
from laconic.runtime.collective_costs import measure
from laconic.units import human_bytes

SIZES = (1_000, 16_000, 256_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000)
MORE = 4
"""Times as many repeats below 1 MB, where chance is large and time is short."""


def start(algorithm: str, transport: TorchTransport, tensor: torch.Tensor) -> Work:
    if algorithm == NATIVE:
        return transport.all_reduce(tensor)
    return WholeExchange(run(ALGORITHMS[algorithm](transport.hosts), transport, (tensor,), what=algorithm))


def slowest(seconds: list[float]) -> list[float]:
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def run_rank(repeats: int, ranks_per_host: int) -> None:
    torch.set_num_threads(1)
    os.environ[HOST_VARIABLE] = f"host {int(os.environ['RANK']) // ranks_per_host}"
    dist.init_process_group("gloo")
    transport = TorchTransport()
    began_s = time.perf_counter()
    costs = measure(sensible(transport.hosts), transport, WallClock(), torch.device("cpu"))
    took_s = time.perf_counter() - began_s
    algorithms = [NATIVE, *sensible(transport.hosts)]
    if transport.rank == 0:
        about = {"algorithms": algorithms, "auto": in_words(costs), "sizes": costs.sizes, "measured_s": took_s}
        print(json.dumps(about), flush=True)
    for nbytes in SIZES:
        tensor = torch.zeros(nbytes // 4)
        chosen = fastest(costs, nbytes)
        contenders = [*algorithms, chosen]
        rows: list[list[float]] = []
        for turn in range(1 + (MORE * repeats if nbytes < 1_000_000 else repeats)):
            seconds = [0.0] * len(contenders)
            # Another order in every turn, so that nobody always follows the same one.
            for place in range(len(contenders)):
                number = (place + turn) % len(contenders)
                dist.barrier()
                began_s = time.perf_counter()
                start(contenders[number], transport, tensor).wait()
                seconds[number] = time.perf_counter() - began_s
            rows.append(slowest(seconds))
        medians = [statistics.median(column) for column in zip(*rows[1:], strict=True)]
        if transport.rank == 0:
            print(json.dumps({"nbytes": nbytes, "chosen": chosen, "seconds": medians}), flush=True)
    transport.close()
    dist.destroy_process_group()


def show(lines: list[str]) -> None:
    about = json.loads(lines[0])
    largest = human_bytes(about["sizes"][-1])
    print(f"auto measured up to {largest} in {about['measured_s']:.2f} s: {about['auto']}")
    others = about["algorithms"][1:]
    print(f"{'size':>8}  {'native':>10}" + "".join(f"{name:>18}" for name in others) + f"{'auto':>24}")
    for line in lines[1:]:
        row = json.loads(line)
        native_s, *times = row["seconds"]
        ratios = "".join(f"{time_s / native_s:>17.2f}x" for time_s in times[:-1])
        auto = f"{row['chosen']} {times[-1] / native_s:.2f}x"
        print(f"{human_bytes(row['nbytes']):>8}  {native_s * 1e3:>7.2f} ms{ratios}{auto:>24}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", choices=["shaped", "none"], default="shaped")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.repeats, options.ranks_per_host)
        return
    command = [sys.executable, "-m", "benchmarks.collectives", "--rank", "--repeats", str(options.repeats)]
    command += ["--ranks-per-host", str(options.ranks_per_host)]
    lines: list[str] = []

    def on_line(rank: int, line: str) -> None:
        if rank == 0 and line.startswith("{"):
            lines.append(line)

    where = f"{options.hosts} hosts of {options.ranks_per_host}"
    how = f"{options.repeats} repeats, {MORE * options.repeats} below 1 MB; load average {os.getloadavg()[0]:.1f}"
    if options.links == "none":
        print(f"{where} over loopback, {how}", flush=True)
        run_ranks(command, places_here(options.hosts * options.ranks_per_host), timeout_s=1800, on_line=on_line)
    else:
        print(f"{where} at {options.rate}, {how}", flush=True)
        link = Link(bandwidth_bps=parse_bandwidth(options.rate, "--rate"))
        with VirtualHosts(Cluster.uniform(options.hosts, link)) as hosts:
            places = places_on(hosts, ranks_per_host=options.ranks_per_host)
            run_ranks(command, places, timeout_s=1800, on_line=on_line)
    show(lines)


if __name__ == "__main__":
    main()
