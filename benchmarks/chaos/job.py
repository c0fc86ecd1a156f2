"""A job of real processes with one fault, watched until everybody has ended or should have."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.chaos import rank as one_rank
from benchmarks.chaos.scenario import FROZEN_S, LATE_S, TIMEOUT_S, Scenario
from laconic.lab.launch import free_port

START_LIMIT_S = 60.0
LEFTOVER_S = 14.0
"""How long servers started beside a rank that died may stay, to tell the others who it was."""


@dataclass
class Ended:
    """How the job ended."""

    fault_s: float | None
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What each rank has said at its end."""
    statuses: dict[int, int] = field(default_factory=dict)
    hung: list[int] = field(default_factory=list)
    leftover: list[str] = field(default_factory=list)


class Job:
    """Forked processes of one scenario."""

    def __init__(self, scenario: Scenario, folder: Path, *, strikes: bool = True) -> None:
        self.scenario, self.folder = scenario, folder
        folder.mkdir(parents=True)
        self._strikes = strikes
        self._mark = f"{os.getpid()}.{folder.name}"
        self._began_s = time.monotonic()
        self._statuses: dict[int, int] = {}
        self._continued = False
        port = free_port()
        self._store = _fork(lambda: _host_store(port), self._mark) if scenario.store == "launcher" else None
        self._pids = {
            rank: _fork(lambda rank=rank: one_rank.main(scenario, rank, port, folder, strikes=strikes), self._mark)
            for rank in range(scenario.world_size)
        }

    def poll(self) -> bool:
        """Look after the processes; True once the job is over."""
        for rank, pid in self._pids.items():
            if rank not in self._statuses:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self._statuses[rank] = status
        fault_s, now_s, victim = self._fault_s(), time.monotonic(), self.scenario.victim
        frozen = self.scenario.fault == "frozen"
        thaws = frozen and not self._continued and victim not in self._statuses
        if thaws and fault_s is not None and now_s > fault_s + self.scenario.delay_s + FROZEN_S:
            self._continued = True
            os.kill(self._pids[victim], signal.SIGCONT)
        stopped = {self.scenario.victim} if self.scenario.fault == "SIGSTOP" and fault_s is not None else set()
        limit_s = fault_s + TIMEOUT_S + LATE_S + 12.0 if fault_s is not None else self._began_s + START_LIMIT_S
        if frozen:
            limit_s += START_LIMIT_S
        return set(self._pids) - set(self._statuses) <= stopped or now_s > limit_s

    def _fault_s(self) -> float | None:
        path = self.folder / "fault"
        return float(path.read_text()) if path.exists() else None

    def end(self) -> Ended:
        """What came of it; whatever still runs is ended."""
        ended = Ended(self._fault_s(), statuses=dict(self._statuses))
        for rank in self._pids:
            path = self.folder / f"rank{rank}.json"
            if path.exists():
                ended.ranks[rank] = json.loads(path.read_text())
        stopped = self.scenario.victim if self.scenario.fault == "SIGSTOP" else None
        ended.hung = [rank for rank in self._pids if rank not in self._statuses and rank != stopped]
        for rank in ended.hung:
            os.kill(self._pids[rank], one_rank.SHOW_STACKS)
        time.sleep(0.5 * bool(ended.hung))
        for rank, pid in self._pids.items():
            if rank not in self._statuses:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if self._store is not None:
            os.kill(self._store, signal.SIGKILL)
            os.waitpid(self._store, 0)
        self._over_s = time.monotonic()
        return ended

    def leftover(self) -> list[str] | None:
        """Processes the job has left behind; None while they may still end by themselves."""
        found = _processes(self._mark)
        if found and time.monotonic() < self._over_s + LEFTOVER_S:
            return None
        for pid, _ in found:
            os.kill(pid, signal.SIGKILL)
        return [command for _, command in found]


def _fork(work: Callable[[], None], mark: str) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            # /proc shows the environment a process was started with: that of servers, which inherit it.
            os.environ["LACONIC_CHAOS"] = mark
            work()
        finally:
            os._exit(70)
    return pid


def _host_store(port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert store.port == port
    time.sleep(600.0)


def _processes(mark: str) -> list[tuple[int, str]]:
    """Processes started by the job's ranks, such as servers."""
    found: list[tuple[int, str]] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if f"LACONIC_CHAOS={mark}\0".encode() in environment and command:
                found.append((int(entry.name), command))
    return found
