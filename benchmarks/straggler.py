"""One worker five times as slow as the others: who is held up by it, and how much.

    python -m benchmarks.straggler [--seconds 10] [--compute-ms 20] [--slowdown 5]

Four processes on this machine train a small model over the loopback interface. What computing would take is slept, so
that few cores suffice. Each strategy runs twice, without and with one slowed worker; the ratio compares steps per
second. With ssp the others may lead by `staleness` steps and are bound to the slow worker from then on: it is shown
with a bound they do not reach within the run, and with one they do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.lab.launch import places_here, run_ranks

STRATEGIES = (
    "bsp / all_reduce",
    "bsp / parameter_server(shards=1)",
    "local_sgd(period=8) / all_reduce",
    "ssp(staleness=3) / parameter_server(shards=1)",
    "ssp(staleness=1000) / parameter_server(shards=1)",
    "asp / parameter_server(shards=1)",
    "asp / gossip",
)
NUM_WORKERS = 4
SLOW = 1
"""The rank that is slowed: not 0, which has the server beside it."""
_WARM_UP = 5
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Run:
    """What one rank does: sleep, compute, step; until its time is up, or a number of times where all go in step."""

    strategy: str
    compute_s: float
    seconds: float
    num_steps: int | None

    def rate(self) -> float:
        """Steps per second of this rank."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batch = torch.randn(4, 64)

        def step(compute_s: float) -> None:
            time.sleep(compute_s)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        with laconic.attach(model, optimizer, self.strategy, timeout_s=_TIMEOUT_S):
            for _ in range(_WARM_UP):
                step(0.0)
            dist.barrier()
            began_s, made = time.monotonic(), 0
            while time.monotonic() - began_s < self.seconds if self.num_steps is None else made < self.num_steps:
                step(self.compute_s)
                made += 1
            return made / (time.monotonic() - began_s)


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rates: dict[str, list[float]] = {}
    for strategy in STRATEGIES:
        for slowdown in (1.0, options.slowdown):
            compute_s = options.compute_ms / 1e3 * (slowdown if rank == SLOW else 1.0)
            # Where all go in step they all make as many: as many as take the time with the slow worker.
            waits = laconic.Strategy.parse(strategy).synchronization.barrier
            num_steps = max(8, round(options.seconds * 1e3 / (options.compute_ms * options.slowdown)))
            run = Run(strategy, compute_s, options.seconds, num_steps if waits else None)
            rates.setdefault(strategy, []).append(run.rate())
            dist.barrier()
    (Path(options.out) / f"{rank}.json").write_text(json.dumps(rates))
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> list[dict[str, list[float]]]:
    """Steps per second of every rank, by strategy, without and with the slow worker."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.straggler", "--role", "rank", "--out", folder]
        command += ["--seconds", str(options.seconds), "--compute-ms", str(options.compute_ms)]
        command += ["--slowdown", str(options.slowdown)]
        limit_s = 60 + len(STRATEGIES) * (3 * options.seconds + 60)
        run_ranks(command, places_here(NUM_WORKERS), timeout_s=limit_s, environment={"OMP_NUM_THREADS": "1"})
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(NUM_WORKERS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run with the slow worker")
    parser.add_argument("--compute-ms", type=float, default=20.0, help="slept in each step")
    parser.add_argument("--slowdown", type=float, default=5.0, help="by what the one worker is slowed")
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        run_rank(options)
        return
    print(
        f"{NUM_WORKERS} workers, {options.compute_ms:g} ms of computing per step, rank {SLOW} slowed "
        f"{options.slowdown:g}x; load average {os.getloadavg()[0]:.1f} before the run"
    )
    print("steps per second                                   all alike   one slowed: others  ratio   slow one  ratio")
    found = measure(options)
    others = [rank for rank in range(NUM_WORKERS) if rank != SLOW]
    for strategy in STRATEGIES:
        even, fast = (sum(found[rank][strategy][place] for rank in others) / len(others) for place in (0, 1))
        even_slow, slow = found[SLOW][strategy]
        print(f"{strategy:50s} {even:9.1f}   {fast:18.1f}  {fast / even:5.2f}   {slow:8.1f}  {slow / even_slow:5.2f}")


if __name__ == "__main__":
    main()
