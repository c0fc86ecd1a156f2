"""Racks behind slow uplinks: what an all-reduce gains if its ranks are placed by measured rates of pairs.

    python -m benchmarks.racks [--hosts 8] [--racks 2] [--oversubscription 4] [--rate 100mbit] [--size 8MB]
                               [--in-order] [--repeats 5] [--json FILE]

Virtual hosts stand in racks in turn (host h in rack h mod racks), as ranks stand that a scheduler has placed without
knowing racks; with --in-order neighbours share a rack. The ranks first measure how fast every two of them exchange
while all others do. Then all contenders take turns; a time is that of the slowest rank, and medians are shown, with
what the simulator says at flow level for the same placement.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from laconic.cluster import Cluster, Link, parse_bandwidth
from laconic.cluster.pairs import measure_pairs
from laconic.cluster.trials import Stage
from laconic.collectives import ALGORITHMS
from laconic.collectives.choice import NATIVE
from laconic.collectives.execution import WholeExchange, run
from laconic.collectives.placement import groups_in_words, placement_of
from laconic.core.clock import WallClock
from laconic.core.exchange import Move
from laconic.core.hosts import Hosts, hosts_alone
from laconic.core.torch_distributed import TorchTransport
from laconic.core.transport import Work
from laconic.lab.launch import run_ranks
from laconic.lab.virtual_hosts import VirtualHosts, places_on
from laconic.simulator.network.contract import seconds
from laconic.simulator.network.flow import FlowNetwork
from laconic.units import human_bytes, parse_quantity

AS_NUMBERED, PLACED = "as numbered", "placed by measurement"
FLAT = ("ring", AS_NUMBERED)
CONTENDERS = (
    (NATIVE, AS_NUMBERED),
    FLAT,
    ("torus2d", AS_NUMBERED),
    ("ring", PLACED),
    ("torus2d", PLACED),
    ("hierarchical", PLACED),
)


def start(algorithm: str, hosts: Hosts, transport: TorchTransport, tensor: torch.Tensor) -> Work:
    if algorithm == NATIVE:
        return transport.all_reduce(tensor)
    return WholeExchange(run(ALGORITHMS[algorithm](hosts), transport, (tensor,), what=algorithm))


def slowest(times_s: list[float]) -> list[float]:
    times = torch.tensor(times_s, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def run_rank(nbytes: int, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = TorchTransport()
    began_s = time.perf_counter()
    pairs = measure_pairs(Stage(transport, WallClock(), torch.device("cpu")))
    took_s = time.perf_counter() - began_s
    found = placement_of(pairs)
    if transport.rank == 0:
        about = {"groups": found.groups, "drop": found.drop, "pairs_bps": pairs, "measured_s": took_s}
        print(json.dumps(about), flush=True)
    alone, tensor, rows = hosts_alone(transport.world_size), torch.zeros(nbytes // 4), list[list[float]]()
    placed = found.groups if len(found.groups) > 1 else alone
    for turn in range(1 + repeats):
        times_s = [0.0] * len(CONTENDERS)
        # Another order in every turn, so that nobody always follows the same one.
        for place in range(len(CONTENDERS)):
            number = (place + turn) % len(CONTENDERS)
            algorithm, order = CONTENDERS[number]
            dist.barrier()
            began_s = time.perf_counter()
            start(algorithm, placed if order == PLACED else alone, transport, tensor).wait()
            times_s[number] = time.perf_counter() - began_s
        rows.append(slowest(times_s))
    if transport.rank == 0:
        print(json.dumps({"seconds": list(zip(*rows[1:], strict=True))}), flush=True)
    transport.close()
    dist.destroy_process_group()


def predicted_s(algorithm: str, groups: Hosts, cluster: Cluster, nbytes: int) -> float:
    """At flow level, without what software takes for a message."""
    move = Move("sum", (nbytes,), algorithm, groups=groups)
    return seconds(FlowNetwork(cluster), move, cluster.num_hosts)


def rows_of(groups: Hosts, measured_s: list[list[float]], cluster: Cluster, nbytes: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    flat_s = statistics.median(measured_s[CONTENDERS.index(FLAT)])
    for (algorithm, order), times_s in zip(CONTENDERS, measured_s, strict=True):
        median_s = statistics.median(times_s)
        said_s = predicted_s(algorithm, groups if order == PLACED else (), cluster, nbytes)
        rows.append(
            {
                "algorithm": algorithm,
                "order": order,
                "measured_s": median_s,
                "least_s": min(times_s),
                "most_s": max(times_s),
                "predicted_s": said_s,
                "error": said_s / median_s - 1,
                "gain": flat_s / median_s,
            }
        )
    return rows


def show(rows: list[dict[str, object]]) -> None:
    print(f"{'algorithm':14}{'order':24}{'measured':>10}{'predicted':>11}{'error':>8}{'over the flat ring':>20}")
    for row in rows:
        print(
            f"{row['algorithm']:14}{row['order']:24}{row['measured_s']:>8.3f} s{row['predicted_s']:>9.3f} s"
            f"{row['error']:>+8.0%}{row['gain']:>19.2f}x"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--racks", type=int, default=2)
    parser.add_argument("--oversubscription", type=float, default=4.0)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--size", default="8MB")
    parser.add_argument("--in-order", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    nbytes = int(parse_quantity(options.size, "size", "--size"))
    if options.rank:
        run_rank(nbytes, options.repeats)
        return
    cluster = Cluster.in_racks(
        options.hosts,
        Link(bandwidth_bps=parse_bandwidth(options.rate, "--rate")),
        racks=options.racks,
        oversubscription=options.oversubscription,
        in_turn=not options.in_order,
    )
    command = [sys.executable, "-m", "benchmarks.racks", "--rank", "--size", options.size]
    command += ["--repeats", str(options.repeats)]
    lines: list[str] = []

    def on_line(rank: int, line: str) -> None:
        if rank == 0 and line.startswith("{"):
            lines.append(line)

    how = f"{options.repeats} repeats; load average {os.getloadavg()[0]:.1f}"
    print(f"{cluster.describe()}; an all-reduce of {human_bytes(nbytes)}, {how}", flush=True)
    with VirtualHosts(cluster) as hosts:
        run_ranks(command, places_on(hosts), timeout_s=1800, on_line=on_line)
    about = json.loads(lines[0])
    groups = tuple(map(tuple, about["groups"]))
    told = f"{about['drop']:.1f} times as fast inside {groups_in_words(groups)}"
    print(f"pairs measured in {about['measured_s']:.1f} s: {told}")
    rows = rows_of(groups if len(groups) > 1 else (), json.loads(lines[1])["seconds"], cluster, nbytes)
    show(rows)
    if options.json is not None:
        options.json.write_text(json.dumps({**about, "cluster": cluster.describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
