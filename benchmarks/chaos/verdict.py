"""Whether a job ended as promised."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from benchmarks.chaos.job import Ended
from benchmarks.chaos.scenario import LATE_S, TIMEOUT_S, UNORDERED, Scenario

CLOSE = 1e-4


def problems(scenario: Scenario, ended: Ended, folder: Path, reference: Path | None) -> list[str]:
    """Everything that is not as promised, each with its kind first; empty: all right."""
    finished = (folder / f"detached{scenario.victim}").exists()
    if ended.fault_s is None or (scenario.fault.startswith("SIG") and finished):
        return ["not struck: the rank had finished before the fault"]
    found = [f"hang: rank {rank} was still there" for rank in ended.hung]
    for rank in range(scenario.world_size):
        is_victim = rank == scenario.victim
        if is_victim and scenario.fault in ("SIGKILL", "SIGSTOP", "SIGTERM"):
            continue
        found += _of_rank(scenario, ended, rank, folder, is_victim=is_victim)
    if scenario.fault == "frozen" and not found:
        found += _result(scenario, folder, reference)
    return found + [f"process left: {command}" for command in ended.leftover]


def _of_rank(scenario: Scenario, ended: Ended, rank: int, folder: Path, *, is_victim: bool) -> list[str]:
    said = ended.ranks.get(rank)
    if said is None:
        if rank in ended.hung:
            return []
        status = ended.statuses.get(rank, 0)
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
        return [f"foreign: rank {rank} ended by {how}"]
    found: list[str] = []
    if said["threads"]:
        found.append(f"thread left: rank {rank} has {said['threads']}")
    outcome = said["outcome"]
    if scenario.fault == "frozen":
        if outcome != "finished":
            found.append(f"gave up: rank {rank}, although the other went on: {said['words']}")
        return found
    if is_victim:
        if outcome != "ValueError":
            found.append(f"masked: rank {rank} raised {outcome} instead of its own error: {said.get('words')}")
        return found
    late_s = said["at_s"] - (ended.fault_s or 0.0) - scenario.delay_s
    if late_s > TIMEOUT_S + LATE_S:
        found.append(f"late: rank {rank} ended {late_s:.1f} s after the fault")
    if outcome == "finished":
        # A signal that comes a moment late may meet a rank that has done all that the others need of it.
        done = (folder / f"last{scenario.victim}").exists()
        may_finish = done or scenario.strategy in UNORDERED
        if not may_finish:
            found.append(f"silent: rank {rank} finished as if nothing had happened")
    elif outcome != "LaconicError":
        found.append(f"foreign: rank {rank} raised {outcome}: {said['words']}")
    elif not _names(scenario, said["words"]):
        found.append(f"wrong name: rank {rank} says {said['words']}")
    return found


def _names(scenario: Scenario, words: str) -> bool:
    """Whether an error blames the rank that had the fault and nobody else."""
    hosts_store = scenario.victim == 0 and scenario.store == "rank 0"
    if hosts_store and "rank 0 or the launcher" in words:
        return True
    blamed = re.findall(r"(?:cannot finish|go on|did not finish in [\d.]+ s|s): (?:server \d+ of )?rank (\d+)", words)
    if blamed:
        return blamed[0] == str(scenario.victim)
    return re.search(rf"\brank {scenario.victim}\b", words) is not None


def _result(scenario: Scenario, folder: Path, reference: Path | None) -> list[str]:
    """A rank that was frozen and went on changes nothing about what the job comes to."""
    if reference is None or scenario.strategy in UNORDERED:
        return []
    for rank in range(scenario.world_size):
        expected = torch.load(reference / f"model{rank}.pt", weights_only=True)
        found = torch.load(folder / f"model{rank}.pt", weights_only=True)
        apart = max(float((one - other).abs().max()) for one, other in zip(expected, found, strict=True))
        if apart > CLOSE:
            return [f"wrong result: rank {rank} is {apart:.1e} away from a run without the fault"]
    return []
