"""NVIDIA's Multi-Process Service for the duration of a `with` block, so that ranks on one GPU run in parallel.

Without it, processes that share a GPU take turns of some milliseconds, and every small exchange waits for the others'
turns. With it, their kernels run at the same time. Each block has a daemon of its own, with folders of its own, so
leftovers of a killed job in another daemon cannot affect it.

with shared_gpu("auto") as sharing:
    subprocess.Popen(command, env={**os.environ, **sharing.environment})
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from laconic.core.child_process import die_with_parent
from laconic.errors import UsageError, one_line
from laconic.lab import leftovers

MpsChoice = Literal["auto", "on", "off"]
CONTROL = "nvidia-cuda-mps-control"
_START_S = 20.0
"""Timeout until the first process can use the GPU through a new daemon, which then starts its server."""
_STOP_S = 10.0
_PROBE = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
for call in (lambda: cuda.cuInit(0), lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)):
    code = call()
    if code:
        sys.exit(f"CUDA error {code}")
"""
"""Gets a context on the GPU, as every rank does first. Without torch, to be fast."""


@dataclass(frozen=True)
class GpuSharing:
    """How ranks share a GPU."""

    mps: bool
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for every process that shares the GPU."""
    reason: str = ""
    """Why ranks take turns, if they do."""

    def __str__(self) -> str:
        return "sharing a GPU through MPS" if self.mps else "taking turns on a GPU"


@contextmanager
def shared_gpu(choice: MpsChoice = "auto") -> Iterator[GpuSharing]:
    """Start a daemon and stop it at the end; auto: if that fails, ranks take turns, and the result has the reason.

    Raises UsageError if it fails and `choice` is on.
    """
    if choice == "off":
        yield GpuSharing(mps=False, reason="MPS was turned off")
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        daemon = _Daemon(Path(folder))
        problem = daemon.start()
        try:
            if problem and choice == "on":
                raise UsageError(f"MPS cannot be used here: {problem}. With --mps off, ranks take turns on the GPU.")
            yield GpuSharing(mps=not problem, environment={} if problem else daemon.environment, reason=problem)
        finally:
            daemon.stop()


class _Daemon:
    def __init__(self, folder: Path) -> None:
        self.environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
        }
        self._folder = folder
        self._mark = leftovers.new_mark()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Start the daemon and return why it failed; empty: a process has used the GPU through it."""
        command = shutil.which(CONTROL)
        if command is None:
            return f"{CONTROL} is not installed"
        for path in self.environment.values():
            Path(path).mkdir()
        try:
            # In the foreground: it is then a child of this process, and ends with it.
            self._process = subprocess.Popen(
                [command, "-f"],
                env=self._variables(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509 - one system call, no lock
            )
        except OSError as exc:
            return f"{CONTROL} cannot be started: {exc.strerror}"
        return self._wait_until_usable()

    def _wait_until_usable(self) -> str:
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        problem = "no answer"
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return f"{CONTROL} ended with {self._process.returncode}: {self._last_words()}"
            if not (self._folder / "pipe" / "control").exists():
                time.sleep(0.05)
                continue
            try:
                tried = subprocess.run(
                    [sys.executable, "-S", "-c", _PROBE],
                    env=self._variables(),
                    capture_output=True,
                    text=True,
                    timeout=_START_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"the first process that used the GPU through it hung for {_START_S:g} s"
            if tried.returncode == 0:
                return ""
            problem = one_line(tried.stderr, 100)
            time.sleep(0.2)
        return f"the GPU could not be used through it within {_START_S:g} s: {problem}"

    def stop(self) -> None:
        """End the daemon and its server, and wait until both are gone: the next one may start at once."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            with suppress(OSError, subprocess.TimeoutExpired):  # ended below, whatever the answer
                subprocess.run(
                    [CONTROL],
                    input=b"quit -t 2\n",
                    env=self._variables(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=_STOP_S,
                    check=False,
                )
            try:
                process.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        leftovers.end_run(self._mark)

    def _variables(self) -> dict[str, str]:
        return {**os.environ, **self.environment, leftovers.VARIABLE: self._mark}

    def _last_words(self) -> str:
        log = self._folder / "log" / "control.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return one_line(lines[-1], 200) if lines else "no output"
