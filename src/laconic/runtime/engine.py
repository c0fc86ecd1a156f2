"""The only place that issues operations, in the order of core/order.py.

Exchanges are generators (see core/exchange.py): the engine advances one round at a time, as the order says. An exchange
whose only remaining work is local (decoding) is finished as soon as its last round has arrived.

Where the host waits for operations, a communication thread issues them. Operations that run on a GPU's stream (NCCL)
are issued by the thread that submits an exchange, before `submit` returns, as DDP does. NCCL needs this: kernels of two
communicators may wait for each other forever unless every rank launches them in the same order, and training scripts
have communicators of their own (a mean of losses, SyncBatchNorm, FSDP2).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType

import torch

from laconic.core.event import Scalar
from laconic.core.exchange import Exchange
from laconic.core.order import Action, ExchangeOrder
from laconic.core.transport import Transport, Work
from laconic.errors import CommunicationError, one_line
from laconic.runtime.profiler_range import profiler_range
from laconic.runtime.stopwatch import Mark, Stopwatch

_POLL_S = 0.001
"""Poll interval for arrived exchanges while nothing new is submitted."""


@dataclass(eq=False)
class Task:
    """One exchange to run."""

    what: str
    start: Callable[[], Exchange]
    num_waits: int | None = None
    """How often it yields, if known: then its decoding after the last round may run early."""
    last: bool = True
    """No further task belongs to this step, so exchanges in flight are completed."""
    step: int = 0
    device: torch.device = torch.device("cpu")
    on_done: Callable[[], None] | None = None
    """Called by the thread that finishes it, on a GPU with its stream as the current one, also after a failure."""
    nbytes: int = 0
    """Bytes that it keeps in flight until it is finished, where bytes in flight are limited."""
    credit_bytes: int = 0
    """Bytes that may be in flight when the next one starts; 0: the number of exchanges is limited instead."""
    decoupled: bool = False
    """After its first round it waits for `Engine.submit_second_half`."""
    over_group: bool = False
    """All its operations are those of the transport, none those of servers or connections of its own."""
    bucket: int | None = None
    """Its number in the plan, if the event log should show it."""
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Its measurements once it is done, for the event log."""
    number: int = 0
    """Its number in the order of submission, counted from 1: the same on every rank."""
    submitted_s: float = 0.0
    ended_s: float | None = None
    """When it was finished, where the host sees that."""
    inputs_ready: torch.cuda.Event | None = None
    finished: threading.Event = field(default_factory=threading.Event)
    """Set when it is finished, also after a failure."""
    succeeded: bool = False
    outputs_ready: torch.cuda.Event | None = None

    def renew(self, other: Task) -> None:
        """Take over the work of `other`: this task is about to be submitted again, to another engine."""
        self.start, self.num_waits, self.metrics = other.start, other.num_waits, other.metrics
        self.finished, self.succeeded, self.ended_s, self.outputs_ready = threading.Event(), False, None, None

    @property
    def label(self) -> str:
        """Its name in a profiler: short, and the same in every step."""
        return self.what if self.bucket is None else f"bucket {self.bucket}"


@dataclass
class _Running:
    """A task whose first round has been issued."""

    exchange: Exchange
    work: Work
    began: Mark
    sent_bytes: int
    num_waits: int = 1


@dataclass(frozen=True)
class _Submission:
    task: Task
    last: bool
    second_half: bool


