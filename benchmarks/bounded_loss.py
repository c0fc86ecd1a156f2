"""bounded_loss beside a ring over TCP, in the lab: times with lost packets or a late host, and the loss of the model.

    python -m benchmarks.bounded_loss [--hosts 4] [--rate 20mbit] [--steps 300] [--size tiny]
                                     [--faults none loss overflow late] [--strategies ...]

Every contender trains the same GPT on the same batches in a job of its own, one exchange per step. Faults are real:

    loss      every packet is lost with a probability of --loss, half of it on each of the two links it crosses
    overflow  the switch's token bucket towards every host has a queue of --queue instead of 100 ms, which overflows
    late      the last host sleeps for --late before one backward pass in twenty, drawn at random

Times are those of the exchanges, from when a rank begins one until it has the mean, on all hosts but the late one; the
first --warm-up steps do not count. The loss is that of the trained model on batches that no rank has trained on; its
change is that from the first contender without faults, and "equal" says whether replicas ended identical.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import laconic
from benchmarks.found_by_ranks import found_by_ranks, tell
from laconic.cluster import Cluster, Link, parse_bandwidth
from laconic.core.event import EventList
from laconic.core.switch import enter_network, switch_of_lab
from laconic.experiments.tasks.contract import TaskConfig
from laconic.experiments.tasks.text import TextTask
from laconic.units import parse_quantity

RING = "bsp / all_reduce(ring) / none / sequential"
CONTENDERS = (RING, "bsp / bounded_loss / none / sequential")
FAULTS = ("none", "loss", "overflow", "late")
_COMMAND = [sys.executable, "-m", "benchmarks.bounded_loss"]
_LATE_SHARE = 0.05
_SHORT_BURST_BYTES = 20_000
_TEST_BATCHES = 50
_ROW = "{:<9} {:<36} {:>9} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6}"


@dataclass(frozen=True)
class Found:
    """What one rank has measured."""

    seconds: list[float]
    lost_ratio: float
    again_bytes: int
    loss: float
    digest: int
    wall_s: float


def shorten_queues(rate: str, queue_s: float) -> None:
    """Give the switch's token buckets queues that overflow."""
    from pyroute2 import IPRoute

    switch = switch_of_lab(os.environ)
    if switch is None:
        raise SystemExit("queues can be shortened only in a lab of virtual hosts")
    enter_network(switch.namespace)
    bytes_per_s = int(parse_bandwidth(rate, "--rate") / 8)
    links: Any = IPRoute()  # whose methods are made at run time
    with contextlib.closing(links):
        shaped = [one["index"] for one in links.get_qdiscs() if one.get_attr("TCA_KIND") == "tbf"]
        for index in shaped:
            queue = f"{1e3 * queue_s:g}ms"
            links.tc("replace", "tbf", index, rate=bytes_per_s, burst=_SHORT_BURST_BYTES, latency=queue)
    print(f"{len(shaped)} queues shortened")


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if options.fault == "overflow" and rank == 0:
        # A process of its own: a thread that enters another network stays there.
        subprocess.run([*_COMMAND, "--shorten", "--rate", options.rate, "--queue", str(options.queue)], check=True)
    dist.barrier()
    task = TextTask(TaskConfig(size=options.size))
    model = task.model()
    optimizer, events, late = task.optimizer(model), EventList(), random.Random(7)
    began_s = time.perf_counter()
    with laconic.attach(model, optimizer, options.strategy, timeout_s=120, events=events) as session:
        for step in range(options.steps):
            inputs, targets = task.batch(step, rank)
            loss = task.loss(model(inputs), targets)
            if late.random() < _LATE_SHARE and rank == last and options.fault == "late":
                time.sleep(options.late)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        lost = session.lost_ratio
        again = session.traffic.by_operation().get("control/sent again", 0)
    wall_s = time.perf_counter() - began_s
    with torch.no_grad():
        tests = [task.batch(options.steps + number, last + 1) for number in range(_TEST_BATCHES)]
        losses = [task.loss(model(inputs), targets).item() for inputs, targets in tests]
    bits = torch.cat([parameter.detach().reshape(-1).view(torch.int32).long() for parameter in model.parameters()])
    digest = int((bits * torch.arange(1, bits.numel() + 1)).sum())
    seconds = [
        event.duration_s for event in events.events if event.kind == "exchange" and event.step >= options.warm_up
    ]
    tell(vars(Found(seconds, lost, again, float(np.mean(losses)), digest, wall_s)))
    dist.destroy_process_group()


def measure(strategy: str, fault: str, options: argparse.Namespace) -> dict[int, Found]:
    lost = parse_quantity(options.loss, "share", "--loss") if fault == "loss" else 0.0
    link = Link(bandwidth_bps=parse_bandwidth(options.rate, "--rate"), loss_ratio=1 - (1 - lost) ** 0.5)
    cluster = Cluster.uniform(options.hosts, link)
    arguments = ["--strategy", strategy, "--fault", fault, "--warm-up", str(options.warm_up)]
    for name in ("rate", "steps", "size", "late", "queue"):
        arguments += [f"--{name}", str(getattr(options, name))]
    found = found_by_ranks("benchmarks.bounded_loss", arguments, cluster, timeout_s=3600)
    return {rank: Found(**told) for rank, told in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm-up", type=int, default=40)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--strategies", nargs="+", default=CONTENDERS, help="compared with the first of them")
    parser.add_argument("--late", type=float, default=1.0, help="seconds")
    parser.add_argument("--loss", default="1%", help="share of the packets that are lost")
    parser.add_argument("--queue", type=float, default=0.005, help="seconds of a full token bucket's queue")
    parser.add_argument("--shorten", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--strategy", default="", help=argparse.SUPPRESS)
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.shorten:
        shorten_queues(options.rate, options.queue)
        return
    if options.strategy:
        run_rank(options)
        return
    print(f"{options.hosts} hosts behind {options.rate}, GPT ({options.size}), {options.steps} steps")
    names = ("fault", "strategy", "p50", "p99", "to first", "lost", "again", "loss", "change", "wall", "equal")
    print(_ROW.format(*names))
    usual: float | None = None
    for fault in options.faults:
        ring_s: float | None = None
        for strategy in options.strategies:
            found = measure(strategy, fault, options)
            punctual = [found[rank].seconds for rank in range(options.hosts - (fault == "late"))]
            median_s, tail_s = np.quantile(np.concatenate(punctual), (0.5, 0.99))
            ring_s = ring_s or tail_s
            usual = usual or found[0].loss
            print(
                _ROW.format(
                    fault,
                    strategy.removesuffix(" / sequential"),
                    f"{1e3 * median_s:.0f} ms",
                    f"{1e3 * tail_s:.0f} ms",
                    f"{ring_s / tail_s:.2f}x",
                    f"{np.mean([one.lost_ratio for one in found.values()]):.2%}",
                    f"{sum(one.again_bytes for one in found.values()) / 1e6:.1f} MB",
                    f"{found[0].loss:.3f}",
                    f"{found[0].loss / usual - 1:+.2%}",
                    f"{max(one.wall_s for one in found.values()):.0f} s",
                    "yes" if len({one.digest for one in found.values()}) == 1 else "NO",
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
