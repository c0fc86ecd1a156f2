"""Torch DDP under torchrun: after a death, all workers start again from the last checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.elastic.beside import kills
from benchmarks.elastic.worker import Samples, make_model


def seconds_lost(folder: Path, num_kills: int, step_s: float, seed: int, *, checkpoint_every: int) -> list[float]:
    """Seconds from each kill of a worker to the next step."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={kills.RANKS}"]
    command += ["--max-restarts=100", "--monitor-interval=0.1", "-m", "benchmarks.elastic.beside.torchrun"]
    command += [str(folder), str(step_s), str(checkpoint_every)]
    with (folder / "torchrun.log").open("wb") as output:
        # In the store that the agent shares with its workers, Gloo finds addresses of workers that have ended.
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        job = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            return kills.seconds_lost(folder, num_kills, step_s, seed, every=checkpoint_every)
        finally:
            os.killpg(job.pid, signal.SIGTERM)
            try:
                job.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()


def train(folder: Path, step_s: float, checkpoint_every: int) -> None:
    """What a worker does, until it is ended."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    kills.note_process(folder, rank)
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
        time.sleep(step_s)
        kills.loss_of(wrapped, samples, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            kills.note_step(folder, step + 1)
        if rank == 0 and (step + 1) % checkpoint_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, folder / "saving.pt")
            (folder / "saving.pt").rename(checkpoint)


if __name__ == "__main__":
    train(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