class Engine:
    """Runs tasks one after another, in one order."""

    def __init__(
        self, transport: Transport, stopwatch: Stopwatch, *, recoverable: tuple[type[BaseException], ...] = ()
    ) -> None:
        """recoverable: errors that only `wait` raises, not `check`."""
        self._transport = transport
        self._stopwatch = stopwatch
        self._recoverable = recoverable
        self._queue: queue.SimpleQueue[_Submission | None] = queue.SimpleQueue()
        self._issuing = threading.RLock()
        """Held by the thread that issues operations."""
        self._order: ExchangeOrder[Task] = ExchangeOrder()
        self._running: dict[int, _Running] = {}
        self._error: BaseException | None = None
        self._reported = False
        self._traceback: TracebackType | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._stopped = False
        self.num_submitted = 0
        self._thread = threading.Thread(target=self._run, name="laconic-communication", daemon=True)
        self._thread.start()

    # -- called by other threads --------------------------------------------------------------------------------

    def submit(self, task: Task) -> Task:
        """Hand over a task; its tensors belong to the engine until it is finished."""
        if task.device.type == "cuda":
            task.inputs_ready = torch.cuda.Event()
            task.inputs_ready.record(torch.cuda.current_stream(task.device))
        task.submitted_s = self._stopwatch.now()
        self.num_submitted += 1
        task.number = self.num_submitted
        self._put(_Submission(task, task.last, second_half=False))
        return task

    def submit_second_half(self, task: Task, *, last: bool) -> None:
        """Let a decoupled task issue its second half; `last`: no further task belongs to this step."""
        self._put(_Submission(task, last, second_half=True))

    def _put(self, submission: _Submission) -> None:
        task = submission.task
        if not (task.over_group and self._transport.waits_on_stream(task.device)):
            self._queue.put(submission)
            return
        with self._issuing, torch.no_grad():
            if self._error is not None or self._stopped:
                self._release([task])
                return
            try:
                self._accept(submission)
                while (action := self._order.next()) is not None:
                    self._execute(action)
            except BaseException as exc:  # noqa: BLE001 - raised in the training loop by check()
                self._fail(exc)
                self._release(self._order.unfinished())

    def wait(self, task: Task) -> None:
        """Return when `task` is finished (on a GPU: when the current stream may use its result), or raise."""
        # Every network wait inside the thread has its own timeout, and a failure finishes every task.
        with profiler_range("wait", task.label, task.device):
            while not task.finished.wait(1.0):
                if self._error is not None or not self._thread.is_alive():
                    break
        if isinstance(self._error, self._recoverable) and not task.succeeded:
            raise self._error.with_traceback(self._traceback)
        self.check()
        if task.outputs_ready is not None:
            torch.cuda.current_stream(task.device).wait_event(task.outputs_ready)

    def call(self, what: str, start: Callable[[], Exchange], *, step: int, device: torch.device) -> None:
        """Run one exchange in order and wait for it."""
        self.wait(self.submit(Task(what, start, step=step, device=device)))

    def failed(self) -> bool:
        """Whether communication has failed; `check` raises the reason."""
        return self._error is not None or self._transport.known_failure() is not None

    @property
    def failure_was_raised(self) -> bool:
        """Whether a failure has been raised in the training loop."""
        return self._reported

    def check(self) -> None:
        """Raise the error of the communication thread, if it has failed."""
        if self._error is not None and not isinstance(self._error, self._recoverable):
            self._reported = True
            # Restore the first traceback: it would grow with every raise.
            raise self._error.with_traceback(self._traceback)
        failure = self._transport.known_failure()
        if failure is not None:
            self._reported = True
            raise failure
        if self._stopped:
            raise CommunicationError("the session is detached; attach again to communicate.")

    def stop(self) -> None:
        """End the thread; tasks that have not started are dropped."""
        self._stopped = True
        self._queue.put(None)
        # A thread that waits for a lost peer ends by its own timeout; the caller need not wait for that.
        self._thread.join(timeout=2.0)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while self._take_submission():
                    with self._issuing:
                        while (action := self._order.next()) is not None:
                            self._execute(action)
                            del action  # a finished task must not keep its buckets in memory while the thread waits
        except BaseException as exc:  # noqa: BLE001 - carried to the training thread by check()
            self._fail(exc)
        finally:
            self._release_all()

    def _fail(self, exc: BaseException) -> None:
        self._error, self._traceback = exc, exc.__traceback__
        if not isinstance(exc, CommunicationError):
            problem = f"raised {type(exc).__name__} while communicating: {one_line(exc)}"
            self._transport.announce_failure(problem)

    def _take_submission(self) -> bool:
        """Wait for the next submission, finishing exchanges that arrive meanwhile; False: the engine was stopped."""
        submission: _Submission | None
        while True:
            with self._issuing:
                may_arrive = any(map(self._is_local, self._order.open()))
            try:
                submission = self._queue.get(timeout=_POLL_S if may_arrive else None)
                break
            except queue.Empty:
                with self._issuing:
                    self._finish_arrived()
        if submission is None:
            return False
        with self._issuing:
            self._accept(submission)
        return True

    def _accept(self, submission: _Submission) -> None:
        if submission.second_half:
            self._order.submit_second_half(submission.task, last=submission.last)
        else:
            self._order.submit(submission.task, last=submission.last)

    def _execute(self, action: Action[Task]) -> None:
        if action.kind == "start":
            self._start(action.exchange)
            self._finish_arrived()
        elif action.kind == "second_half":
            self._second_half(action.exchange)
            self._finish_arrived()
        elif action.kind == "park":
            self._park(action.exchange)
        else:
            self._resume(action.exchange)

    def _start(self, task: Task) -> None:
        self._transport.set_status(f"step {task.step}: {task.what}", exchange=task.number)
        before = self._transport.traffic.total_bytes
        with self._on_stream(task):
            began = self._stopwatch.mark(task.device)
            with profiler_range("encode", task.label, task.device):
                exchange = task.start()
                work = next(exchange, None)
            self._note("encode", task, began)
            # Only this thread sends, so the difference is the wire bytes of this exchange.
            sent_bytes = self._transport.traffic.total_bytes - before
            if work is None:
                self._finish(task, began, sent_bytes)
            else:
                self._running[id(task)] = _Running(exchange, work, began, sent_bytes)
                self._order.issued(task)
        if not task.last:
            self._transport.set_status(f"step {task.step}: computing gradients after {task.what}")

    def _park(self, task: Task) -> None:
        """Wait for the first half."""
        running = self._running[id(task)]
        with self._on_stream(task):
            self._wait(task, running)
            self._note("exchange", task, running.began, wire_bytes=running.sent_bytes, half=1)
        running.sent_bytes = 0

    def _second_half(self, task: Task) -> None:
        running = self._running[id(task)]
        with self._on_stream(task):
            # Between its halves it has nothing in flight.
            running.began = self._stopwatch.mark(task.device)
            self._advance(task, running)

    def _resume(self, task: Task) -> None:
        """Wait for the round in flight and continue."""
        running = self._running[id(task)]
        with self._on_stream(task):
            self._wait(task, running)
            arrived = self._stopwatch.mark(task.device)
            self._advance(task, running, arrived)

    def _wait(self, task: Task, running: _Running) -> None:
        """Return when the round in flight has arrived (on a GPU: when the task's stream may use it)."""
        with profiler_range("exchange", task.label, task.device):
            running.work.wait()

    def _advance(self, task: Task, running: _Running, arrived: Mark | None = None) -> None:
        """Issue the next round, or finish; called with the task's stream as the current one."""
        before = self._transport.traffic.total_bytes
        with profiler_range("decode", task.label, task.device):
            work = next(running.exchange, None)
        if arrived is not None:
            self._note("decode", task, arrived)
        running.sent_bytes += self._transport.traffic.total_bytes - before
        if work is None:
            self._finish(task, running.began, running.sent_bytes)
        else:
            running.work = work
            running.num_waits += 1
            self._order.issued(task)

    def _is_local(self, task: Task) -> bool:
        """Whether this task has issued its last round, so that it may finish once that has arrived."""
        return self._order.in_last_part(task) and self._running[id(task)].num_waits == task.num_waits

    def _finish_arrived(self) -> None:
        for task in self._order.open():
            if self._is_local(task) and self._running[id(task)].work.done():
                self._resume(task)
                assert id(task) not in self._running, f"{task.what}: more rounds than its compressor declares"

    def _finish(self, task: Task, began: Mark, sent_bytes: int) -> None:
        """Hand over the result; called with the task's stream as the current one."""
        data: dict[str, Scalar | torch.Tensor] = {"wire_bytes": sent_bytes, **task.metrics}
        if task.decoupled:
            data["half"] = 2
        if task.device.type == "cuda":
            task.outputs_ready = torch.cuda.Event()
            task.outputs_ready.record(torch.cuda.current_stream(task.device))
        else:
            task.ended_s = self._stopwatch.now()
        self._note("exchange", task, began, **data)
        if task.on_done is not None:
            task.on_done()
        if task.last:
            self._transport.set_status(f"step {task.step}: computing")
        self._running.pop(id(task), None)
        self._order.finished(task)
        task.succeeded = True
        task.finished.set()

    def _note(self, kind: str, task: Task, began: Mark, **data: Scalar | torch.Tensor) -> None:
        """Record an event that began at `began` and ends now."""
        if task.bucket is not None:
            ended = self._stopwatch.mark(task.device)
            self._stopwatch.note(kind, task.step, began, ended, bucket=task.bucket, **data)

    def _release_all(self) -> None:
        """After the end, finish every task, also those submitted later; waiting threads get the error from check()."""
        left = self._order.unfinished()
        self._running.clear()
        while True:
            self._release(left)
            if self._stopped:
                return
            submission = self._queue.get()
            left = [] if submission is None else [submission.task]

    def _release(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            if not task.finished.is_set():
                if task.on_done is not None:
                    task.on_done()
                task.finished.set()

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
