"""Servers started beside the workers: child processes of a job's ranks, or threads where ranks are threads too."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from typing import Protocol

from laconic.core.connection import Address
from laconic.core.listener import Listener
from laconic.errors import CommunicationError, one_line
from laconic.runtime.servers.service import Service

_LOG = logging.getLogger("laconic")
_START_S = 120.0
"""A process must first import torch, and many may do so at the same time."""
_END_S = 5.0


class Beside(Protocol):
    """A server that this rank has started."""

    address: Address

    def stop(self, timeout_s: float) -> None:
        """Wait until all ranks have said goodbye, for at most `timeout_s`, then end it."""
        ...


class ThreadServer:
    """A server in threads of this process."""

    def __init__(self, host: str, name: str, token: bytes) -> None:
        self._service = Service(name)
        self._listener = Listener(self._service, address=(host, 0), token=token, name=name)
        self.address = self._listener.address

    def stop(self, timeout_s: float) -> None:
        """See Beside."""
        self._service.finished.wait(timeout_s)
        self._listener.close()


class ProcessServer:
    """A server in a child process."""

    def __init__(self, host: str, name: str, token: bytes) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "laconic.runtime.servers.process", host, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(token.hex() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as exc:
            raise CommunicationError(f"{name} ended before it listened: {one_line(exc)}.") from exc
        self.address = (host, self._read_port())

    def _read_port(self) -> int:
        lines: list[str] = []
        stdout = self._process.stdout
        assert stdout is not None
        reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
        reader.start()
        reader.join(_START_S)
        if not lines or not lines[0].strip().isdigit():
            self._process.kill()
            self._process.wait(_END_S)
            raise CommunicationError(f"{self._name}, a child process of this rank, did not start in {_START_S:g} s.")
        return int(lines[0])

    def stop(self, timeout_s: float) -> None:
        """See Beside."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            if timeout_s > 0:
                _LOG.warning("%s was ended: not all ranks said goodbye in %g s.", self._name, timeout_s)
            self._process.kill()
            self._process.wait(_END_S)
        finally:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
