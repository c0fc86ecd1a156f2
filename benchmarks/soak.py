"""Thousands of steps without a barrier: whether memory, threads or descriptors of any process grow.

    python -m benchmarks.soak [--steps 5000]

Four processes on this machine train a tiny model, with servers beside two of them or in pairs. Every process, servers
included, is looked at after 500 steps and at the end, all others standing still. Exits with 1 if one of them then has
more threads or descriptors than before, or more than 5 MiB more memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.lab.launch import places_here, run_ranks

STRATEGIES = ("ssp(staleness=3) / parameter_server(shards=2)", "asp / gossip")
NUM_WORKERS = 4
FIRST_LOOK = 500
TOLERANCE_MIB = 5.0
"""The allocator of a process that does the same all the time still moves by a few MiB."""
_PAUSE_S = 0.5
_TIMEOUT_S = 120.0

Holdings = dict[str, float]
"""memory_mib, threads and descriptors of one process."""


def holdings(pid: int) -> Holdings:
    """What a process holds now."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "memory_mib": int(status["VmRSS"].split()[0]) / 1024,
        "threads": int(status["Threads"]),
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


def children() -> list[int]:
    """Processes this one has started: its servers."""
    tasks = Path(f"/proc/{os.getpid()}/task")
    return sorted(int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split())


def look(session: laconic.Session) -> dict[str, Holdings]:
    """This rank and its servers, while no rank makes a step."""
    session.average()
    time.sleep(_PAUSE_S)
    dist.barrier()
    found = {f"rank {session.rank}": holdings(os.getpid())}
    found |= {f"server of rank {session.rank}": holdings(pid) for pid in children()}
    dist.barrier()
    return found


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(4, 32)
    looks: list[dict[str, Holdings]] = []
    began_s = time.monotonic()
    with laconic.attach(model, optimizer, options.role, timeout_s=_TIMEOUT_S) as session:
        for step in range(1, options.steps + 1):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (min(FIRST_LOOK, options.steps // 2), options.steps):
                looks.append(look(session))
        seconds = time.monotonic() - began_s
        if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
            raise SystemExit(f"rank {session.rank}: parameters are no numbers any more")
    (Path(options.out) / f"{dist.get_rank()}.json").write_text(json.dumps({"looks": looks, "seconds": seconds}))
    dist.destroy_process_group()


def soak(strategy: str, options: argparse.Namespace) -> bool:
    """Run one strategy and print what every process holds; whether nothing grows."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.soak", "--role", strategy, "--out", folder]
        command += ["--steps", str(options.steps)]
        limit_s = 300 + options.steps / 4
        run_ranks(command, places_here(NUM_WORKERS), timeout_s=limit_s, environment={"OMP_NUM_THREADS": "1"})
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(NUM_WORKERS)]
    print(f"\n{strategy}: {options.steps} steps in {found[0]['seconds']:.0f} s")
    print("process               memory MiB           threads      descriptors")
    steady = True
    for rank in found:
        before, after = rank["looks"]
        for name, first in before.items():
            last = after[name]
            grown = last["memory_mib"] - first["memory_mib"]
            memory = f"{first['memory_mib']:6.1f} -> {last['memory_mib']:6.1f}"
            counts = [f"{first[key]:3.0f} -> {last[key]:3.0f}" for key in ("threads", "descriptors")]
            more = any(last[key] > first[key] for key in ("threads", "descriptors"))
            grows = more or grown > TOLERANCE_MIB
            steady = steady and not grows
            print(f"{name:18s}  {memory}    {counts[0]}      {counts[1]}{'   GROWS' if grows else ''}")
    return steady


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        run_rank(options)
        return
    first = min(FIRST_LOOK, options.steps // 2)
    print(
        f"{NUM_WORKERS} workers; after {first} steps -> at the end; allowed are {TOLERANCE_MIB:g} MiB more, "
        "and not one thread or descriptor"
    )
    if not all([soak(strategy, options) for strategy in STRATEGIES]):  # noqa: C419 - both run, whatever the first says
        sys.exit(1)


if __name__ == "__main__":
    main()
