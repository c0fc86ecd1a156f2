"""`python -m benchmarks.elastic.goodput`: how much of the time is useful while workers are killed every minute.

Four Gloo ranks train; a step waits as long as a larger model would compute (--step). Workers are killed at random
moments, --every seconds apart on average, and replaced. Goodput is the time that all completed steps would have taken
without a fault, the median step's time each, as a share of the time they took.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import argparse
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

from benchmarks.elastic.families import FAMILIES
from benchmarks.elastic.job import Outcome, run_job
from benchmarks.elastic.worker import BATCH

_RANKS = 4


def main() -> int:
    """One line per family; 1 if a job failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=float, default=60.0, help="mean seconds between two kills")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--step", type=float, default=0.2, help="seconds that a step of four ranks computes")
    parser.add_argument("--families", nargs="*", default=["fusion"], choices=list(FAMILIES))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name in arguments.families:
        with tempfile.TemporaryDirectory(prefix="laconic-elastic-") as temporary:
            outcome = run_job(
                FAMILIES[name],
                Path(temporary),
                kills=arguments.kills,
                gap_s=arguments.every,
                seed=arguments.seed,
                arguments={"sleep_s": 0.0, "sample_s": arguments.step * _RANKS / BATCH},
                preload=("benchmarks.elastic.preloaded",),
            )
        if outcome.problem:
            print(f"{name}: the job failed: {outcome.problem}")
            return 1
        print(f"{name}: {goodput(outcome)}", flush=True)
    return 0


def goodput(outcome: Outcome) -> str:
    """What a job achieved, in words."""
    ended: dict[int, float] = {}
    for wall_s, _, step in sorted(outcome.log.commits):
        ended.setdefault(step, wall_s)
    steps = sorted(ended)
    took = [ended[later] - ended[step] for step, later in pairwise(steps)]
    spent_s, step_s = ended[steps[-1]] - ended[steps[0]], statistics.median(took)
    per_kill_s = (spent_s - len(took) * step_s) / max(1, len(outcome.struck))
    return (
        f"{len(took) * step_s / spent_s:.2%} of {spent_s:.0f} s with {len(outcome.struck)} kills, {len(took)} steps of "
        f"{1e3 * step_s:.1f} ms; {per_kill_s:.2f} s lost for each kill, slower steps of three ranks included; at 12 "
        f"kills an hour that would be {1 - 12 * per_kill_s / 3600:.2%}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
