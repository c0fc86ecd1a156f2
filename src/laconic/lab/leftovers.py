"""Finds and ends processes that a killed lab has left running.

A lab has no names in the file system and its ranks die with it, so a kill -9 leaves only processes that a rank's script
had started and detached; such a process keeps the namespace of its host. Every rank therefore has

    LACONIC_LAB = <pid of the lab>-<its start time, in ticks since boot>-<a word of this run>

in its environment, which its child processes inherit. A process whose lab is gone (no such pid, or another start time)
is a leftover. A process that was started with an empty environment cannot be recognized.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from laconic.errors import LaconicError, UsageError

VARIABLE = "LACONIC_LAB"
_PROC = Path("/proc")
_GONE_OR_FOREIGN = (FileNotFoundError, ProcessLookupError, PermissionError)
_POLITE_S = 2.0
"""Time to end after SIGTERM, before SIGKILL."""
_FORCED_S = 5.0
"""Time the kernel may take to remove a process after SIGKILL."""
_STARTING_S = 0.05
"""How long a process that has just been started may take to show its environment."""
_ROUNDS = 5
"""Rounds of ending processes: children started meanwhile are found in the next round."""


@dataclass(frozen=True)
class Leftover:
    """A process that outlived its lab."""

    pid: int
    lab_pid: int
    command: str


def new_mark() -> str:
    """The value of LACONIC_LAB for the ranks of one run of this process."""
    return f"{os.getpid()}-{_start_ticks(os.getpid()) or 0}-{secrets.token_hex(4)}"


def end_leftovers() -> list[Leftover]:
    """End every process of this user whose lab is gone; return those that were ended."""
    if not (_PROC / "self" / "environ").exists():
        raise UsageError("leftovers are found through /proc, which this system does not have.")
    return _end_all(lambda mark: not _lab_is_running(mark))


def end_run(mark: str) -> list[Leftover]:
    """End every process of this user with `mark`: the detached processes of a finished run."""
    return _end_all(lambda found: found == mark)


def _end_all(condemned: Callable[[str], bool]) -> list[Leftover]:
    ended: dict[int, Leftover] = {}
    for _ in range(_ROUNDS):
        with contextlib.ExitStack() as handles:
            found = dict(_marked(condemned, handles))
            if not found:
                return list(ended.values())
            _end(list(found))
            ended |= {leftover.pid: leftover for leftover in found.values()}
    raise LaconicError(
        f"processes that a lab left behind start new ones faster than they can be ended; the last was pid {max(ended)}."
    )


def _marked(condemned: Callable[[str], bool], handles: contextlib.ExitStack) -> Iterator[tuple[int, Leftover]]:
    """Processes of this user whose mark is `condemned`, each with a pidfd, which is never reused."""
    for folder in _PROC.iterdir() if _PROC.is_dir() else ():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        pid = int(folder.name)
        # A process may end at any time, and those of other users cannot be read.
        with contextlib.suppress(*_GONE_OR_FOREIGN), contextlib.ExitStack() as stack:
            mark = _mark_of(folder)
            if mark is None or not condemned(mark):
                continue
            # Read again with the pidfd: a process number may be reused, a pidfd is not.
            handle = os.pidfd_open(pid)
            stack.callback(os.close, handle)
            if _mark_of(folder) == mark and _user_of(folder) == os.geteuid():
                handles.push(stack.pop_all())
                yield handle, Leftover(pid, int(mark.partition("-")[0]), _command_of(folder))


def _end(handles: list[int]) -> None:
    for stop, patience_s in ((signal.SIGTERM, _POLITE_S), (signal.SIGKILL, _FORCED_S)):
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, stop)
        handles = _still_there(handles, time.monotonic() + patience_s)
        if not handles:
            return
    raise LaconicError(
        f"{len(handles)} of the processes a lab left behind did not end within {_FORCED_S:g} s of SIGKILL; the "
        "kernel keeps them waiting, e.g. for a device. Try again later."
    )


def _still_there(handles: list[int], until: float) -> list[int]:
    """The processes that have not ended when time is up."""
    left = set(handles)
    poller = select.poll()
    for handle in left:
        poller.register(handle, select.POLLIN)
    while left and time.monotonic() < until:
        for handle, _ in poller.poll(max(1.0, (until - time.monotonic()) * 1e3)):
            poller.unregister(handle)
            left.discard(handle)
    return list(left)


def _lab_is_running(mark: str) -> bool:
    pid, _, ticks = mark.rpartition("-")[0].partition("-")
    return _start_ticks(int(pid)) == int(ticks)


def _start_ticks(pid: int) -> int | None:
    """When a process was started, in ticks since boot; None if it does not exist or is a zombie."""
    try:
        # The name of the program, in parentheses, may itself hold spaces and parentheses.
        fields = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _mark_of(folder: Path) -> str | None:
    """The value of LACONIC_LAB in a process's environment, if it has a valid one."""
    prefix = f"{VARIABLE}=".encode()
    for entry in _environment_of(folder).split(b"\0"):
        if entry.startswith(prefix):
            mark = entry.removeprefix(prefix).decode("ascii", "replace")
            parts = mark.split("-")
            return mark if len(parts) == 3 and parts[0].isdecimal() and parts[1].isdecimal() else None
    return None


def _environment_of(folder: Path) -> bytes:
    """The environment of a process, which the kernel shows as empty for a moment while it loads a program."""
    # Kernel threads and ended processes have no program: readlink raises for them.
    until = time.monotonic() + _STARTING_S
    while not (environment := (folder / "environ").read_bytes()) and time.monotonic() < until:
        (folder / "exe").readlink()
        time.sleep(0.001)
    return environment


def _user_of(folder: Path) -> int:
    for line in (folder / "status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    return -1


def _command_of(folder: Path) -> str:
    words = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    return " ".join(word for word in words if word)
