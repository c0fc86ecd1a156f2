"""The common base of all sinks for experiment trackers.

Values are sent by a thread of the sink, so that training never waits for a disk or a network. A tracker that fails must
not end a training of days, and must not fail silently: the first failure is a LaconicWarning with the reason, and the
sink ignores further events. To stop training instead, turn that warning into an error (`warnings.simplefilter("error",
laconic.LaconicWarning)`), or check `sink.failure`.
"""

from __future__ import annotations

import importlib
import queue
import threading
from abc import ABC, abstractmethod
from types import ModuleType, TracebackType
from typing import Self

from laconic.core.event import Event
from laconic.errors import LaconicError, one_line, warn_user
from laconic.sinks.step_values import StepSums, StepValues

_CLOSE_S = 60.0
"""How long closing waits for values that are still to be sent."""


class TrackerSink(ABC):
    """An event sink that hands a few numbers per step to a tracker. One sink is for one rank."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        """Why the tracker has failed, if it has."""
        self._told = False
        self._sums = StepSums()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[StepValues | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._thread.start()

    @abstractmethod
    def send(self, values: StepValues) -> None:
        """Pass the numbers of one step to the tracker; called on the thread of the sink."""

    def finish(self) -> None:  # noqa: B027 - most trackers have nothing to do here
        """Close the sink's connection to the tracker; called once, on the thread of the sink, after all values."""

    def write(self, event: Event) -> None:
        """Take one event; the numbers of a step are sent when two more steps have been made."""
        with self._lock:
            if self._closed:
                raise LaconicError(f"the {type(self).__name__} is closed.")
            for values in self._sums.add(event):
                self._queue.put(values)
        self._tell()

    def close(self) -> None:
        """Send what is left and wait for it; closing twice is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for values in self._sums.rest():
                    self._queue.put(values)
                self._queue.put(None)
        self._thread.join(timeout=_CLOSE_S)
        if self._thread.is_alive():
            warn_user(f"{type(self).__name__} has not sent its last values in {_CLOSE_S:g} s; they may be lost.")
        self._tell()

    def _run(self) -> None:
        step = 0
        try:
            while (values := self._queue.get()) is not None:
                step = values.step
                self.send(values)
            self.finish()
        except Exception as exc:  # noqa: BLE001 - a tracker may fail in any way; the training thread tells the user
            exc.add_note(f"in step {step}")
            self.failure = exc

    def _tell(self) -> None:
        if self.failure is not None and not self._told:
            self._told = True
            notes = ", ".join(getattr(self.failure, "__notes__", ()))
            warn_user(
                f"{type(self).__name__} failed {notes} and ignores further events; training continues. "
                f"{type(self.failure).__name__}: {one_line(self.failure)}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def tracker_package(module: str, *, package: str, sink: str) -> ModuleType:
    """Import an optional package; if it is missing, raise an error that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise LaconicError(
            f'{sink} needs {package}. Install it with "pip install {package}". ({one_line(exc, 120)})'
        ) from exc
