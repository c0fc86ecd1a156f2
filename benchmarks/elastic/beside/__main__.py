"""`python -m benchmarks.elastic.beside`: what a killed worker costs, beside torchrun's restarts and torchft.

The same model, batch and length of a step, four Gloo ranks each.

torchrun   torch DDP saves a checkpoint every few steps; when a worker dies, torchrun starts all of them again, and they
           go on from the last checkpoint
torchft    the others leave out the step and go on; the dead worker is started again at once and copies the state of
           another; left out where torchft is not installed
laconic    the others go on, and one worker is replaced

What counts is the time from SIGKILL to the first step that had not been made before, the step itself included.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import argparse
import importlib.util
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.elastic.beside import torchft, torchrun
from benchmarks.elastic.beside.kills import RANKS
from benchmarks.elastic.families import FAMILIES
from benchmarks.elastic.job import run_job
from benchmarks.elastic.worker import BATCH


def main() -> int:
    """One after another; 1 if one of them did not go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--step", type=float, default=0.2, help="seconds that a step computes")
    parser.add_argument("--checkpoint-every", type=int, default=25, help="steps, under torchrun")
    parser.add_argument(
        "--heartbeat",
        type=float,
        default=5.0,
        help="seconds without one, after which a replica is dead for torchft's lighthouse; 5 is its default",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="laconic-elastic-") as temporary:
        folder = Path(temporary)
        restarted = torchrun.seconds_lost(
            folder / "torchrun", options.kills, options.step, options.seed, checkpoint_every=options.checkpoint_every
        )
        _show(f"torchrun, a checkpoint every {options.checkpoint_every} steps", restarted)
        complete = len(restarted) == options.kills
        if importlib.util.find_spec("torchft") is not None:
            skipped = torchft.seconds_lost(
                folder / "torchft", options.kills, options.step, options.seed, heartbeat_s=options.heartbeat
            )
            _show(f"torchft, dead after {options.heartbeat:g} s without a heartbeat", skipped)
            complete = complete and len(skipped) == options.kills
        outcome = run_job(
            FAMILIES["fusion"],
            folder / "elastic",
            kills=options.kills,
            gap_s=10 * options.step,
            seed=options.seed,
            arguments={"sleep_s": 0.0, "sample_s": options.step * RANKS / BATCH},
            preload=("benchmarks.elastic.preloaded",),
        )
        _show("laconic", outcome.seconds_lost())
    if outcome.error or outcome.hung or not complete:
        print(outcome.error or "a job did not go on", file=sys.stderr)
        return 1
    return 0


def _show(name: str, lost_s: list[float]) -> None:
    if lost_s:
        about = f"median {statistics.median(lost_s):.2f} s, {min(lost_s):.2f} to {max(lost_s):.2f} s"
        print(f"{name:44} {len(lost_s)} kills, to the next step: {about}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
