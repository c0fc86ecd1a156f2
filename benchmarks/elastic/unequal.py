"""`python -m benchmarks.elastic.unequal`: one of four ranks takes three times as long for a sample as the others.

The same job twice, with equal parts of each step and with Elastic(balance=True): samples per second of all ranks in the
second half of the run, beside what the ranks could do together if none of them ever waited.
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
from benchmarks.elastic.worker import BATCH, SAMPLES, train

_RANKS = 4


def main() -> int:
    """Alternate both ways; print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=3.0, help="how much longer the slow rank takes")
    parser.add_argument("--sample-ms", type=float, default=5.0, help="what a sample takes the other ranks")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--runs", type=int, default=3, help="of each way, in turn")
    arguments = parser.parse_args()
    sample_s = arguments.sample_ms / 1e3
    possible = (_RANKS - 1 + 1 / arguments.slower) / sample_s
    found: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="laconic-elastic-") as temporary:
        for run in range(arguments.runs):
            for balance, rates in found.items():
                words = {
                    "slower": arguments.slower,
                    "sample_s": sample_s,
                    "balance": balance,
                    "last_step": arguments.steps,
                }
                outcome = run_job(
                    FAMILIES["fusion"],
                    Path(temporary) / f"{run}-{balance}",
                    target=f"{__spec__.name}:train_unequal",
                    arguments=words,
                    preload=("benchmarks.elastic.preloaded",),
                )
                if outcome.problem:
                    print(f"the job failed: {outcome.problem}")
                    return 1
                when = {step: wall_s for wall_s, _, step in outcome.log.commits}
                half = arguments.steps // 2
                rates.append((arguments.steps - half) * BATCH / (when[arguments.steps] - when[half]))
    print(f"possible: {possible:.0f} samples/s; {arguments.runs} runs each, {arguments.steps} steps of {BATCH} samples")
    for balance, rates in found.items():
        rate = statistics.median(rates)
        spread = f"{min(rates):.0f} .. {max(rates):.0f}"
        print(f"{'by speed' if balance else 'equal parts':12} {rate:5.0f} samples/s ({spread}), {rate / possible:.0%}")
    return 0


def train_unequal(
    strategy: str,
    folder: str,
    *,
    slower: float,
    sample_s: float,
    balance: bool,
    last_step: int,
    seed: int = 0,
    samples: int = SAMPLES,
) -> None:
    """What each worker runs."""
    slow = os.environ["LOCAL_RANK"] == "0"
    train(
        strategy,
        folder,
        sleep_s=0.0,
        last_step=last_step,
        sample_s=sample_s * (slower if slow else 1.0),
        balance=balance,
        seed=seed,
        samples=samples,
    )


if __name__ == "__main__":
    raise SystemExit(main())
