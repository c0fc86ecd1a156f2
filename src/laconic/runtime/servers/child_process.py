"""Servers that a rank starts: child processes, or threads where ranks are threads too."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from laconic.core.connection import Address
from laconic.core.listener import Listener
from laconic.errors import CommunicationError, one_line
from laconic.runtime.servers.server import Server

_LOG = logging.getLogger("laconic")
_START_S = 120.0
"""Start-up timeout: a process first imports torch and compiles kernels, and many may start at the same time."""
_HANG_UP_S = 2.0
"""Time for ranks to disconnect when all have said goodbye; a rank that takes longer has stalled."""
_END_S = 10.0
"""Time for a killed process to end, and for its reader after it."""


@dataclass(frozen=True)
class Assignment:
    """The work of a server, so that it can load and compile everything before it listens."""

    strategy: str
    dtypes: Sequence[torch.dtype]
    holds: bool
    """Whether it holds parameters; otherwise it forms sums."""


class LocalServer(Protocol):
    """A server that this rank has started."""

    @property
    def address(self) -> Address:
        """The address it listens on, once it does."""
        ...

    def listens(self, wait_s: float) -> bool:
        """Whether it listens within `wait_s`; raises CommunicationError if it never will."""
        ...

    def stop(self, *, at_once: bool) -> None:
        """End it: now, or when all ranks have said goodbye and disconnected."""
        ...


class ThreadServer:
    """A server in threads of this process; it loads its code when it is configured."""

    def __init__(
        self, host: str, name: str, token: bytes, *, max_connections: int, work: Assignment, namespace: str = ""
    ) -> None:
        assert not namespace, "a thread stays where its process is"
        self._service = Server(name, host=host)
        self._listener = Listener(
            self._service, address=(host, 0), token=token, name=name, max_connections=max_connections
        )
        self.address = self._listener.address

    def listens(self, wait_s: float) -> bool:
        return True

    def stop(self, *, at_once: bool) -> None:
        if not at_once:
            self._service.finished.wait(_HANG_UP_S)
        self._service.finished.set()
        self._listener.close()
        self._service.close()


class ProcessServer:
    """A server in a child process; with `namespace`, on the lab's switch."""

    def __init__(
        self, host: str, name: str, token: bytes, *, max_connections: int, work: Assignment, namespace: str = ""
    ) -> None:
        self._name = name
        self._host = host
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "laconic.runtime.servers.process", host, name, str(max_connections)),
                *("holds" if work.holds else "sums", work.strategy),
                ",".join(str(dtype).removeprefix("torch.") for dtype in work.dtypes),
                namespace,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._began_s = time.monotonic()
        self._first_line: list[str] = []
        self._reader = threading.Thread(target=self._read, name=f"laconic-{name}-start", daemon=True)
        self._reader.start()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(token.hex() + "\n")
            self._process.stdin.flush()
        except OSError as exc:
            self.stop(at_once=True)
            raise CommunicationError(f"{name} ended before it listened: {one_line(exc)}.") from exc

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._first_line.append(self._process.stdout.readline().strip())

    @property
    def address(self) -> Address:
        return self._host, int(self._first_line[0])

    def listens(self, wait_s: float) -> bool:
        self._reader.join(wait_s)
        if self._first_line and self._first_line[0].isdigit():
            return True
        if self._first_line:
            raise CommunicationError(
                f"{self._name}, a child process, ended before it listened; its standard error says why."
            )
        if time.monotonic() - self._began_s > _START_S:
            raise CommunicationError(f"{self._name}, a child process, did not listen in {_START_S:g} s.")
        return False

    def stop(self, *, at_once: bool) -> None:
        try:
            if not at_once:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_HANG_UP_S)
            # Every rank that needs it has said goodbye, or the job is over: killing it loses nothing.
            self._process.kill()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                _LOG.warning("%s, process %d, was killed and still runs.", self._name, self._process.pid)
            self._reader.join(_END_S)
        finally:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
