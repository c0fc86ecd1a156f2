"""Three real jobs that share one uplink: unmanaged, interleaved, and with strategies chosen for the load.

    python -m benchmarks.shared_uplink [--rate 40mbit] [--compute 1200ms] [--size 2MB] [--steps 20] [--draws 3]
                                       [--json FILE]

Six virtual hosts stand in two racks, whose uplinks carry as much as one host's link. Each job has one host in each rack
and runs in processes of its own: compute is slept, gradients are real and cross the links. The three ways:

    unmanaged     plain DDP, jobs begin at random times within a step; as many runs as --draws
    interleaved   plain DDP, jobs begin so that they communicate in turns (laconic.jobs.interleave)
    strategies    each job exchanges as `strategy_aware` chooses under the load of all three

A step takes as long as the pace over the second half of the time in which all jobs run. Beside it is what the simulator
says at flow level from links, workload and start times alone. Where jobs share a link fairly, the time by which one
follows the other stays as it was, so how much unmanaged jobs meet depends on chance: averages are over all draws.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import laconic
from laconic.cluster import Cluster, Link, parse_bandwidth
from laconic.experiments.replayed import NoUpdate, ReplayedModel
from laconic.jobs import Job, Phase, Rhythm, Traffic, interleave
from laconic.jobs.contention import Links, shared
from laconic.jobs.strategy_prices import StrategyPrices
from laconic.lab.launch import run_ranks
from laconic.lab.virtual_hosts import VirtualHosts, places_on
from laconic.simulator import simulate
from laconic.simulator.network.flow import FlowNetwork
from laconic.simulator.steps import pace
from laconic.simulator.together import Tenant, simulate_together
from laconic.units import parse_quantity
from laconic.workload import Layer, TensorShape, Workload

JOBS = 3
DDP = "ddp"
CANDIDATES = (DDP, "ddp-bf16", "bsp / all_reduce / int8", "bsp / all_reduce / int4 + error_feedback", "topk-int8-ef")
"""What may be chosen: strategies that exchange in every step, so that a short run shows how long a step takes."""
LAYERS = 8
WARM_UP = 3
"""Steps before the common start: the first ones make plans."""
READY_S, BEGIN_S = 120.0, 1.0
"""How long jobs may take to be ready, and when all begin after that."""


@dataclass(frozen=True)
class Plan:
    """One of the three ways."""

    name: str
    strategies: tuple[str, ...]
    start_s: tuple[float, ...]


def made_up(compute_s: float, nbytes: int) -> Workload:
    """Equal layers of square matrices; the backward pass takes two thirds of the time."""
    side = max(1, round((nbytes / 4 / LAYERS) ** 0.5))
    layers = tuple(
        Layer(
            name=f"layer{number}",
            forward_s=compute_s / 3 / LAYERS,
            backward_s=2 * compute_s / 3 / LAYERS,
            tensors=(TensorShape(name=f"layer{number}.weight", shape=(side, side)),),
        )
        for number in range(LAYERS)
    )
    return Workload(name="made up", batch=1, layers=layers, source="Made up.")


def racks(rate_bps: float) -> Cluster:
    """Two racks of as many hosts as there are jobs, behind uplinks like a host's link."""
    return Cluster.in_racks(2 * JOBS, Link(bandwidth_bps=rate_bps), racks=2, oversubscription=JOBS)


def hosts_of(job: int) -> tuple[int, int]:
    """One in each rack."""
    return job, JOBS + job


def rhythm(workload: Workload, cluster: Cluster) -> Rhythm:
    """What a job does on the uplink if it is alone there, as the simulator sees it."""
    pair = Cluster.uniform(2, cluster.links[0])
    found = simulate(DDP, workload, pair, network=FlowNetwork(pair))
    task_graph, outcome = found.task_graph, found.outcome
    ends_s = outcome.end_s[[ends[0] for ends in task_graph.step_ends]]
    last = len(ends_s) - 1
    moving = [task for task, label in enumerate(found.graph.label) if _sends(task_graph.labels[label], last)]
    return Rhythm(
        period_s=float(ends_s[-1] - ends_s[-2]),
        begin_s=float(outcome.start_s[moving].min() - ends_s[-2]),
        busy_s=float((outcome.end_s[moving] - outcome.start_s[moving]).sum()),
    )


def _sends(label: object, step: int) -> bool:
    return getattr(label, "kind", "") == "exchange" and getattr(label, "step", -1) == step


def chosen(workload: Workload, cluster: Cluster) -> tuple[str, ...]:
    """What strategy_aware takes for each job, given the load of all."""
    phase = Phase(until=1.0, work_per_s=1.0, steps_per_s=1 / workload.compute_s)
    traffic = Traffic(gradient_bytes=workload.gradient_bytes, strategy=DDP)
    jobs = [Job(name=str(number), arrival_s=0.0, gpus=2, phases=(phase,), traffic=traffic) for number in range(JOBS)]
    options, names = StrategyPrices(CANDIDATES).options(jobs, choose=True)
    found = shared(
        Links(cluster),
        [tuple((host, 1) for host in hosts_of(number)) for number in range(JOBS)],
        np.full(JOBS, workload.compute_s),
        np.full(JOBS, float(workload.gradient_bytes)),
        options,
        interleaved=True,
    )
    return tuple(names[number][option] for number, option in enumerate(found.option.tolist()))


def plans(workload: Workload, cluster: Cluster, draws: int) -> list[Plan]:
    plain, alone = (DDP,) * JOBS, rhythm(workload, cluster)
    in_turn = interleave([alone] * JOBS)
    drawn = np.random.default_rng(0).uniform(0.0, alone.period_s, (draws, JOBS)).tolist()
    return [
        *(Plan("unmanaged", plain, tuple(start_s)) for start_s in drawn),
        Plan("interleaved", plain, in_turn.start_s),
        Plan("strategies", chosen(workload, cluster), in_turn.start_s),
    ]


