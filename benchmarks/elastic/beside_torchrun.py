"""`python -m benchmarks.elastic.beside_torchrun`: what a killed worker costs, beside torchrun's restarts.

The same model, batch and length of a step, four Gloo ranks each. Under torchrun, torch DDP trains and saves a
checkpoint every few steps; when a worker dies, torchrun starts all of them again, and they go on from the last
checkpoint. Under laconic, the others go on, and one worker is replaced. What counts is the time from SIGKILL to the
first step that had not been made before, the step itself included.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import argparse
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.elastic.families import FAMILIES
from benchmarks.elastic.job import run_job
from benchmarks.elastic.worker import BATCH, Samples, make_model

_RANKS = 4
_PATIENCE_S = 120.0


def main() -> int:
    """Both in turn; 1 if one of them did not go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--step", type=float, default=0.2, help="seconds that a step computes")
    parser.add_argument("--checkpoint-every", type=int, default=25, help="steps, under torchrun")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        _train(options.worker, options.step, options.checkpoint_every)
        return 0
    with tempfile.TemporaryDirectory(prefix="laconic-elastic-") as temporary:
        restarted = _restarted(Path(temporary), options)
        _show(f"torchrun, a checkpoint every {options.checkpoint_every} steps", restarted)
        outcome = run_job(
            FAMILIES["fusion"],
            Path(temporary) / "elastic",
            kills=options.kills,
            gap_s=10 * options.step,
            seed=options.seed,
            arguments={"sleep_s": 0.0, "sample_s": options.step * _RANKS / BATCH},
            preload=("benchmarks.elastic.preloaded",),
        )
        _show("laconic", outcome.seconds_lost())
    if outcome.error or outcome.hung or len(restarted) < options.kills:
        print(outcome.error or "a job did not go on", file=sys.stderr)
        return 1
    return 0


def _show(name: str, lost_s: list[float]) -> None:
    if lost_s:
        about = f"median {statistics.median(lost_s):.2f} s, {min(lost_s):.2f} to {max(lost_s):.2f} s"
        print(f"{name:44} {len(lost_s)} kills, to the next step: {about}", flush=True)


def _restarted(folder: Path, options: argparse.Namespace) -> list[float]:
    """Seconds from each kill of a worker under torchrun to the next step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_RANKS}"]
    command += ["--max-restarts=100", "--monitor-interval=0.1", "-m", "benchmarks.elastic.beside_torchrun"]
    command += ["--worker", str(folder), "--step", str(options.step)]
    command += ["--checkpoint-every", str(options.checkpoint_every)]
    chance, lost = random.Random(options.seed), list[float]()
    with (folder / "torchrun.log").open("wb") as output:
        # In the store that the agent shares with its workers, Gloo finds addresses of workers that have ended.
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        job = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            while len(lost) < options.kills:
                before = _last_step(folder)
                # Long enough after the last one that there is a checkpoint, at any moment between two of them.
                if not _reaches(folder, before + chance.randint(1, 2 * options.checkpoint_every)):
                    break
                pids = [int(path.read_text()) for path in folder.glob("pid-*")]
                made, killed_s = _last_step(folder), time.monotonic()
                os.kill(chance.choice(pids), signal.SIGKILL)
                if not _reaches(folder, made + 1):
                    break
                lost.append(time.monotonic() - killed_s)
        finally:
            os.killpg(job.pid, signal.SIGTERM)
            try:
                job.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    return lost


def _last_step(folder: Path) -> int:
    """The largest number of a step that was made."""
    path = folder / "made"
    return max((int(line) for line in path.read_text().split()), default=0) if path.exists() else 0


def _reaches(folder: Path, step: int) -> bool:
    until_s = time.monotonic() + _PATIENCE_S
    while _last_step(folder) < step:
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def _train(folder: Path, step_s: float, every: int) -> None:
    """What a worker under torchrun does, until it is ended."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    model, optimizer = make_model()
    first, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    wrapped = DistributedDataParallel(model)
    samples = Samples()
    for step in range(first, 10**6):
        chosen = torch.randperm(len(samples), generator=torch.Generator().manual_seed(step))[rank::_RANKS]
        mine = chosen[: BATCH // _RANKS]
        time.sleep(step_s)
        nn.functional.cross_entropy(wrapped(samples.inputs[mine]), samples.targets[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            with (folder / "made").open("a") as made:
                made.write(f"{step + 1}\n")
        if rank == 0 and (step + 1) % every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, folder / "saving.pt")
            (folder / "saving.pt").rename(checkpoint)


if __name__ == "__main__":
    raise SystemExit(main())
