"""`python -m benchmarks.elastic.by_time`: DiLoCo with one rank that is three times slower, by steps and by time.

By steps, a round ends when the slowest rank has made its steps. By time (`seconds`), a round ends after a fixed time,
in which the other ranks make their steps, and the change of each rank is weighted by the number of steps that it has
made. The benchmark prints the samples per second of all ranks, compared with the throughput of all ranks together if no
rank ever waited, and the loss on samples never trained on, after about the same number of samples.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import laconic
from benchmarks.elastic.job import run_job
from benchmarks.elastic.log import events_of
from benchmarks.elastic.worker import BATCH, SEED, Samples, digest, held_out, make_model

_RANKS = 4
_SAMPLES = 200_000
"""So many that none is seen often: the loss on other samples then tells how much was learnt."""
_SLACK = 1.03
"""Seconds of a round, as a multiple of what its steps take the other ranks: they are to make all of them."""


def main() -> int:
    """Alternate both ways; print medians of rates and means of losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=3.0, help="how much longer the slow rank takes")
    parser.add_argument("--sample-ms", type=float, default=2.0, help="what a sample takes the other ranks")
    parser.add_argument("--period", type=int, default=32)
    parser.add_argument(
        "--rounds", type=int, default=20, help="by steps; by time so many more that samples are as many"
    )
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    sample_s, size = options.sample_ms / 1e3, BATCH // _RANKS
    fleet = _RANKS - 1 + 1 / options.slower
    seconds = round(_SLACK * options.period * size * sample_s, 3)
    more = round(options.rounds * _RANKS / fleet)
    ways = {
        "by steps": (f"diloco(period={options.period}) / all_reduce / int8 + error_feedback / fusion", options.rounds),
        "by time": (
            f"diloco(period={options.period}, seconds={seconds}s) / all_reduce / int8 + error_feedback / fusion",
            more,
        ),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, list[float]] = {way: [] for way in ways}
    trained: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="laconic-elastic-") as temporary:
        for seed in range(options.seeds):
            for way, (strategy, rounds) in ways.items():
                folder = Path(temporary) / f"{seed}-{way}"
                outcome = run_job(
                    strategy,
                    folder,
                    seed=seed,
                    target=f"{__spec__.name}:train_alone",
                    arguments={
                        "slower": options.slower,
                        "sample_s": sample_s,
                        "last_step": rounds * options.period,
                        "seed": seed,
                    },
                    preload=("benchmarks.elastic.preloaded",),
                )
                if outcome.problem:
                    print(f"{way}, seed {seed}: the job failed: {outcome.problem}")
                    return 1
                rate, trained[way] = _rate(folder)
                rates[way].append(rate)
                losses[way].append(float((folder / "loss").read_text()))
                print(f"{way}, seed {seed}: {rate:.0f} samples/s, loss {losses[way][-1]:.4f}", flush=True)
    possible = fleet / sample_s
    print(
        f"possible: {possible:.0f} samples/s; rounds of {options.period} steps or {seconds:g} s; {options.seeds} seeds"
    )
    for way, found in rates.items():
        rate, loss = statistics.median(found), statistics.mean(losses[way])
        changes = [one / first - 1 for one, first in zip(losses[way], losses["by steps"], strict=True)]
        print(
            f"{way:9} {rate:5.0f} samples/s ({min(found):.0f} .. {max(found):.0f}), {rate / possible:.0%}; loss "
            f"{loss:.4f}, {statistics.mean(changes):+.2%} (+-{statistics.pstdev(changes):.2%}), {trained[way]} samples"
        )
    return 0


def _rate(folder: Path) -> tuple[float, int]:
    """Samples per second of all ranks in the second half of the run, and all samples."""
    rate, every = 0.0, 0
    for path in folder.glob("*.jsonl"):
        seen = [event.data for event in events_of(path) if event.kind == "digest"]
        points = [(float(str(data["wall_s"])), int(str(data["samples"]))) for data in seen]
        (began_s, before), (ended_s, last) = points[len(points) // 2], points[-1]
        rate += (last - before) / (ended_s - began_s)
        every += last
    return rate, every


def train_alone(strategy: str, folder: str, *, slower: float, sample_s: float, last_step: int, seed: int = 0) -> None:
    """What each worker runs: every rank draws samples of its own."""
    torch.set_num_threads(1)
    model, optimizer = make_model(seed=seed)
    place, slot = Path(folder), int(os.environ["LOCAL_RANK"])
    sample_s *= slower if slot == 0 else 1.0
    log = laconic.EventLog(place / f"{os.environ['LACONIC_WORKER']}.jsonl")
    elastic = laconic.Elastic(min_ranks=1, max_ranks=8)
    samples, generator = Samples(_SAMPLES), torch.Generator().manual_seed(SEED + _RANKS * seed + slot)
    session = laconic.attach(model, optimizer, strategy, elastic=elastic, timeout_s=60, events=log)
    every, used = session.strategy.synchronization.interval, 0
    with session:
        while session.step < last_step:
            drawn = torch.randint(len(samples), (BATCH // _RANKS,), generator=generator)
            time.sleep(sample_s * len(drawn))
            nn.functional.cross_entropy(model(samples.inputs[drawn]), samples.targets[drawn]).backward()
            optimizer.step()
            optimizer.zero_grad()
            used += len(drawn)
            if session.step % every == 0:
                data = {"digest": digest(model.parameters()), "wall_s": time.time(), "samples": used}
                data["view"] = session.views[-1].view.number
                log.write(laconic.Event("digest", time.monotonic(), session.rank, session.step, 0.0, {**data}))
        if session.rank == 0:
            (place / "loss").write_text(str(held_out(model)))


if __name__ == "__main__":
    raise SystemExit(main())
