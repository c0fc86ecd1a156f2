"""`python -m benchmarks.elastic.losses`: is the loss the same when workers are killed, or when parts are unequal?

The job of `benchmarks.elastic` for a given number of steps, several seeds each: undisturbed; with workers that are
killed and replaced; with one rank that is three times slower, in equal parts and by speed. Every sample is used once.
The loss is that of the replica at the end, on samples never trained on.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.elastic.families import FAMILIES
from benchmarks.elastic.job import run_job
from benchmarks.elastic.worker import BATCH

_RANKS = 4
CASES = {
    "undisturbed": (False, 1.0, False),
    "kills": (True, 1.0, False),
    "slow rank, equal parts": (False, 3.0, False),
    "slow rank, by speed": (False, 3.0, True),
}
"""Whether workers are killed, how much longer a sample takes the first rank, and whether parts are by speed."""


def main() -> int:
    """One line for each case; 1 if a job failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=30.0, help="what a step of four equal ranks computes")
    parser.add_argument("--family", default="fusion", choices=["sequential", "wfbp", "fusion", "powersgd", "demo"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    # All are struck well before the last step.
    gap_s = 0.6 * arguments.steps * arguments.step_ms / 1e3 / max(1, arguments.kills)
    found: dict[str, list[float]] = {name: [] for name in arguments.cases}
    with tempfile.TemporaryDirectory(prefix="laconic-elastic-") as temporary:
        for seed in range(arguments.seeds):
            for name, losses in found.items():
                killed, slower, balance = CASES[name]
                folder = Path(temporary) / f"{name} {seed}"
                outcome = run_job(
                    FAMILIES[arguments.family],
                    folder,
                    kills=arguments.kills if killed else 0,
                    gap_s=gap_s,
                    seed=seed,
                    target="benchmarks.elastic.unequal:train_unequal",
                    arguments={
                        "slower": slower,
                        "sample_s": arguments.step_ms / 1e3 * _RANKS / BATCH,
                        "balance": balance,
                        "last_step": arguments.steps,
                        "seed": seed,
                        "samples": BATCH * arguments.steps,
                    },
                    preload=("benchmarks.elastic.preloaded",),
                )
                if outcome.problem:
                    print(f"{name}, seed {seed}: the job failed: {outcome.problem}")
                    return 1
                losses.append(float((folder / "loss").read_text()))
                struck = sum(not one.polite for one in outcome.struck)
                print(
                    f"{name}, seed {seed}: {losses[-1]:.5f} after {arguments.steps} steps, {struck} kills", flush=True
                )
    base = found[arguments.cases[0]]
    for name, losses in found.items():
        changes = [loss / first - 1 for loss, first in zip(losses, base, strict=True)]
        spread = statistics.pstdev(changes)
        seeds = " ".join(f"{loss:.4f}" for loss in losses)
        print(f"{name:24} {statistics.mean(losses):.4f}  {statistics.mean(changes):+.2%} (+-{spread:.2%})  {seeds}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
