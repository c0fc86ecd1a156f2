"""One elastic job whose workers are killed at random moments."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.elastic.forked import spawn_function
from benchmarks.elastic.log import JobLog, read_job
from laconic.errors import LaconicError
from laconic.membership.launcher import Launch, Launcher

_RANKS = 4
_SHARDED_REPLICAS = 3
_HANG_S = 60.0
"""Without a step for so long, a job hangs."""


@dataclass
class Struck:
    """A worker that got a signal."""

    worker: str
    wall_s: float
    member: bool
    """It was a member of a view by then."""
    polite: bool


@dataclass
class Outcome:
    """What became of a job."""

    struck: list[Struck] = field(default_factory=list)
    hung: bool = False
    error: str = ""
    log: JobLog = field(default_factory=JobLog)

    @property
    def problem(self) -> str:
        """Why the job failed; empty if it did not."""
        return self.error or ("it hung" if self.hung else "replicas differ" if self.log.differing else "")

    def seconds_lost(self) -> list[float]:
        """From each SIGKILL of a member to the next step or round that was completed without it."""
        found = []
        for one in self.struck:
            if one.polite or not one.member:
                continue
            later = [
                wall_s
                for wall_s, view, _ in self.log.commits
                if wall_s > one.wall_s and one.worker not in self.log.views.get(view, ())
            ]
            if later:
                found.append(min(later) - one.wall_s)
        return found


def run_job(
    strategy: str,
    folder: Path,
    *,
    kills: int = 0,
    leaves: int = 0,
    gap_s: float = 1.0,
    seed: int = 0,
    target: str = "benchmarks.elastic.worker:train",
    arguments: Mapping[str, object] | None = None,
    preload: Sequence[str] = (),
    until: str | None = None,
    ranks_per_replica: int = 1,
) -> Outcome:
    """Train while `kills` workers are killed and `leaves` are told to end; each is replaced.

    There are 4 ranks or, with several ranks_per_replica, 3 replicas.

    target: what a worker calls, with the strategy, the folder and `arguments`. preload: see spawn_function. until: a
    file in the folder that must be there before the job comes to its end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given = {"strategy": strategy, "folder": str(folder), **(arguments or {})}
    spawn = spawn_function(target, given, folder, preload=preload)
    num_workers = _RANKS if ranks_per_replica == 1 else _SHARDED_REPLICAS * ranks_per_replica
    launcher = Launcher(
        Launch(
            spawn=spawn,
            num_workers=num_workers,
            ranks_per_replica=ranks_per_replica,
            min_ranks=1,
            max_ranks=2 * _RANKS,
            max_restarts=10**6,
        )
    )
    outcome = Outcome()
    chance = random.Random(seed)
    strikes = [False] * kills + [True] * leaves
    chance.shuffle(strikes)
    driver = lambda: _strike(launcher, folder, outcome, strikes, gap_s=gap_s, chance=chance, until=until)  # noqa: E731
    threading.Thread(target=driver, name="killer", daemon=True).start()
    try:
        launcher.run()
    except LaconicError as exc:
        outcome.error = str(exc)
    outcome.log = read_job(folder)
    return outcome


def _strike(
    launcher: Launcher,
    folder: Path,
    outcome: Outcome,
    strikes: list[bool],
    *,
    gap_s: float,
    chance: random.Random,
    until: str | None,
) -> None:
    progress = _Progress(folder)
    if not progress.reaches(8):
        outcome.hung = True
    for polite in [] if outcome.hung else strikes:
        time.sleep(gap_s * (0.5 + chance.random()))
        # Somebody who has the state must stay: at least two replicas, and no other one that is leaving.
        until_s = time.monotonic() + _HANG_S
        while (view := launcher.view) is None or _num_alive(launcher, folder) < 3:
            if time.monotonic() > until_s:
                outcome.hung = True
                break
            time.sleep(0.02)
        if outcome.hung or view is None:
            break
        count = 2 if not polite and chance.random() < 0.15 and _num_alive(launcher, folder) > 3 else 1
        workers = list(launcher.agent.workers.values())
        for worker in chance.sample(workers, min(count, len(workers))):
            number = signal.SIGTERM if polite else signal.SIGKILL
            outcome.struck.append(Struck(worker.name, time.time(), worker.name in view.members, polite))
            os.kill(worker.process.pid, number)
            if polite:
                launcher.agent.start(worker.slot)  # it is not replaced by itself
    until_s = time.monotonic() + _HANG_S
    while until is not None and not outcome.hung and not (folder / until).exists():
        outcome.hung = time.monotonic() > until_s
        time.sleep(0.1)
    if not outcome.hung and not progress.reaches(progress.steps() + 10):
        outcome.hung = True
    if outcome.hung:
        launcher.agent.signal_all(signal.SIGKILL)
        return
    (folder / "stopping").write_text(str(progress.steps() + 40))
    (folder / "stopping").rename(folder / "stop")  # whole from the first moment on


def _num_alive(launcher: Launcher, folder: Path) -> int:
    """Replicas that have the state of training: they have begun to write their logs."""
    view = launcher.view
    names = [name for name in (() if view is None else view.members) if name in launcher.agent.workers]
    logs = {name: folder / f"{name}.jsonl" for name in names}
    writing = [name for name, log in logs.items() if log.exists() and log.stat().st_size > 0]
    return 0 if view is None else len(view.replicas_of(writing))


class _Progress:
    """How many steps a job has made, read from the ends of its logs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def steps(self) -> int:
        """As far as is known."""
        return max((step for _, _, step in read_job(self._folder).commits), default=0)

    def reaches(self, step: int) -> bool:
        """Return when so many steps have been made; False if it hangs before."""
        last, changed_s = -1, time.monotonic()
        while (now := self.steps()) < step:
            if now != last:
                last, changed_s = now, time.monotonic()
            elif time.monotonic() - changed_s > _HANG_S:
                return False
            time.sleep(0.3)
        return True
