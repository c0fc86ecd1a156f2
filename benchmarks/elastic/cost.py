"""`python -m benchmarks.elastic.cost`: what it costs to be elastic while nothing fails.

Four Gloo ranks train the same model under the same strategy, with and without elastic=..., in turns. A step waits as
long as a larger model would compute (--step). In a third kind of turn, ranks that are not elastic make one additional
all-gather, as small as the vote of an elastic step, before each optimizer step. Printed are medians of all steps but
the first ones, and the differences from plain turns.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import laconic
from benchmarks.elastic.families import FAMILIES
from benchmarks.elastic.worker import BATCH, SEED, Samples, make_model
from laconic.lab.launch import places_here, run_ranks
from laconic.membership.agent import spawn_command
from laconic.membership.launcher import Launch, Launcher

_RANKS = 4
_FIRST = 10
"""Steps that are not counted."""
_KINDS = ("plain", "all-gather", "elastic")
_VOTE = 6
"""Numbers of 64 bits in a vote."""


def main() -> int:
    """Alternate; print each turn and the median of the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--step", type=float, nargs="+", default=[0.2], help="seconds that a step computes")
    parser.add_argument("--family", default="fusion", choices=list(FAMILIES))
    parser.add_argument("--rank", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        _train(options, Path(options.rank[0]), options.rank[1])
        return 0
    with tempfile.TemporaryDirectory(prefix="laconic-elastic-") as temporary:
        for step_s in options.step:
            added: dict[str, list[float]] = {kind: [] for kind in _KINDS[1:]}
            plain_s: list[float] = []
            for turn in range(options.turns):
                times_s = {kind: _run(options, step_s, Path(temporary) / f"{turn}-{kind}", kind) for kind in _KINDS}
                plain_s.append(times_s["plain"])
                for kind, found in added.items():
                    found.append(times_s[kind] - times_s["plain"])
                print("  ".join(f"{kind} {1e3 * time_s:.2f} ms" for kind, time_s in times_s.items()), flush=True)
            usual_s = statistics.median(plain_s)
            for kind, found in added.items():
                median_s, spread = statistics.median(found), f"{1e3 * min(found):+.2f} to {1e3 * max(found):+.2f}"
                print(f"steps of {1e3 * usual_s:.0f} ms, {kind}: {1e3 * median_s:+.2f} ms ({spread}), "
                      f"{median_s / usual_s:+.2%}", flush=True)  # fmt: skip
    return 0


def _run(options: argparse.Namespace, step_s: float, out: Path, kind: str) -> float:
    """The median time of a step of the first rank."""
    command = [sys.executable, "-m", "benchmarks.elastic.cost", "--steps", str(options.steps)]
    command += ["--step", str(step_s), "--family", options.family, "--rank", str(out), kind]
    if kind == "elastic":
        Launcher(Launch(spawn=spawn_command(command), num_workers=_RANKS, first=_RANKS)).run()
    else:
        run_ranks(command, places_here(_RANKS), timeout_s=600.0)
    ended: list[float] = json.loads(out.read_text(encoding="utf-8"))
    return statistics.median(later - earlier for earlier, later in pairwise(ended[_FIRST:]))


def _train(options: argparse.Namespace, out: Path, kind: str) -> None:
    torch.set_num_threads(1)
    elastic, rows = kind == "elastic", torch.zeros(_RANKS, _VOTE, dtype=torch.int64)
    model, optimizer = make_model()
    if not elastic:
        dist.init_process_group("gloo")
    joining = laconic.Elastic(min_ranks=_RANKS, max_ranks=_RANKS) if elastic else None
    ended: list[float] = []
    with laconic.attach(model, optimizer, FAMILIES[options.family], elastic=joining, timeout_s=60) as session:
        for inputs, targets in _batches(session, elastic=elastic):
            time.sleep(options.step[0])
            nn.functional.cross_entropy(model(inputs), targets).backward()
            if kind == "all-gather":
                dist.all_gather(list(rows), rows[0].clone())
            optimizer.step()
            optimizer.zero_grad()
            ended.append(time.perf_counter())
            if len(ended) == options.steps:
                break
        rank = session.rank
    if rank == 0:
        out.write_text(json.dumps(ended), encoding="utf-8")
    if not elastic:
        dist.destroy_process_group()


def _batches(session: laconic.Session, *, elastic: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same number of samples for each rank, as one would write it with and without elastic."""
    samples = Samples()
    if elastic:
        yield from session.batches(DataLoader(samples, batch_size=BATCH, shuffle=True), epochs=10**6, seed=SEED)
        return
    sampler = DistributedSampler(samples, seed=SEED)
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from DataLoader(samples, batch_size=BATCH // _RANKS, sampler=sampler)


if __name__ == "__main__":
    raise SystemExit(main())
