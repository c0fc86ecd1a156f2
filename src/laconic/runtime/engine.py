"""The communication thread: the only place that issues operations, in one order that is the same on every rank.

Exchanges are generators (see core/exchange.py). The thread starts them in the order submitted and resumes them in an
order that depends only on that order and on how many rounds each has, never on which network operation happens to
finish first - so methods with several rounds and many buckets in flight cannot mix up operations between ranks.

    start the next exchange while fewer than `window` are open and the last one has not come yet;
    otherwise wait for the oldest open one, resume it, and put it at the end if it has issued another round.

An exchange whose only remaining work is local (decoding) issues nothing, so it is finished early when it can be. An
exchange that is made in two halves is put aside after its first round; the task that continues it comes later.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from laconic.core.event import Scalar
from laconic.core.exchange import Exchange
from laconic.core.transport import Transport, Work
from laconic.errors import CommunicationError, one_line
from laconic.runtime.stopwatch import Mark, Stopwatch

_WINDOW = 8
"""Exchanges open at a time: enough to hide start-up costs, few enough to bound the memory of payloads."""

_LOOK_S = 0.001
"""How often, while nothing new comes, it is looked whether something has arrived."""


@dataclass
class Task:
    """One exchange to run."""

    what: str
    start: Callable[[], Exchange]
    num_waits: int | None = None
    """How often it yields, if known: then its last part, which sends nothing, may run early."""
    last: bool = True
    """No further task belongs to this step, so open exchanges are completed."""
    step: int = 0
    device: torch.device = torch.device("cpu")
    on_done: Callable[[], None] | None = None
    nbytes: int = 0
    """How much is under way while it is open, where that is limited."""
    credit_bytes: int = 0
    """Bytes that may be under way when the next one starts; 0: as many exchanges as usual."""
    put_aside: bool = False
    """After its first round it waits for a task that continues it."""
    continues: Task | None = None
    """The task that was put aside; this one only carries it on."""
    bucket: int | None = None
    """Its number in the plan, if it is an exchange the event log should show."""
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What it has measured once it is done, for the event log."""
    number: int = 0
    """Its place among all that were submitted, counted from 1: the same on every rank."""
    submitted_s: float = 0.0
    ended_s: float | None = None
    """When it was finished, where the host sees that."""
    inputs_ready: torch.cuda.Event | None = None
    finished: threading.Event = field(default_factory=threading.Event)
    outputs_ready: torch.cuda.Event | None = None


@dataclass
class _Open:
    task: Task
    exchange: Exchange
    work: Work
    began: Mark
    sent_bytes: int
    num_waits: int = 1
    finished: bool = False
    carried_on: bool = False


def _may_finish(entry: _Open) -> bool:
    """Whether nothing remains to be issued, so that it may be finished as soon as its last round has come."""
    if entry.finished or (entry.task.put_aside and not entry.carried_on):
        return False
    return entry.num_waits == entry.task.num_waits


