"""Carries faults out at their times on the processes and links of a job, and says which of them had no effect."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from laconic.lab.faults import Fault, next_s


class JobProcesses(Protocol):
    """The processes of a job, by name, and the hosts they run on."""

    num_hosts: int

    def members(self) -> Sequence[str]:
        """The processes that train together, in the order of their ranks; none before training has begun."""
        ...

    def processes(self, host: int | None = None) -> Sequence[str]:
        """The running processes, on one host or on all."""
        ...

    def kill(self, process: str) -> None:
        """End a process with SIGKILL."""
        ...

    def stop(self, process: str) -> None:
        """Stop a process (SIGSTOP)."""
        ...

    def wake(self, process: str) -> None:
        """Let a process continue (SIGCONT)."""
        ...

    def slow(self, process: str, factor: float) -> None:
        """Let a process run for one part in `factor` of the time; 1: always."""
        ...

    def freeze(self, host: int, *, frozen: bool) -> None:
        """Freeze the agent that watches the processes of this host, or let it continue."""
        ...

    def cut(self, host: int, peer: int | None, *, cut: bool) -> None:
        """Cut the link between two hosts, or that of one host, or restore it."""
        ...

    def start(self, host: int) -> str:
        """Start a further process and return its name."""
        ...


@dataclass(frozen=True)
class Strike:
    """One time that a fault was carried out."""

    fault: Fault
    processes: tuple[str, ...]
    """The processes that the fault struck; for a cut link, those on the hosts at its ends."""
    over: bool = False
    """The fault was undone, after its for_s."""


@dataclass
class _Planned:
    fault: Fault
    next_s: float
    num_strikes: int = 0
    missed: str = ""
    """Why the fault struck no process when it was due."""


class FaultInjector:
    """Carries out the faults that are due; called often, with the time since training began."""

    def __init__(
        self,
        faults: Sequence[Fault],
        job: JobProcesses,
        *,
        seed: int,
        tell: Callable[[Strike], None] = lambda strike: None,
    ) -> None:
        """seed: of the random choice of a process where a fault names none."""
        self._job = job
        self._tell = tell
        self._chance = random.Random(seed)
        self._planned = [_Planned(fault, fault.first_s) for fault in faults if fault.first_s is not None]
        self._replacing = [fault for fault in faults if fault.first_s is None]
        self.num_joined = 0
        """Processes that faults have started."""
        self._undo: list[tuple[float, Callable[[], object], Strike]] = []

    def look(self, now_s: float) -> None:
        """Carry out everything whose time has come, in the order of its times."""
        for entry in [entry for entry in self._undo if entry[0] <= now_s]:
            self._undo.remove(entry)
            entry[1]()
            self._tell(entry[2])
        due = [(one.next_s, number, one) for number, one in enumerate(self._planned) if one.next_s <= now_s]
        for _, _, one in sorted(due, key=lambda entry: entry[:2]):
            self._strike(one, now_s)
            later_s = next_s(one.fault, one.next_s)
            # After a pause it comes once, not once for every time that it has missed.
            one.next_s = later_s if later_s > now_s else next_s(one.fault, now_s)

    def undo_all(self) -> None:
        """Undo every fault that is still in effect: resume processes, restore links and speeds."""
        for _, undo, _ in self._undo:
            undo()
        self._undo.clear()

    def without_effect(self, lasted_s: float | None, *, num_replaced: int) -> list[str]:
        """One sentence for each fault that changed nothing.

        lasted_s: how long training lasted, None if it never began. num_replaced: processes started to replace others.
        """
        if lasted_s is None:
            told = ", ".join(str(one.fault) for one in self._planned) or str(self._replacing[0])
            return [
                f"{told} had no effect: no process became a rank of elastic training. The script must call "
                "laconic.attach(..., elastic=laconic.Elastic(...)), and run long enough."
            ]
        found = [
            f"{one.fault} had no effect: {one.missed or f'training was over after {lasted_s:.1f} s'}."
            for one in self._planned
            if not one.num_strikes
        ]
        return found + [f"{fault} had no effect: no process died." for fault in self._replacing if not num_replaced]

    # -- one strike ------------------------------------------------------------------------------------------------

    def _strike(self, one: _Planned, now_s: float) -> None:
        fault, job = one.fault, self._job
        if fault.kind == "cut-link":
            assert fault.host is not None, "parse_fault has seen to that"
            host, peer = fault.host, fault.peer
            behind = [name for end in (host, peer) if end is not None for name in job.processes(end)]
            job.cut(host, peer, cut=True)
            self._struck(one, now_s, behind, lambda: job.cut(host, peer, cut=False))
            return
        if fault.kind == "join":
            host = fault.host if fault.host is not None else self._emptiest_host()
            self.num_joined += 1
            self._struck(one, now_s, (job.start(host),), None)
            return
        struck = self._whom(one)
        if not struck:
            return
        if fault.kind == "kill":
            for process in struck:
                job.kill(process)
            self._struck(one, now_s, struck, None)
        elif fault.kind == "slow":
            assert fault.factor is not None, "parse_fault has seen to that"
            for process in struck:
                job.slow(process, fault.factor)
            self._struck(one, now_s, struck, lambda: [job.slow(process, 1.0) for process in struck])
        else:
            self._set_frozen(fault.host, struck, frozen=True)
            self._struck(one, now_s, struck, lambda: self._set_frozen(fault.host, struck, frozen=False))

    def _set_frozen(self, host: int | None, processes: Sequence[str], *, frozen: bool) -> None:
        if host is not None:
            self._job.freeze(host, frozen=frozen)
        for process in processes:
            (self._job.stop if frozen else self._job.wake)(process)

    def _struck(self, one: _Planned, now_s: float, processes: Sequence[str], undo: Callable[[], object] | None) -> None:
        one.num_strikes += 1
        self._tell(Strike(one.fault, tuple(processes)))
        if undo is not None and one.fault.for_s is not None:
            again = Strike(one.fault, tuple(processes), over=True)
            self._undo.append((now_s + one.fault.for_s, undo, again))

    def _whom(self, one: _Planned) -> tuple[str, ...]:
        """The processes that a fault strikes; notes why there is none."""
        fault, running = one.fault, set(self._job.processes())
        if fault.host is not None:
            found = tuple(self._job.processes(fault.host))
            one.missed = "" if found else f"no process ran on host {fault.host}"
            return found
        members = self._job.members()
        if fault.rank is not None:
            there = fault.rank < len(members) and members[fault.rank] in running
            one.missed = "" if there else f"there was no rank {fault.rank} at that moment"
            return (members[fault.rank],) if there else ()
        alive = [name for name in members if name in running]
        one.missed = "" if alive else "no rank was there"
        return (self._chance.choice(alive),) if alive else ()

    def _emptiest_host(self) -> int:
        return min(range(self._job.num_hosts), key=lambda host: len(self._job.processes(host)))
