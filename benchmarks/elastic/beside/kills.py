"""Kills a worker of a job again and again, and times how long the job takes to make a new step."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.elastic.worker import BATCH, Samples

RANKS = 4
_PATIENCE_S = 120.0


def note_process(folder: Path, rank: int) -> None:
    """Called by a worker that takes part in training: whom to kill."""
    (folder / f"new-{rank}").write_text(str(os.getpid()))
    (folder / f"new-{rank}").rename(folder / f"pid-{rank}")


def note_step(folder: Path, step: int) -> None:
    """Called by a worker when the job has made a step."""
    with (folder / "made").open("a") as made:
        made.write(f"{step}\n")


def loss_of(model: nn.Module, samples: Samples, step: int, rank: int) -> torch.Tensor:
    """The loss of this rank's part of the batch of a step."""
    chosen = torch.randperm(len(samples), generator=torch.Generator().manual_seed(step))[rank::RANKS]
    mine = chosen[: BATCH // RANKS]
    return nn.functional.cross_entropy(model(samples.inputs[mine]), samples.targets[mine])


def seconds_lost(
    folder: Path, kills: int, step_s: float, seed: int, *, every: int, after: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds from each kill of a worker to the next step; fewer than `kills` if the job did not go on.

    A kill comes at any moment of a step of `step_s`, after 1 to 2 `every` new steps; `after` is called after it.
    """
    chance, lost = random.Random(seed), list[float]()
    while len(lost) < kills:
        if not _reaches(folder, _last_step(folder) + chance.randint(1, 2 * every)):
            break
        time.sleep(chance.uniform(0.0, step_s))
        victim = chance.choice(sorted(folder.glob("pid-*")))
        pid = int(victim.read_text())
        victim.unlink()
        made, killed_s = _last_step(folder), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        after()
        if not _reaches(folder, made + 1):
            break
        lost.append(time.monotonic() - killed_s)
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
