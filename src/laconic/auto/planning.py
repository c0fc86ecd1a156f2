"""Measurements of a training job as text for a planner in another process, and the planner's answer.

A search takes seconds of a core, so it runs in a child process while training continues. Most of this time is taken by
imports, so the process may be started before there is a question. Question and answer are JSON: workload and cluster in
the format of their files, a strategy as its text.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from laconic.cluster import Cluster
from laconic.core.child_process import die_with_parent
from laconic.errors import one_line
from laconic.workload import Workload
from laconic.workload.devices import DEVICES

_LIMIT_S = 120.0
"""How long a search may take before it is given up."""
_SHOWN = 300
"""Characters shown of the output of a failed process."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The input of a plan."""

    workload: Workload
    cluster: Cluster
    device: str
    """A GPU by its name in laconic.workload.devices, "cpu", or "" if it is none of these."""
    seen: tuple[str, float] | None = None
    """A strategy and its measured step time; None: not known."""
    given_up: tuple[str, ...] = ()
    """Strategies that were tried here and not faster, or that could not be used."""
    steps_left: int | None = None
    """Optimizer steps that are still to be made; None: not known."""
    free_bytes: int | None = None
    """Free memory on the device, for the state of a strategy; None: not known."""

    def to_table(self) -> dict[str, object]:
        """Plain values."""
        return {
            "workload": self.workload.to_json(),
            "cluster": self.cluster.to_toml(),
            "device": self.device,
            "seen": self.seen,
            "given_up": list(self.given_up),
            "steps_left": self.steps_left,
            "free_bytes": self.free_bytes,
        }


class Option(NamedTuple):
    """A strategy and its step time, as predicted or as measured."""

    strategy: str
    step_s: float
    steps_ratio: float = 1.0
    """Steps it needs for DDP's loss, as a multiple of DDP's."""

    @property
    def cost_s(self) -> float:
        """Time for as much progress as one step of DDP makes."""
        return self.step_s * self.steps_ratio


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The strategy to use."""

    best: Option
    """As predicted."""
    reason: str
    ddp_step_s: float
    """The predicted step time of DDP's strategy."""
    others: tuple[Option, ...] = ()
    """The next best, for the case that steps of the best take longer than predicted."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """The inverse of to_json."""
        table = json.loads(text)
        best, others = Option(*table.pop("best")), tuple(Option(*one) for one in table.pop("others"))
        return cls(best=best, others=others, **table)


class Search(Protocol):
    """A running search."""

    def decision(self) -> Decision | str | None:
        """The result, or why there is none; None while the search runs."""
        ...

    def stop(self) -> None:
        """Cancel it; calling it again does nothing."""
        ...


class Planner(Protocol):
    """Searches for a strategy."""

    def prepare(self) -> None:
        """Get ready for a search that will probably start soon; returns at once."""
        ...

    def start(self, findings: Findings) -> Search:
        """Begin; returns at once."""
        ...

    def stop(self) -> None:
        """No further search will start; calling it again does nothing."""
        ...


class InChildProcess:
    """The planner of `laconic plan` in a process of its own."""

    def __init__(self, *, max_loss_gap: float | None, task: str, total_steps: int | None) -> None:
        self._asked = {"max_loss_gap": max_loss_gap, "task": task, "total_steps": total_steps}
        self._ready: _Child | None = None

    def prepare(self) -> None:
        """Start the process, unless one waits for a question already; if that fails, `start` tries again."""
        if self._ready is None:
            with suppress(OSError):
                self._ready = _Child()

    def start(self, findings: Findings) -> Search:
        """Give it everything it needs."""
        try:
            child, self._ready = self._ready or _Child(), None
            child.ask(json.dumps({**findings.to_table(), **self._asked}))
        except OSError as error:
            return _NotStarted(f"the planner could not be started: {one_line(error)}")
        return child

    def stop(self) -> None:
        """End a process that was not asked."""
        if self._ready is not None:
            self._ready.stop()
            self._ready = None


class _NotStarted:
    """A search that never began."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def decision(self) -> str:
        """Why not."""
        return self._reason

    def stop(self) -> None:
        """There is nothing to cancel."""


class _Child:
    """A process that waits for one question."""

    def __init__(self) -> None:
        self._asked_s = 0.0
        # Question and answer are in files, not in pipes: neither waits for the other to read.
        self._folder = Path(tempfile.mkdtemp(prefix="laconic-auto-"))
        self._given, self._answer, self._errors = (self._folder / name for name in ("given", "answer", "errors"))
        with self._answer.open("w") as stdout, self._errors.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "laconic.auto.choose"],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                preexec_fn=die_with_parent(),  # noqa: PLW1509 - it takes no lock
            )

    def ask(self, text: str) -> None:
        """Ask the question: its file's name is one line of standard input."""
        self._asked_s = time.monotonic()
        self._given.write_text(text, encoding="utf-8")
        with suppress(BrokenPipeError):  # it has ended: decision() says how
            assert self._process.stdin is not None
            self._process.stdin.write(os.fsencode(self._given) + b"\n")

    def decision(self) -> Decision | str | None:
        """The output of the process, or how it has ended."""
        code = self._process.poll()
        if code is None:
            if time.monotonic() - self._asked_s < _LIMIT_S:
                return None
            return f"the planner has not answered in {_LIMIT_S:g} s"
        if code:
            said = self._errors.read_text(encoding="utf-8", errors="replace").strip()
            return f"the planner has ended with {code}: {one_line(said[-_SHOWN:], _SHOWN)}"
        return Decision.from_json(self._answer.read_text(encoding="utf-8"))

    def stop(self) -> None:
        """Kill it if it still runs, and remove its files."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def device_name(device: torch.device) -> str:
    """The device with measured encoding costs that is most like this one; "" if there is none."""
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        return ""
    said = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    return next((name for name in sorted(DEVICES, key=len, reverse=True) if name in said), "")
