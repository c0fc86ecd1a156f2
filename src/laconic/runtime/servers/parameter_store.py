"""A server that holds parameters: it applies what each worker sends as it arrives and answers with parameters."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from laconic.compression import Compressor
from laconic.core.frames import Frame
from laconic.core.listener import ReplyTo
from laconic.errors import CommunicationError
from laconic.runtime.servers.protocol import Configuration, read_note, whole, wholes
from laconic.runtime.servers.stored_bucket import StoredBucket
from laconic.synchronization import Pace, Synchronization


@dataclass
class _Worker:
    """The store's record of one worker."""

    step: int = 0
    """The step of its last push, by its own count."""
    clock: int = 0
    """Pushes since all workers last rested."""
    version: int = 0
    """The number of updates applied when it last got parameters."""
    answered_s: float | None = None
    """When it last got parameters after a push."""
    pace: Pace | None = None
    """Its pace, once it has made a step after an answer."""
    granted: int = 0
    """The clock up to which it may continue, however far ahead it is."""
    resting: bool = False
    """Whether it waits for the others elsewhere."""
    gone: bool = False


@dataclass(frozen=True)
class _Waiting:
    """A worker that has pushed and has not been answered."""

    frame: Frame
    reply: ReplyTo
    staleness: int
    came_s: float


class ParameterStore:
    """The parameters of one bucket, and how far each worker is."""

    def __init__(
        self,
        number: int,
        about: Configuration,
        compression: Compressor,
        rule: Synchronization,
        values: torch.Tensor,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now_s = now_s
        self._rule = rule
        self._lock = threading.Lock()
        self._stored = StoredBucket(number, about, compression, rule, values)
        self._workers = [_Worker() for _ in range(about.world_size)]
        self._version = 0
        self._over: str | None = None
        self._waiting: list[_Waiting] = []

    def push(self, frame: Frame, reply: ReplyTo) -> None:
        """Apply a worker's gradient or change; it is answered when the worker may continue."""
        note = read_note(frame.note)
        step, unused = whole(note, "step"), wholes(note, "unused")
        worker = self._workers[frame.sender]
        with self._lock:
            if self._over is not None:
                raise CommunicationError(self._over)
            if any(waiting.frame.sender == frame.sender for waiting in self._waiting):
                raise CommunicationError(f"rank {frame.sender} pushes again before its last push was answered.")
            # Everything is checked before anything changes.
            settings = self._stored.read_groups(note.get("groups"))
            staleness = self._version - worker.version
            sent = self._stored.decode(frame, step)
            self._stored.apply(sent, settings, unused=unused, staleness=staleness)
            self._version += 1
            worker.clock, worker.step = worker.clock + 1, step
            worker.resting = False
            now_s = self._now_s()
            if worker.answered_s is not None:
                worker.pace = Pace(now_s, now_s - worker.answered_s)
            self._grant_more(worker)
            self._waiting.append(_Waiting(frame, reply, staleness, now_s))
            self._answer_ready()

    def _present(self) -> list[_Worker]:
        """The workers still to push."""
        return [worker for worker in self._workers if not worker.gone and not worker.resting]

    def _slowest(self) -> int | None:
        """The lowest clock among the workers still to push."""
        return min((worker.clock for worker in self._present()), default=None)

    def _grant_more(self, worker: _Worker) -> None:
        """Let the fastest worker continue, as far as the rule allows, where it would have to wait now."""
        sure, most, present = self._rule.sure_lead, self._rule.lead, self._present()
        slowest = min(present, key=lambda other: (other.clock, -other.pace.step_s if other.pace else 0.0))
        ahead = worker.clock - slowest.clock
        if sure is None or most is None or ahead <= sure or worker.clock <= worker.granted:
            return
        fastest = worker.clock == max(other.clock for other in present)
        if fastest and worker.pace is not None and slowest.pace is not None:
            room = max(0, most - ahead + 1)
            worker.granted = worker.clock - 1 + self._rule.more_steps(worker.pace, slowest.pace, room)

    def _answer_ready(self) -> None:
        """Answer all workers that are not too far ahead."""
        slowest = self._slowest()
        still: list[_Waiting] = []
        for waiting in self._waiting:
            sender = waiting.frame.sender
            worker = self._workers[sender]
            ahead = 0 if slowest is None else worker.clock - slowest
            bound = self._rule.lead if worker.clock <= worker.granted else self._rule.sure_lead
            if bound is not None and ahead > bound:
                still.append(waiting)
                continue
            worker.version, worker.answered_s = self._version, self._now_s()
            facts = json.dumps({"staleness": waiting.staleness, "lead": ahead * self._rule.interval})
            waiting.reply(waiting.frame.answer(self._stored.answer(sender, worker.step), facts))
        self._waiting = still

    def pull(self, sender: int) -> torch.Tensor:
        """The current parameters."""
        with self._lock:
            self._workers[sender].version = self._version
            return self._stored.pull(sender)

    def state(self) -> dict[str, torch.Tensor]:
        """The state of updates, keyed "parameter|field|number of dimensions"."""
        with self._lock:
            return self._stored.state()

    def restore(self, tensors: tuple[torch.Tensor, ...], keys: list[str]) -> None:
        """Continue from saved parameters, the first tensor, and the saved state of their updates."""
        with self._lock:
            self._stored.restore(tensors, keys)

    def rest(self, sender: int) -> None:
        """Until this worker pushes again, no other has to wait for it; when all rest, all clocks start anew."""
        with self._lock:
            self._workers[sender].resting = True
            if self._slowest() is None:
                for worker in self._workers:
                    worker.clock, worker.granted, worker.resting = 0, 0, False
                    worker.answered_s = worker.pace = None  # the time of the rest belongs to no step
            self._answer_ready()

    def leave(self, sender: int) -> None:
        """No worker has to wait for this one any more."""
        with self._lock:
            self._workers[sender].gone = True
            self._answer_ready()

    def waiting_for(self) -> tuple[float, list[int]]:
        """The longest wait in seconds, and the slowest ranks; (0, []) if no worker waits."""
        with self._lock:
            if not self._waiting:
                return 0.0, []
            slowest = self._slowest()
            ranks = [
                rank
                for rank, worker in enumerate(self._workers)
                if worker.clock == slowest and not worker.gone and not worker.resting
            ]
            return self._now_s() - min(waiting.came_s for waiting in self._waiting), ranks

    def fail(self, reason: str) -> None:
        """Answer all waiting and all later requests with an error."""
        with self._lock:
            self._over = reason
            waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.reply(one.frame.error(reason))
