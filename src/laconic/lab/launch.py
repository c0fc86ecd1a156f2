"""Starts the ranks of one job on this machine and waits until all of them have ended.

Each rank gets the environment torchrun would give it. When one fails, the others get a moment to report why they
stopped, and are then ended; the same happens on Ctrl-C and at the time limit. All processes that the ranks have started
end with the run, detached ones too, and no others. If this process is killed its ranks die with it; leftovers.py
handles the rest.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from laconic.core.child_process import die_with_parent
from laconic.core.paced import PACE_VARIABLE
from laconic.errors import LaconicError, UsageError, one_line
from laconic.lab import leftovers

_GRACE_S = 10.0
"""Time for the other ranks to notice a lost peer and report it before they are ended."""
_FIRST_PORT = 10_000
_PORT_TRIES = 100
_KEPT_LINES = 40
_TRACEBACK = "Traceback (most recent call last)"
_RANK = re.compile(r"^\[rank\d+\]: ?")
"""The prefix that torch writes before every line of a traceback."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its environment, and the function that enters its host between fork and exec."""

    environment: Mapping[str, str]
    enter: Callable[[], None] | None = None


class RankFailed(LaconicError):
    """A rank that did not end with 0."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """The status a shell would show for it: its exit code, 128 + signal, or 124 for a time limit."""


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
    """A free TCP port on the loopback interface, outside the range that the system assigns by itself.

    A port from the system's own range could be taken by any connection before the job listens on it.
    """
    for _ in range(_PORT_TRIES):
        port = random.SystemRandom().randrange(_FIRST_PORT, _first_system_port())
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise LaconicError(f"no free port between {_FIRST_PORT} and {_first_system_port()} in {_PORT_TRIES} tries.")


def _first_system_port() -> int:
    """The first port that the system assigns to connections by itself."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux
        first = 32_768
    return max(first, 2 * _FIRST_PORT)


def places_here(num_ranks: int) -> list[Place]:
    """Ranks on this machine, over its loopback interface."""
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

    Raises RankFailed with the first rank that failed and its last message.
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

    Processes that a rank has started may print more after the rank's own last message.
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
    # A pace set in the caller's shell is not the link of this run.
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
            # A session of its own: Ctrl-C reaches only this process, which ends the rank with everything it started.
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
    """Wait until all have ended or time is up; return the first rank that failed, if any."""
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
    # Detached processes of a rank would keep its host, and the pipe of its output.
    leftovers.end_run(mark)
    for rank in ranks:
        rank.reader.join(timeout=2.0)


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
