"""Many jobs on one cluster: how long the scheduler's simulator takes, and what knowing the network gains.

    python -m benchmarks.many_jobs scale                      10,000 jobs on 4,096 GPUs, every policy
    python -m benchmarks.many_jobs flow                       200 jobs at flow level, every policy
    python -m benchmarks.many_jobs network --tables FOLDER    the 120 jobs of the published run at 10 Gbit/s, 4:1;
                                                              first what no policy can do better than

For `network` the jobs' gradients are those of the models' public definitions with default settings (LM: an LSTM of
width 200 on WikiText-2; Transformer: base, Multi30k; Recommendation: an autoencoder of width 200 on ML-20M).
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from laconic.cluster import Cluster, Link, Racks
from laconic.jobs import POLICIES, Costs, Job, Phase, Throughputs, Traffic, parse_policy, read_trace, run
from laconic.jobs.shockwave import SPEEDS, TRACE
from laconic.jobs.speeds import Fidelity

MILLION_PARAMETERS = {"ResNet-18": 11.2, "ResNet-50": 25.6, "Transformer": 50.0, "LM": 14.0, "Recommendation": 8.0}
BASIC = ("fifo", "srtf", "srsf", "las", "max_min_fairness", "finish_time_fairness", "max_sum_throughput", "allox")
TUNED = "allox(considered=1, placement={})"
"""AlloX that looks at all waiting jobs, which gives up its fairness for short completion times."""
PLACEMENTS = ("first", "pack", "spread")
COSTS = Costs(start_s=30.0)
AWARE = ("rack_aware", "cassini", "strategy_aware")


def made_up_jobs(count: int, seconds_between: float, seed: int = 0) -> list[Job]:
    """Jobs like those of published traces: most small and short, a few large and long."""
    random = np.random.default_rng(seed)
    arrival_s = np.cumsum(random.exponential(seconds_between, count))
    duration_s = np.exp(random.normal(np.log(3000), 0.9, count))
    gpus = random.choice([1, 2, 4, 8], count, p=[0.7, 0.1, 0.15, 0.05])
    return [
        Job(
            name=str(place),
            arrival_s=float(arrival_s[place]),
            gpus=int(gpus[place]),
            phases=(Phase(until=1.0, work_per_s=float(1 / duration_s[place]), steps_per_s=5.0),),
            max_gpus=int(2 * gpus[place]) if place % 4 == 0 else 0,
            traffic=Traffic(gradient_bytes=1e8),
        )
        for place in range(count)
    ]


def racks(hosts: int, each: int, devices: int) -> Cluster:
    """Hosts with 10 Gbit/s each, in racks whose uplinks carry a quarter of their hosts' bandwidth."""
    link = Link(bandwidth_bps=10e9, delay_s=25e-6)
    uplink = Link(bandwidth_bps=10e9 * each / 4, delay_s=25e-6)
    return Cluster(
        links=(link,) * hosts,
        devices_per_host=devices,
        inside=Link(bandwidth_bps=252e9, delay_s=1e-6) if devices > 1 else None,
        topology=Racks(sizes=(each,) * (hosts // each), uplinks=(uplink,) * (hosts // each)),
    )


def least_mean_completion_s(jobs: Sequence[Job], num_gpus: int) -> float:
    """A lower bound on the mean completion time, whatever the policy, on a network that costs nothing.

    A job that needs w = GPUs x duration GPU-seconds and gets at most its number of GPUs ends no earlier than half its
    duration after the mean of the times at which these are spent. The sum of these means over all jobs is smallest if
    one machine, as fast as all GPUs together, always works on the job with the smallest w. (Goemans 1997 and others:
    mean busy times.)
    """
    order = sorted(jobs, key=lambda job: job.arrival_s)
    work = [job.gpus * job.duration_s for job in order]
    left, waiting, now_s, mean_s = list(work), [], 0.0, [0.0] * len(order)
    come = 0
    while come < len(order) or waiting:
        if not waiting:
            now_s = max(now_s, order[come].arrival_s)
        while come < len(order) and order[come].arrival_s <= now_s:
            heapq.heappush(waiting, (work[come], come))
            come += 1
        job = waiting[0][1]
        end_s = now_s + left[job] / num_gpus
        stop_s = min(end_s, order[come].arrival_s) if come < len(order) else end_s
        done = left[job] if stop_s == end_s else (stop_s - now_s) * num_gpus
        mean_s[job] += done / work[job] * (now_s + stop_s) / 2
        left[job] -= done
        now_s = stop_s
        if stop_s == end_s:
            heapq.heappop(waiting)
    ends_s = [mean + job.duration_s / 2 - job.arrival_s for mean, job in zip(mean_s, order, strict=True)]
    return float(np.mean(ends_s))


def show(jobs: list[Job], cluster: Cluster, policies: list[str], fidelity: Fidelity, costs: Costs = COSTS) -> None:
    """One line for each policy."""
    for policy in policies:
        began_s = time.process_time()
        found = run(jobs, cluster, parse_policy(policy), costs, fidelity=fidelity)
        print(
            f"{policy:40} makespan {found.makespan_s:9,.0f} s  mean completion {found.average_completion_s:8,.0f} s  "
            f"unfair {found.unfair_share:4.0%}  {found.num_rounds:5} rounds  {found.num_starts:8,} starts  "
            f"{time.process_time() - began_s:5.1f} CPU s",
            flush=True,
        )


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("scale", "flow", "network"))
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--policy", action="append")
    given = parser.parse_args()
    if given.what == "scale":
        show(made_up_jobs(10_000, 1.0), racks(512, 16, 8), given.policy or POLICIES.names(), "throughput")
    elif given.what == "flow":
        show(made_up_jobs(200, 60.0), racks(32, 4, 2), given.policy or POLICIES.names(), "flow")
    else:
        if given.tables is None:
            parser.error("network needs --tables FOLDER, where the files of the published run are")
        jobs = read_trace(
            given.tables / TRACE,
            Throughputs.load(given.tables / SPEEDS, "v100"),
            bytes_of=lambda model: 4e6 * MILLION_PARAMETERS[model.partition(" (")[0]],
        )
        for hosts, each, devices in ((32, 4, 1), (8, 4, 4)):
            # With one GPU per host, these rules give the same places.
            rules = PLACEMENTS if devices > 1 else ("pack",)
            unaware = [f"{policy}(placement={rule})" for policy in BASIC for rule in rules]
            unaware += [TUNED.format(rule) for rule in rules]
            print(f"\n{hosts} hosts of {devices} GPUs, racks of {each}, 10 Gbit/s, uplinks 4:1", flush=True)
            print(f"no policy can have a shorter mean completion than {least_mean_completion_s(jobs, 32):,.0f} s")
            print("on a network that costs nothing, then also with starts that take no time and rounds of 10 s:")
            ideal, cluster = [replace(job, spread_slowdown=1.0) for job in jobs], racks(hosts, each, devices)
            show(ideal, cluster, ["srsf"], "throughput")
            show(ideal, cluster, ["srsf"], "throughput", Costs(round_s=10.0))
            print("on this one:")
            show(jobs, cluster, given.policy or [*unaware, *AWARE], "flow")


if __name__ == "__main__":
    main()
