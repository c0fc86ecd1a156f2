"""How fast the simulator's engine is: tasks per second, fair rates of many flows, all-reduces of many hosts by flows.

    python -m benchmarks.engine [--repeats 3]

Times are the shortest of several runs, after one that compiles. "built" is Python's part, which is done once for each
graph however often that runs. The fabric of the all-reduces is a two-level fat tree, 4:1 oversubscribed, in which each
message takes one spine switch, as ECMP chooses.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from collections.abc import Callable

import numpy as np

from laconic.cluster import Cluster, Link, cluster
from laconic.cluster.topologies import FatTree
from laconic.collectives.halving_doubling import halving_doubling
from laconic.collectives.ring import ring
from laconic.collectives.schedule import Collective
from laconic.scheduling import SCHEDULES
from laconic.simulator import simulate
from laconic.simulator.engine import Graph, GraphBuilder, add_collective, run
from laconic.simulator.engine.maxmin_numba import fair_rates
from laconic.workload import workload

WORKERS = 16_384
HOSTS = 1024
TASKS = (10_000, 30_000, 100_000, 300_000, 1_000_000)
FLOWS = (1024, 4096, 16_384, 65_536)
SIZES = (HOSTS * 16 * 6_000, 100_000_007)
"""Bytes of an all-reduce: one whose chunks are all alike, one of which every chunk has its own size."""


def tree() -> Cluster:
    return Cluster(
        links=(Link(bandwidth_bps=100e9),) * HOSTS, topology=FatTree(hosts_per_leaf=32, oversubscription=4.0)
    )


def shortest(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        function()
        times.append(time.perf_counter() - began_s)
    return min(times)


def layers(num_tasks: int) -> Graph:
    """Tasks on 64 resources in turn, each after two of the turn before, as buckets of many ranks are."""
    durations = np.random.default_rng(0).random(num_tasks).tolist()
    builder = GraphBuilder()
    for number in range(64):
        builder.resource(f"rank {number}")
    for number, duration_s in enumerate(durations):
        after = (number - 64, number - 63) if number >= 64 else ()
        builder.timed(duration_s, resource=number % 64, priority=float(number % 7), after=after)
    return builder.build()


def timed_tasks(repeats: int) -> None:
    spent: list[float] = []
    for num_tasks in TASKS:
        began_s = time.perf_counter()
        graph = layers(num_tasks)
        built_s = time.perf_counter() - began_s
        spent.append(shortest(lambda graph=graph: run(graph), repeats))
        print(
            f"  {num_tasks:9,} tasks   built {built_s:6.2f} s   run {1000 * spent[-1]:8.2f} ms   "
            f"{num_tasks / spent[-1] / 1e6:5.2f} M tasks/s",
            flush=True,
        )
    exponent = np.polyfit(np.log(TASKS), np.log(spent), 1)[0]
    print(f"  time grows as tasks^{exponent:.2f}")


def many_flows(repeats: int) -> None:
    fabric = tree().fabric()
    generator = np.random.default_rng(0)
    for num_flows in FLOWS:
        first, links = fabric.routes(*generator.integers(0, HOSTS, (2, num_flows)))
        spent_s = shortest(
            lambda first=first, links=links: fair_rates(fabric.capacity_bytes_per_s, first, links), repeats
        )
        print(f"  {num_flows:6,} flows between random hosts   {1000 * spent_s:7.2f} ms", flush=True)


def all_reduces() -> None:
    fabric = tree().fabric()
    for name, make in (("ring", ring), ("halving_doubling", halving_doubling)):
        for nbytes in SIZES:
            began_s = time.perf_counter()
            table: Collective = make(HOSTS)
            builder = GraphBuilder()
            add_collective(builder, table, nbytes, step_latency_s=5e-6)
            graph = builder.build(fabric)
            built_s = time.perf_counter() - began_s
            began_s = time.perf_counter()
            outcome = run(graph)
            print(
                f"  {name:17} {nbytes:11,} bytes   {table.num_steps:5} steps   built {built_s:5.2f} s   "
                f"run {time.perf_counter() - began_s:6.3f} s   simulated {1000 * outcome.makespan_s:7.2f} ms",
                flush=True,
            )


def large_worlds() -> None:
    job, place = workload("gpt2-xl"), cluster("ethernet-10g", hosts=WORKERS)
    for schedule in SCHEDULES:
        strategy = f"bsp / all_reduce / none / {schedule.name}"
        began_s = time.perf_counter()
        step_s = simulate(strategy, job, place).prediction.step_s
        print(f"  {schedule.name:12} {time.perf_counter() - began_s:5.2f} s   simulated {step_s:6.2f} s a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    began_s = time.perf_counter()
    run(layers(100))
    fair_rates(np.ones(1), np.array([0, 1]), np.zeros(1, dtype=np.int64))
    print(f"compiled, or loaded, in {time.perf_counter() - began_s:.1f} s")
    print("timed tasks")
    timed_tasks(options.repeats)
    print("max-min fair rates")
    many_flows(options.repeats)
    print(f"all-reduces of {HOSTS:,} hosts at flow level")
    all_reduces()
    print(f"every schedule of gpt2-xl on {WORKERS:,} workers, with planning and drawing")
    large_worlds()
    print(f"peak memory {math.ceil(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024):,} MiB")


if __name__ == "__main__":
    main()
