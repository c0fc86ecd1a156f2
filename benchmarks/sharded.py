"""Sharded models on four processes: PyTorch's own beside strategies; losses, and steps behind a slow link.

    python -m benchmarks.sharded between --losses [--steps 500] [--seeds 3] [--size tiny] [--only diloco] [--at-once 1]
    python -m benchmarks.sharded between --speed [--bandwidth 100mbit] [--size medium]
    python -m benchmarks.sharded inside --losses
    python -m benchmarks.sharded inside --speed [--ranks-per-host 2]

between: FSDP2 (fully_shard) shards a GPT over two processes, and two such groups average by HSDP's own all-reduce, or
by laconic. inside: FSDP2 shards it over all four, and sends as it does by itself, or as laconic says. For losses all
run on this machine, nothing held back, and pairs of processes count as hosts; "change" is beside PyTorch's own with the
same seed, and beside the same synchronization without compression where it is not bsp: the mean over seeds and its
standard error. For speed every group, or every process, is a virtual host, and the links between them are shaped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic
from benchmarks.convergence.recipe import Recipe
from laconic.cluster import Cluster, Link, parse_bandwidth
from laconic.core.hosts import HOST_VARIABLE
from laconic.errors import LaconicError
from laconic.experiments.small_gpt import SmallGpt
from laconic.experiments.tasks import Task, TaskConfig, make_task
from laconic.lab.launch import places_here, run_ranks
from laconic.lab.virtual_hosts import VirtualHosts, places_on

HSDP, FSDP, ALONE = "native HSDP", "native FSDP2", "no communication between islands"
LOSSES = (
    HSDP,
    "bsp / all_reduce / none / fusion",
    "bsp / all_reduce / int8 + error_feedback / fusion",
    "bsp / all_reduce / int4 + error_feedback / fusion",
    "diloco(period=16) / all_reduce / none / fusion",
    "diloco(period=16) / all_reduce / int4 + error_feedback / fusion",
)
SPEED = (
    HSDP,
    "bsp / all_reduce / none / fusion",
    "bsp / all_reduce / int8 + error_feedback / fusion",
    "bsp / all_reduce / int4 + error_feedback / fusion",
    "diloco(period=64) / all_reduce / int4 + error_feedback / fusion",
    "streaming_diloco(period=64) / all_reduce / int4 + error_feedback / fusion",
    ALONE,
)
INSIDE = (
    FSDP,
    "bsp / sharded / none / fusion",
    "bsp / sharded(weights=bf16) / bf16 / fusion",
    "bsp / sharded(weights=int8) / int8 / fusion",
    "bsp / sharded(weights=int8) / int4 / fusion",
    "bsp / sharded(weights=int8) / int4 + error_feedback / fusion",
)
TWO_LEVELS = (
    "bsp / sharded(weights=int8, between=int8) / int8 / fusion",
    "bsp / sharded(weights=int8, between=int4) / int8 / fusion",
)
_HELD_OUT_RANK, _HELD_OUT_BATCHES = 1000, 40
_WARM_STEPS = 3


@dataclass(frozen=True)
class Job:
    """One training."""

    contender: str
    size: str
    batch: int
    steps: int
    seed: int
    rate: float
    link: str
    """Empty: nothing is held back."""
    ranks_per_host: int = 2

    @property
    def inside(self) -> bool:
        """Whether FSDP2 shards over all processes."""
        return self.contender in (*INSIDE, *TWO_LEVELS)


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    job: Job
    loss: float
    """On held-out text, of the averaged model."""
    step_s: float
    payload_bytes: int
    """What laconic counted, per rank and step."""


def train(job: Job) -> Outcome:
    """As one of four ranks."""
    inside = job.inside
    if not job.link:
        os.environ[HOST_VARIABLE] = f"host {dist.get_rank() // job.ranks_per_host}"
    grid = (1, 4) if inside else (2, 2)
    mesh = init_device_mesh("cpu", grid, mesh_dim_names=("replicate", "shard"))
    task = make_task(TaskConfig(size=job.size, batch=job.batch, seed=job.seed))
    model = task.model()
    assert isinstance(model, SmallGpt)
    over = mesh if job.contender == HSDP else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)
    recipe = Recipe(optimizer="adamw", learning_rate=job.rate)
    optimizers = recipe.make(model)
    session = None
    if job.contender not in (HSDP, FSDP, ALONE):
        among = mesh["shard" if inside else "replicate"]
        session = laconic.attach(
            model, optimizers, job.contender, process_group=among, total_steps=job.steps, timeout_s=120
        )
    began_s = 0.0
    sent = 0
    for step, rate in enumerate(recipe.rates(job.steps)):
        if step == _WARM_STEPS:
            dist.barrier()
            began_s = time.perf_counter()
        inputs, targets = task.batch(step, dist.get_rank())
        task.loss(model(inputs), targets).backward()
        recipe.step(optimizers, rate)
    dist.barrier()
    step_s = (time.perf_counter() - began_s) / (job.steps - _WARM_STEPS)
    if session is not None:
        sent = session.traffic.sent_bytes("payload")
        if not session.strategy.exchanges_gradients():
            session.average()
        session.detach()
    return Outcome(job, _held_out(model, task), step_s, sent // job.steps)


def _held_out(model: nn.Module, task: Task) -> float:
    model.eval()
    with torch.no_grad():
        batches = [task.batch(step, _HELD_OUT_RANK) for step in range(_HELD_OUT_BATCHES)]
        return statistics.fmean(task.loss(model(inputs), targets).item() for inputs, targets in batches)


def run(job: Job) -> Outcome:
    """On four processes of this machine, behind the job's link if it has one."""
    with tempfile.TemporaryDirectory(prefix="laconic-") as folder:
        result = Path(folder) / "outcome.json"
        command = [sys.executable, "-m", "benchmarks.sharded", "--rank", json.dumps(asdict(job)), str(result)]
        environment = {"OMP_NUM_THREADS": "1"}
        if job.link:
            link = Link(bandwidth_bps=parse_bandwidth(job.link, "--bandwidth"))
            with VirtualHosts(Cluster.uniform(4 // job.ranks_per_host, link)) as hosts:
                places = places_on(hosts, ranks_per_host=job.ranks_per_host)
                run_ranks(command, places, timeout_s=1800, environment=environment)
        else:
            run_ranks(command, places_here(4), timeout_s=1800, environment=environment)
        record = json.loads(result.read_text(encoding="utf-8"))
        return Outcome(job, record["loss"], record["step_s"], record["payload_bytes"])


def loss_lines(found: dict[tuple[str, int], Outcome], seeds: int) -> Iterator[str]:
    """Means over seeds, beside what they are compared with."""
    yield f"{'':72} {'loss':>8} {'change':>8} {'':9} {'bytes/step':>10}  by seed"
    for contender in dict.fromkeys(name for name, _ in found):
        rows = [found[contender, seed] for seed in range(seeds)]
        rule = contender.partition(" / ")[0]
        native = FSDP if rows[0].job.inside else HSDP
        beside = native if contender == native or rule == "bsp" else f"{rule} / all_reduce / none / fusion"
        gaps = [row.loss / found[beside, seed].loss - 1 for seed, row in enumerate(rows)]
        spread = f"(+-{statistics.stdev(gaps) / math.sqrt(seeds) if seeds > 1 else 0.0:.2%})"
        by_seed = " ".join(f"{row.loss:.4f}" for row in rows)
        mean = statistics.fmean(row.loss for row in rows)
        change = f"{statistics.fmean(gaps):+8.2%} {spread}"
        yield f"{contender:72} {mean:8.4f} {change} {rows[0].payload_bytes:10}  {by_seed}"


def speed_lines(found: list[Outcome]) -> Iterator[str]:
    """Steps per second beside PyTorch's own, and beside no communication between islands."""
    native = next(row.step_s for row in found if row.job.contender in (HSDP, FSDP))
    alone = next((row.step_s for row in found if row.job.contender == ALONE), None)
    yield f"{'':78} {'ms/step':>8} {'native':>8} {'alone':>6} {'bytes/step':>10}"
    for row in found:
        ratios = f"{native / row.step_s:7.2f}x {'' if alone is None else f'{alone / row.step_s:.2f}':>6}"
        yield f"{row.job.contender:78} {1e3 * row.step_s:8.1f} {ratios} {row.payload_bytes:10}"


def main() -> int:
    """Train all, print the table."""
    if sys.argv[1:2] == ["--rank"]:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        outcome = train(Job(**json.loads(sys.argv[2])))
        if dist.get_rank() == 0:
            Path(sys.argv[3]).write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        dist.barrier()
        dist.destroy_process_group()
        return 0
    options = _options()
    try:
        if options.losses:
            print("\n".join(loss_lines(_losses(options), options.seeds)))
        if options.speed:
            speeds = []
            shared = options.ranks_per_host > 1
            inside = (*INSIDE, *TWO_LEVELS) if shared else INSIDE
            for contender in inside if options.where == "inside" else SPEED:
                steps = options.steps or (2 * 64 + _WARM_STEPS if "period=64" in contender else 20)
                job = Job(
                    contender,
                    options.size or "medium",
                    options.batch or 1,
                    steps,
                    0,
                    options.rate,
                    options.bandwidth,
                    options.ranks_per_host,
                )
                speeds.append(run(job))
                print(f"{contender}: {1e3 * speeds[-1].step_s:.1f} ms/step", file=sys.stderr, flush=True)
            print("\n".join(speed_lines(speeds)))
    except LaconicError as exc:
        print(exc, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped.", file=sys.stderr)
        return 130
    return 0


def _losses(options: argparse.Namespace) -> dict[tuple[str, int], Outcome]:
    """Several trainings at once, if so asked."""
    contenders = [
        contender
        for contender in ((*INSIDE, *TWO_LEVELS) if options.where == "inside" else LOSSES)
        if not options.only or contender.startswith(options.only)
    ]
    size, batch, steps = options.size or "tiny", options.batch or 2, options.steps or 500
    jobs = [
        Job(contender, size, batch, steps, seed, options.rate, "")
        for seed in range(options.seeds)
        for contender in contenders
    ]
    found = {}
    with ThreadPoolExecutor(options.at_once) as pool:
        for job, outcome in zip(jobs, pool.map(run, jobs), strict=True):
            found[job.contender, job.seed] = outcome
            print(f"{job.contender}, seed {job.seed}: {outcome.loss:.4f}", file=sys.stderr, flush=True)
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharded", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("where", choices=["between", "inside"], help="between groups of shards, or among the shards")
    parser.add_argument("--losses", action="store_true", help="train for many steps, nothing held back")
    parser.add_argument("--speed", action="store_true", help="time steps behind a link")
    parser.add_argument("--steps", type=int, help="default: 500 for losses, for speed 20 or four rounds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=["diloco"], help="train only what this synchronization is compared in")
    parser.add_argument("--at-once", type=int, default=1, help="trainings at the same time, of four processes each")
    parser.add_argument("--size", choices=["tiny", "small", "medium"], help="default: tiny for losses, else medium")
    parser.add_argument("--batch", type=int, help="windows per rank and step; default: 2 for losses, else 1")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--bandwidth", default="100mbit")
    parser.add_argument(
        "--ranks-per-host",
        type=int,
        choices=[1, 2],
        help="processes on each virtual host, for speed; default: 2 between groups, 1 inside",
    )
    options = parser.parse_args()
    options.ranks_per_host = options.ranks_per_host or (1 if options.where == "inside" else 2)
    if options.where == "between" and options.ranks_per_host == 1:
        parser.error("between groups of shards, the two processes of a group share a host: --ranks-per-host 2.")
    if options.at_once < 1:
        parser.error(f"--at-once must be at least 1, got {options.at_once}.")
    if not options.losses and (options.only or options.at_once > 1):
        parser.error("--only and --at-once are for --losses.")
    if options.where == "inside" and options.only:
        parser.error("--only diloco is for groups of shards: between.")
    if not (options.losses or options.speed):
        parser.error("give --losses or --speed, or both.")
    return options


if __name__ == "__main__":
    sys.exit(main())
