"""Start the ranks of one job on this machine and see all of them to their end.

Each rank gets the environment torchrun would give it. When one fails, the others are given a moment to say why they
stopped, then ended; the same happens on Ctrl-C and at the time limit. With the run end all processes its ranks have
started, detached ones too, and no others. If this process is killed its ranks die with it; leftovers.py has the rest.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from laconic.core.paced import PACE_VARIABLE
from laconic.errors import LaconicError, UsageError, one_line
from laconic.lab import leftovers

_GRACE_S = 10.0
"""Time for the other ranks to notice a lost peer and report it before they are ended."""
_KEPT_LINES = 40
_DIE_WITH_PARENT = 1
_TRACEBACK = "Traceback (most recent call last)"
_RANK = re.compile(r"^\[rank\d+\]: ?")
"""What torch writes before every line of a traceback."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs: what its environment says, and how it gets there between fork and exec."""

    environment: Mapping[str, str]
    enter: Callable[[], None] | None = None


class RankFailed(LaconicError):
    """A rank that did not end with 0."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """What a shell would show for it: its exit code, 128 + signal, or 124 for a time limit."""


@dataclass
class Rank:
    """One process of the job and how it ended."""

    rank: int
    process: subprocess.Popen[str]
    reader: threading.Thread
    last_lines: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None while it runs; negative if a signal ended it."""
        return self.process.poll()


def free_port() -> int:
    """A TCP port on the loopback interface that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def places_here(num_ranks: int) -> list[Place]:
    """Ranks side by side on this machine, over its loopback interface."""
    if num_ranks < 1:
        raise UsageError(f"the number of ranks must be >= 1, got {num_ranks}.")
    master = ("127.0.0.1", free_port())
    return [
        Place(
            torchrun_environment(rank, num_ranks, host=0, ranks_per_host=num_ranks, master=master),
            die_with_parent(),
        )
        for rank in range(num_ranks)
    ]


def die_with_parent() -> Callable[[], None] | None:
    """What a child must call between fork and exec to be killed when its parent dies; None where that is unknown."""
    if not sys.platform.startswith("linux"):
        return None
    # Looked up before the fork: the child must not need locks that another thread may hold.
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def enter() -> None:
        prctl(_DIE_WITH_PARENT, signal.SIGKILL)

    return enter


def torchrun_environment(
    rank: int, world_size: int, *, host: int, ranks_per_host: int, master: tuple[str, int]
) -> dict[str, str]:
    """The variables torchrun would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % ranks_per_host),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(world_size // ranks_per_host),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }


def run_ranks(
    command: Sequence[str],
    places: Sequence[Place],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[int, str], None] = lambda rank, line: None,
) -> None:
    """Run `command` once per place, one rank each, and return when all have ended with 0.

    Raises RankFailed naming the first rank that failed and the last thing it said.
    """
    ranks: list[Rank] = []
    mark = leftovers.new_mark()
    try:
        for rank, place in enumerate(places):
            variables = {**(environment or {}), **place.environment, leftovers.VARIABLE: mark}
            ranks.append(_start(command, rank, place.enter, environment=variables, on_line=on_line))
        failed = _watch(ranks, time.monotonic() + timeout_s)
    finally:
        _end(ranks, mark)
    if failed is not None:
        said = last_words(failed.last_lines)
        code = failed.process.returncode
        raise RankFailed(
            f"rank {failed.rank} of {len(ranks)} ended with {_describe(code)}; it last said: {one_line(said, 300)}",
            exit_code=code if code > 0 else 128 - code,
        )
    unfinished = [rank.rank for rank in ranks if rank.process.returncode != 0]
    if unfinished:
        raise RankFailed(
            f"rank {', '.join(map(str, unfinished))} did not end within {timeout_s:g} s and was stopped. "
            "Give it more time or fewer steps.",
            exit_code=124,
        )


def last_words(lines: Sequence[str]) -> str:
    """The exception of the last traceback, else the last line that is not empty.

    What a rank has started may go on talking after the rank's own last words.
    """
    plain = [_RANK.sub("", line) for line in lines]
    traces = [number for number, line in enumerate(plain) if line.startswith(_TRACEBACK)]
    if traces:
        own = (line for line in plain[traces[-1] + 1 :] if line.strip() and not line[0].isspace())
        if (found := next(own, None)) is not None:
            return found
    return next((line for line in reversed(plain) if line.strip()), "nothing")


def _start(
    command: Sequence[str],
    rank: int,
    enter: Callable[[], None] | None,
    *,
    environment: Mapping[str, str],
    on_line: Callable[[int, str], None],
) -> Rank:
    # A pace in the caller's shell is not the link this run says it has.
    inherited = {name: value for name, value in os.environ.items() if name != PACE_VARIABLE}
    variables = {**inherited, **environment, "PYTHONUNBUFFERED": "1"}
    try:
        process = subprocess.Popen(
            list(command),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # A session of its own: Ctrl-C reaches us alone, and we end the rank with everything it started.
            start_new_session=True,
            preexec_fn=enter,  # noqa: PLW1509 - enters a namespace: a few system calls, no lock
        )
    except OSError as exc:
        raise UsageError(f"cannot start {command[0]}: {exc.strerror}.") from exc
    except subprocess.SubprocessError as exc:
        raise LaconicError(f"rank {rank} could not enter its virtual host: {one_line(exc)}.") from exc
    last_lines: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            last_lines.append(line.rstrip("\n"))
            del last_lines[:-_KEPT_LINES]
            on_line(rank, line.rstrip("\n"))

    reader = threading.Thread(target=read, name=f"output-of-rank-{rank}", daemon=True)
    reader.start()
    return Rank(rank, process, reader, last_lines)


def _watch(ranks: list[Rank], deadline: float) -> Rank | None:
    """Wait until all have ended or time is up; the first rank that failed, if any."""
    failed: Rank | None = None
    while any(rank.exit_code is None for rank in ranks) and time.monotonic() < deadline:
        if failed is None:
            failed = next((rank for rank in ranks if rank.exit_code not in (None, 0)), None)
            if failed is not None:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(0.05)
    return failed or next((rank for rank in ranks if rank.exit_code not in (None, 0)), None)


def _end(ranks: list[Rank], mark: str) -> None:
    for stop in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            if rank.exit_code is None:
                os.killpg(rank.process.pid, stop)
        until = time.monotonic() + 3.0
        while any(rank.exit_code is None for rank in ranks) and time.monotonic() < until:
            time.sleep(0.02)
    for rank in ranks:
        rank.process.wait()
    # What a rank has detached would keep its host, and the pipe its output goes into.
    leftovers.end_run(mark)
    for rank in ranks:
        rank.reader.join(timeout=2.0)


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