def predicted_s(plan: Plan, workload: Workload, cluster: Cluster) -> list[float]:
    tenants = [
        Tenant(strategy=strategy, workload=workload, devices=hosts_of(job), start_s=start_s)
        for job, (strategy, start_s) in enumerate(zip(plan.strategies, plan.start_s, strict=True))
    ]
    return [found.together_s for found in simulate_together(tenants, cluster)]


# -- one rank of one job -------------------------------------------------------------------------------------------


def run_rank(strategy: str, start_s: float, steps: int, workload: Workload, signal: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = ReplayedModel(workload)
    optimizer = NoUpdate(model.parameters())
    with laconic.attach(model, optimizer, strategy, timeout_s=READY_S):
        ends_s: list[float] = []
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                dist.barrier()
                print("ready", flush=True)
                _sleep_until(_common_start(signal) + start_s)
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
            ends_s.append(time.monotonic())
    if dist.get_rank() == 0:
        print(json.dumps({"ends_s": ends_s[WARM_UP:]}), flush=True)
    dist.destroy_process_group()


def _common_start(signal: Path) -> float:
    """When all jobs begin, once all are ready; of the clock that all processes of this machine share."""
    give_up_s = time.monotonic() + READY_S
    while not signal.exists():
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"the other jobs were not ready within {READY_S:g} s")
        time.sleep(0.02)
    return float(signal.read_text())


def _sleep_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.monotonic()))


# -- all jobs ------------------------------------------------------------------------------------------------------


def measured_s(plan: Plan, options: argparse.Namespace, cluster: Cluster, counts: Sequence[int]) -> list[float]:
    """What a step of each job takes, at its pace in the second half of the time in which all run."""
    ready, ends_s = [0] * JOBS, list[list[float]]([[]] * JOBS)
    with tempfile.TemporaryDirectory() as folder, VirtualHosts(cluster) as hosts, ThreadPoolExecutor(JOBS) as pool:
        signal = Path(folder) / "start"

        def run_job(job: int) -> None:
            def on_line(rank: int, line: str) -> None:
                if line == "ready":
                    ready[job] += 1
                    if sum(ready) == 2 * JOBS:
                        # Written elsewhere first: whoever sees the file sees all of it.
                        draft = signal.with_suffix(".draft")
                        draft.write_text(repr(time.monotonic() + BEGIN_S))
                        draft.rename(signal)
                elif line.startswith("{"):
                    ends_s[job] = json.loads(line)["ends_s"]

            command = [sys.executable, "-m", "benchmarks.shared_uplink", "--rank", "--strategy", plan.strategies[job]]
            command += ["--start", repr(plan.start_s[job]), "--steps", str(counts[job]), "--signal", str(signal)]
            command += ["--compute", options.compute, "--size", options.size]
            run_ranks(command, places_on(hosts, members=hosts_of(job)), timeout_s=900, on_line=on_line)

        for done in [pool.submit(run_job, job) for job in range(JOBS)]:
            done.result()
    last_s = min(times_s[-1] for times_s in ends_s)
    first_s = min(times_s[0] for times_s in ends_s)
    middle_s = (first_s + last_s) / 2
    return [1 / float(pace(np.array(times_s)[:, None], middle_s, last_s)[0]) for times_s in ends_s]


def show(plan: Plan, measured: Sequence[float], predicted: Sequence[float]) -> None:
    for job, (strategy, start_s, real_s, said_s) in enumerate(
        zip(plan.strategies, plan.start_s, measured, predicted, strict=True)
    ):
        print(
            f"{plan.name:12} job {job}  {strategy:42} from {start_s:5.2f} s  {real_s:6.3f} s measured  "
            f"{said_s:6.3f} s predicted  {said_s / real_s - 1:+5.0%}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="40mbit")
    parser.add_argument("--compute", default="1200ms")
    parser.add_argument("--size", default="2MB")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--json", type=Path)
    for hidden in ("--strategy", "--signal"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    compute_s = parse_quantity(options.compute, "time", "--compute")
    workload = made_up(compute_s, int(parse_quantity(options.size, "size", "--size")))
    if options.rank:
        run_rank(options.strategy, options.start, options.steps, workload, Path(options.signal))
        return
    cluster = racks(parse_bandwidth(options.rate, "--rate"))
    print(f"{cluster.describe()}; load average {os.getloadavg()[0]:.1f}", flush=True)
    rows: list[dict[str, object]] = []
    averages: dict[str, list[tuple[float, float]]] = {}
    for plan in plans(workload, cluster, options.draws):
        predicted = predicted_s(plan, workload, cluster)
        # So that whoever makes short steps does not leave the others alone.
        counts = [round(options.steps * max(predicted) / step_s) for step_s in predicted]
        measured = measured_s(plan, options, cluster, counts)
        show(plan, measured, predicted)
        rows.append({**asdict(plan), "measured_s": measured, "predicted_s": predicted})
        averages.setdefault(plan.name, []).extend(zip(measured, predicted, strict=True))
    before_s, said_before_s = np.mean(averages["unmanaged"], axis=0).tolist()
    for name, times_s in averages.items():
        real_s, said_s = np.mean(times_s, axis=0).tolist()
        print(
            f"{name:12} average {real_s:6.3f} s measured, {before_s / real_s:4.2f}x over unmanaged; {said_s:6.3f} s "
            f"predicted ({said_s / real_s - 1:+.0%}), {said_before_s / said_s:4.2f}x"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"cluster": cluster.describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
