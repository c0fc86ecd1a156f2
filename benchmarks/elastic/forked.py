"""Workers that are forked from a process that has laconic loaded, which takes long, and not started by a command."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from laconic.membership.agent import Process, Spawn

_starting = threading.Lock()


class ForkedWorker:
    """A forked process as subprocess would have it."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self._lock = threading.Lock()
        assert process.pid is not None, "it has been started"
        self.pid: int = process.pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """See Process; any number of threads may wait."""
        if self.returncode is None:
            if not wait([self._process.sentinel], timeout):
                raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
            with self._lock:
                if self.returncode is None:
                    with _starting:  # which looks how others ended too, and that can be read only once
                        self._process.join()
                        self.returncode = self._process.exitcode
        assert self.returncode is not None, "it has ended"
        return self.returncode


def spawn_function(target: str, arguments: Mapping[str, object], folder: Path, *, preload: Sequence[str] = ()) -> Spawn:
    """Starts workers that call "module:function" with `arguments`; what they print goes to files in `folder`.

    preload: what the process that workers are forked from imports when it starts, unless it runs already.
    """
    context = multiprocessing.get_context("forkserver")
    if preload:
        context.set_forkserver_preload(["torch._dynamo", *preload])

    def spawn(environment: Mapping[str, str]) -> Process:
        with _starting:
            process = context.Process(
                target=_be_worker, args=(dict(environment), target, json.dumps(dict(arguments)), str(folder))
            )
            process.start()
        return ForkedWorker(process)

    return spawn


def _be_worker(environment: dict[str, str], target: str, arguments: str, folder: str) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    name = environment["LACONIC_WORKER"]
    with (Path(folder) / f"{name}.out").open("wb", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(**json.loads(arguments))
