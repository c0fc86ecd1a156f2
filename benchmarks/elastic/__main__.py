"""`python -m benchmarks.elastic`: ranks of real jobs are killed at random moments, and what is left is checked.

For one strategy of each kind that can be elastic, 4 Gloo ranks train a small model while workers are killed (sometimes
two at once, sometimes one that is just joining) and told to end; each is replaced. Then, from the logs of all workers:
do replicas have the same bits after every step or round; does a replay in one process come to the same bits; was a
sample used twice; did anything hang; how long from SIGKILL to the next step or round. In the "sharded" families, 6
ranks hold 3 copies of the model, each sharded over 2 ranks (FSDP2); sharded-diloco has no replay. With --device cuda
the ranks share a GPU and use NCCL; a replay in one process would add up in another order than NCCL does, and is left
out, as are the "sharded" families.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's store looks up the names of its clients; where there is no name server, that takes 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.elastic.families import FAMILIES, SHARDED_FAMILIES
from benchmarks.elastic.job import Outcome, run_job
from benchmarks.elastic.replay import Replayed, replay
from benchmarks.elastic.replay_sharded import replay_sharded
from benchmarks.elastic.sharded_worker import RANKS_PER_REPLICA
from laconic.strategy import Strategy

_COLUMNS = ("family", "kills", "leaves", "views", "units", "redone", "hung", "conflicts", "differ", "replay", "twice",
            "missing", "median s", "worst s")  # fmt: skip


def main() -> int:
    """Run all families; 1 if anything hung, differed or was used twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=4, help="SIGKILLs for each family")
    parser.add_argument("--leaves", type=int, default=1, help="SIGTERMs for each family")
    parser.add_argument("--gap", type=float, default=1.0, help="mean seconds between two of them")
    parser.add_argument("--seed", type=int, default=0)
    every = FAMILIES | SHARDED_FAMILIES
    parser.add_argument("--families", nargs="*", default=list(every), choices=list(every))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--keep", type=Path, default=None, help="keep the logs in this folder")
    arguments = parser.parse_args()
    failed = False
    lost: list[float] = []
    print(f"{_COLUMNS[0]:>14}", *(f"{name:>10}" for name in _COLUMNS[1:]), flush=True)
    with tempfile.TemporaryDirectory(prefix="laconic-elastic-") as temporary:
        for number, name in enumerate(arguments.families):
            folder, sharded = (arguments.keep or Path(temporary)) / name, name in SHARDED_FAMILIES
            if sharded and arguments.device != "cpu":
                continue
            outcome = run_job(
                every[name],
                folder,
                kills=arguments.kills,
                leaves=arguments.leaves,
                gap_s=arguments.gap,
                seed=arguments.seed + number,
                target=f"benchmarks.elastic.{'sharded_worker' if sharded else 'worker'}:train",
                arguments={} if sharded else {"device": arguments.device},
                preload=("benchmarks.elastic.preloaded",),
                ranks_per_replica=RANKS_PER_REPLICA if sharded else 1,
            )
            exchanges = Strategy.parse(every[name]).exchanges_gradients()
            replays = arguments.device == "cpu" and not outcome.error and not outcome.hung
            replays &= exchanges or not sharded
            run = replay_sharded if sharded else replay
            replayed = run(every[name], outcome.log) if replays else Replayed()
            failed |= _show(name, outcome, replayed, replays=replays)
            lost += outcome.seconds_lost()
    if lost:
        ordered = sorted(lost)
        share = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        print(
            f"\nfrom SIGKILL to the next step or round, {len(lost)} kills of members: median "
            f"{statistics.median(lost):.3f} s, 99% within {share:.3f} s, worst {ordered[-1]:.3f} s (times include the "
            "step itself; they hold for a quiet machine only)"
        )
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 1 if failed else 0


def _show(name: str, outcome: Outcome, replayed: Replayed, *, replays: bool) -> bool:
    """One row; whether something is wrong."""
    log, lost = outcome.log, outcome.seconds_lost()
    kills = sum(not one.polite for one in outcome.struck)
    compared = f"{replayed.num_compared - replayed.num_differing}/{replayed.num_compared}"
    samples = (compared, replayed.used_twice, replayed.skipped) if replays else ("-", "-", "-")
    times = (f"{statistics.median(lost):.3f}", f"{max(lost):.3f}") if lost else ("-", "-")
    row = (name, kills, len(outcome.struck) - kills, len(log.views), len(log.units), log.num_redone, int(outcome.hung),
           len(log.conflicts), len(log.differing), *samples, *times)  # fmt: skip
    print(f"{name:>14}", *(f"{value:>10}" for value in row[1:]), flush=True)
    problems = [*log.conflicts[:3], *([outcome.error] if outcome.error else [])]
    for problem in problems:
        print(f"    {problem}", file=sys.stderr)
    wrong = outcome.hung or bool(problems) or bool(log.differing) or bool(replayed.used_twice)
    return wrong or (replays and (replayed.num_differing > 0 or replayed.num_compared == 0))


if __name__ == "__main__":
    sys.exit(main())