class Engine:
    """Runs tasks on one thread, in the order submitted."""

    def __init__(self, transport: Transport, stopwatch: Stopwatch) -> None:
        self._transport = transport
        self._stopwatch = stopwatch
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._stopped = False
        self.num_submitted = 0
        self._aside: dict[int, _Open] = {}
        self._thread = threading.Thread(target=self._run, name="laconic-communication", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> Task:
        """Hand over a task; its tensors belong to the engine until it is finished."""
        if task.device.type == "cuda":
            task.inputs_ready = torch.cuda.Event()
            task.inputs_ready.record(torch.cuda.current_stream(task.device))
        task.submitted_s = self._stopwatch.now()
        self.num_submitted += 1
        task.number = self.num_submitted
        self._queue.put(task)
        return task

    def wait(self, task: Task) -> None:
        """Return when `task` is finished (on a GPU: when the current stream may use its result)."""
        # Every network wait inside the thread has its own timeout, so this only has to notice a dead thread.
        while not task.finished.wait(1.0):
            if not self._thread.is_alive():
                break
        self.check()
        if task.outputs_ready is not None:
            torch.cuda.current_stream(task.device).wait_event(task.outputs_ready)

    def call(self, what: str, start: Callable[[], Exchange], *, step: int, device: torch.device) -> None:
        """Run one exchange in order and wait for it."""
        self.wait(self.submit(Task(what, start, step=step, device=device)))

    def failed(self) -> bool:
        """Whether something went wrong on the communication thread; `check` says what."""
        return self._error is not None

    def check(self) -> None:
        """Raise what went wrong on the communication thread."""
        error = self._error or self._transport.known_failure()
        if error is not None:
            raise error
        if self._stopped:
            raise CommunicationError("the session is detached; attach again to communicate.")

    def stop(self) -> None:
        """End the thread; what it has not started is dropped."""
        self._stopped = True
        self._queue.put(None)
        # A thread that waits for a lost peer ends by its own timeout; do not hold up the caller for that.
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        running: deque[_Open] = deque()
        entry: _Open | None = None
        last_came = True
        task: Task | None = None
        with torch.no_grad():
            try:
                while True:
                    if not running or (not last_came and self._may_start(running)):
                        task = entry = None  # what is done must not keep its buckets in memory while we wait
                        task = self._next(running)
                        if task is None:
                            return
                        last_came = task.last
                        if task.continues is not None:
                            self._carry_on(task, running)
                        else:
                            self._start(task, running)
                        self._finish_early(running)
                    else:
                        entry = running.popleft()
                        task = entry.task
                        if entry.task.put_aside and not entry.carried_on:
                            self._put_aside(entry)
                        elif not entry.finished and self._resume(entry):
                            running.append(entry)
            except BaseException as exc:  # noqa: BLE001 - carried to the training thread by check()
                self._error = exc
                if not isinstance(exc, CommunicationError):
                    problem = f"raised {type(exc).__name__} while communicating: {one_line(exc)}"
                    self._transport.announce_failure(problem)
                self._drain(task, running)

    def _next(self, running: deque[_Open]) -> Task | None:
        """The next task; until it comes, what has arrived is finished."""
        while any(_may_finish(entry) for entry in running):
            try:
                return self._queue.get(timeout=_LOOK_S)
            except queue.Empty:
                self._finish_early(running)
        return self._queue.get()

    def _may_start(self, running: deque[_Open]) -> bool:
        """Whether another exchange may be opened; depends on nothing but which came before."""
        credit = running[-1].task.credit_bytes
        if credit:
            return sum(entry.task.nbytes for entry in running) < credit
        return len(running) < _WINDOW

    def _put_aside(self, entry: _Open) -> None:
        with self._on_stream(entry.task):
            entry.work.wait()
            self._note("exchange", entry.task, entry.began, wire_bytes=entry.sent_bytes, half=1)
        entry.sent_bytes = 0
        self._aside[id(entry.task)] = entry

    def _carry_on(self, task: Task, running: deque[_Open]) -> None:
        """Issue the second half of an exchange."""
        assert task.continues is not None
        while id(task.continues) not in self._aside:
            # Entries before it are also only waited for: what they issue next comes with a task of its own.
            oldest = running.popleft()
            if oldest.task.put_aside and not oldest.carried_on:
                self._put_aside(oldest)
            elif not oldest.finished and self._resume(oldest):
                running.append(oldest)
        entry = self._aside.pop(id(task.continues))
        entry.carried_on = True
        before = self._transport.traffic.total_bytes
        with self._on_stream(entry.task):
            # Between its halves nothing of it is under way.
            entry.began = self._stopwatch.mark(entry.task.device)
            work = next(entry.exchange, None)
        entry.sent_bytes += self._transport.traffic.total_bytes - before
        task.finished.set()
        if work is None:
            self._finish(entry.task, entry.began, entry.sent_bytes)
        else:
            entry.work = work
            entry.num_waits += 1
            running.append(entry)

    def _start(self, task: Task, running: deque[_Open]) -> None:
        self._transport.set_status(f"step {task.step}: {task.what}", exchange=task.number)
        before = self._transport.traffic.total_bytes
        with self._on_stream(task):
            began = self._stopwatch.mark(task.device)
            exchange = task.start()
            work = next(exchange, None)
            self._note("encode", task, began)
        # Only this thread sends, so the difference is what this exchange has put on the wire.
        sent_bytes = self._transport.traffic.total_bytes - before
        if work is None:
            self._finish(task, began, sent_bytes)
        else:
            running.append(_Open(task, exchange, work, began, sent_bytes))
        if not task.last:
            self._transport.set_status(f"step {task.step}: computing gradients after {task.what}")

    def _resume(self, entry: _Open) -> bool:
        """Wait for the round in flight and continue; True if another round has been issued."""
        before = self._transport.traffic.total_bytes
        with self._on_stream(entry.task):
            entry.work.wait()
            arrived = self._stopwatch.mark(entry.task.device)
            work = next(entry.exchange, None)
            self._note("decode", entry.task, arrived)
        entry.sent_bytes += self._transport.traffic.total_bytes - before
        if work is None:
            entry.finished = True
            self._finish(entry.task, entry.began, entry.sent_bytes)
            return False
        entry.work = work
        entry.num_waits += 1
        return True

    def _finish_early(self, running: deque[_Open]) -> None:
        # Finished entries keep their place: how many are open must not depend on the network's timing.
        for entry in running:
            if _may_finish(entry) and entry.work.done():
                issued = self._resume(entry)
                assert not issued, f"{entry.task.what}: more rounds than its compressor declares"

    def _finish(self, task: Task, began: Mark, sent_bytes: int) -> None:
        data: dict[str, Scalar | torch.Tensor] = {"wire_bytes": sent_bytes, **task.metrics}
        if task.put_aside:
            data["half"] = 2
        if task.device.type == "cuda":
            task.outputs_ready = torch.cuda.Event()
            task.outputs_ready.record(self._stream(task.device))
            with torch.cuda.stream(self._stream(task.device)):
                self._note("exchange", task, began, **data)
        else:
            task.ended_s = self._stopwatch.now()
            self._note("exchange", task, began, **data)
        if task.on_done is not None:
            task.on_done()
        if task.last:
            self._transport.set_status(f"step {task.step}: computing")
        task.finished.set()

    def _note(self, kind: str, task: Task, began: Mark, **data: Scalar | torch.Tensor) -> None:
        """Record what began then and ends now."""
        if task.bucket is not None:
            ended = self._stopwatch.mark(task.device)
            self._stopwatch.note(kind, task.step, began, ended, bucket=task.bucket, **data)

    def _drain(self, task: Task | None, running: deque[_Open]) -> None:
        """Release everyone who waits; they find the error in check()."""
        left = [entry.task for entry in (*running, *self._aside.values())] + ([task] if task is not None else [])
        while True:
            for waiting in left:
                if waiting.on_done is not None and not waiting.finished.is_set():
                    waiting.on_done()
                waiting.finished.set()
            following = self._queue.get()
            if following is None:
                return
            left = [following]

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _on_stream(self, task: Task) -> AbstractContextManager[object]:
        if task.device.type != "cuda":
            return nullcontext()
        stream = self._stream(task.device)
        if task.inputs_ready is not None:
            stream.wait_event(task.inputs_ready)
        return torch.cuda.stream(stream)
