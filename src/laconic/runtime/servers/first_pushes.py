"""A server that holds parameters and applies the mean of the first gradients of each step; later ones are dropped.

A gradient counts as a whole: it has arrived when all its buckets have, and it counts if its worker got the current
parameters of all of them. So all buckets of a server have one record of steps, `FirstPushes`. If each bucket decided
for itself, two workers could each wait for a bucket in which the other's gradient was dropped.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from laconic.compression import Compressor
from laconic.core.frames import Frame
from laconic.core.listener import ReplyTo
from laconic.errors import CommunicationError
from laconic.runtime.servers.protocol import Configuration, GroupSettings, read_note, whole, wholes
from laconic.runtime.servers.stored_bucket import StoredBucket
from laconic.synchronization import Synchronization

_PATIENCE = 4
"""The number of typical intervals between two updates for which a worker that is behind waits for the others."""
_SHORTEST_S = 0.02
"""The shortest typical interval: in less time a worker may be late by chance."""
_NUM_INTERVALS = 16
"""The typical interval is the median of this many last intervals."""


@dataclass(frozen=True)
class _Push:
    """One bucket of a worker's gradient."""

    frame: Frame
    reply: ReplyTo
    step: int
    gradient: torch.Tensor
    settings: dict[int, GroupSettings]
    unused: list[int]


@dataclass
class _Worker:
    """The record of one worker."""

    version: int = 0
    """The number of updates applied when it last got parameters."""
    clock: int = 0
    """Gradients it has pushed since all workers last rested."""
    answers: int = 0
    """The number of gradients counted in `clock` that have been answered."""
    pushes: dict[int, _Push] = field(default_factory=dict)
    """The buckets of its gradient that have arrived and are not answered."""
    resting: set[int] = field(default_factory=set)
    """The buckets that know that this worker waits for the others elsewhere; it rests when all buckets know."""
    gone: bool = False


class FirstPushes:
    """The steps of all buckets of one server.

    A worker that came too late for some updates has made fewer steps than the others. When the others have made all
    steps of their training loops, that worker would wait for gradients that never come. So a worker that is behind,
    with fewer answers than another worker, waits for a limited time:

        limit = 4 * max(20 ms, median of the last 16 intervals between two updates)

    Then its gradient is dropped and it continues with the current parameters. While there is no such interval, and for
    a worker that is not behind, there is no limit but the timeout of the job.
    """

    def __init__(
        self, about: Configuration, rule: Synchronization, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._now_s = now_s
        self._about = about
        self._rule = rule
        self._num_first = rule.num_first(about.world_size)
        self._num_buckets = len(about.buckets)
        self._stored: dict[int, StoredBucket] = {}
        self._lock = threading.Lock()
        self._workers = [_Worker() for _ in range(about.world_size)]
        self._complete: dict[int, float] = {}
        """The ranks whose whole gradient waits for others, in the order of arrival, and when each arrived."""
        self._version = 0
        self._updated_s: float | None = None
        """The time of the last update since all workers last rested."""
        self._intervals_s: deque[float] = deque(maxlen=_NUM_INTERVALS)
        """The times between the last updates."""
        self._over: str | None = None

    def hold(self, number: int, compression: Compressor, values: torch.Tensor) -> None:
        """Hold the parameters of a bucket; all buckets are held before the first push."""
        with self._lock:
            self._stored[number] = StoredBucket(number, self._about, compression, self._rule, values)

    def push(self, number: int, frame: Frame, reply: ReplyTo) -> None:
        """Take one bucket of a worker's gradient; all are answered at once, when the gradient counts or is dropped."""
        note = read_note(frame.note)
        step, unused = whole(note, "step"), wholes(note, "unused")
        rank = frame.sender
        with self._lock:
            if self._over is not None:
                raise CommunicationError(self._over)
            worker, stored = self._workers[rank], self._stored[number]
            if number in worker.pushes:
                raise CommunicationError(f"rank {rank} pushes again before its last push was answered.")
            # Everything is checked before anything changes, also if the gradient will be dropped.
            settings = stored.read_groups(note.get("groups"))
            gradient = stored.decode(frame, step)
            if any(push.step != step for push in worker.pushes.values()):
                raise CommunicationError(f"rank {rank} pushes buckets of different steps at the same time.")
            worker.pushes[number] = _Push(frame, reply, step, gradient, settings, unused)
            worker.resting.clear()
            if len(worker.pushes) == self._num_buckets:
                worker.clock += 1
                self._complete[rank] = self._now_s()
                self._proceed()

    def _proceed(self) -> None:
        """Apply the gradients of a step if enough have arrived, and answer all workers that need not wait."""
        current = [rank for rank in self._complete if self._workers[rank].version == self._version]
        if len(current) >= self._num_first:
            counted, waiting = current[: self._num_first], []
            self._update(counted)
            self._version += 1
            self._note_interval()
        else:
            # If too few workers are left, there will be no further update to wait for.
            counted, waiting = [], current if self._num_present() >= self._num_first else []
        for rank in [rank for rank in self._complete if rank not in waiting]:
            self._answer(rank, dropped=rank not in counted)

    def _update(self, ranks: list[int]) -> None:
        """Make a step of the optimizer with the mean of the gradients of these ranks."""
        for number, stored in self._stored.items():
            # In the order of ranks, so that the mean depends on which came first, not on their order.
            pushes = [self._workers[rank].pushes[number] for rank in sorted(ranks)]
            mean = torch.stack([push.gradient for push in pushes]).mean(dim=0)
            unused = sorted(set.intersection(*(set(push.unused) for push in pushes)))
            # A scheduler on a worker counts the steps of that worker; the one with the most is on schedule.
            latest = max(pushes, key=lambda push: push.step)
            stored.apply(mean, latest.settings, unused=unused, staleness=0)

    def _note_interval(self) -> None:
        now_s = self._now_s()
        if self._updated_s is not None:
            self._intervals_s.append(now_s - self._updated_s)
        self._updated_s = now_s

    def _typical_s(self) -> float | None:
        """The typical interval between two updates; None before there is one."""
        return max(_SHORTEST_S, statistics.median(self._intervals_s)) if self._intervals_s else None

    @property
    def typical_s(self) -> float | None:
        """The typical interval between two updates, after which `release_late` has to be called again."""
        with self._lock:
            return self._typical_s()

    def release_late(self) -> None:
        """Drop the gradients of workers that are behind and have waited for too long, and answer these workers."""
        with self._lock:
            typical_s = self._typical_s()
            if typical_s is None:
                return
            most = max(worker.answers for worker in self._workers)
            before_s = self._now_s() - _PATIENCE * typical_s
            for rank, came_s in list(self._complete.items()):
                if came_s < before_s and self._workers[rank].answers < most:
                    self._answer(rank, dropped=True)

    def _answer(self, rank: int, *, dropped: bool) -> None:
        worker = self._workers[rank]
        worker.answers += 1
        pushes, worker.pushes = worker.pushes, {}
        del self._complete[rank]
        slowest = min((other.clock for other in self._workers if self._is_present(other)), default=worker.clock)
        staleness = self._version - worker.version if dropped else 0
        facts = json.dumps({"staleness": staleness, "lead": max(0, worker.clock - slowest), "dropped": int(dropped)})
        worker.version = self._version
        for number, push in pushes.items():
            push.reply(push.frame.answer(self._stored[number].answer(rank, push.step), facts))

    def _num_present(self) -> int:
        """The number of workers that have pushed or are still to push."""
        return sum(map(self._is_present, self._workers))

    def _is_present(self, worker: _Worker) -> bool:
        return not worker.gone and len(worker.resting) < self._num_buckets

    def pull(self, number: int, sender: int) -> torch.Tensor:
        """The current parameters of a bucket; called while all workers rest."""
        with self._lock:
            self._workers[sender].version = self._version
            return self._stored[number].pull(sender)

    def state(self, number: int) -> dict[str, torch.Tensor]:
        """The optimizer's state of a bucket, keyed "parameter|field|number of dimensions"."""
        with self._lock:
            return self._stored[number].state()

    def restore(self, number: int, tensors: tuple[torch.Tensor, ...], keys: list[str]) -> None:
        """Continue with a bucket from saved parameters, the first tensor, and the saved state of the optimizer."""
        with self._lock:
            self._stored[number].restore(tensors, keys)

    def rest(self, number: int, sender: int) -> None:
        """Until this worker pushes again, no other has to wait for it; when all rest, all clocks start anew."""
        with self._lock:
            self._workers[sender].resting.add(number)
            if not self._num_present():
                for worker in self._workers:
                    worker.clock = worker.answers = 0
                    worker.resting.clear()
                self._updated_s = None  # the time of the rest belongs to no interval
            self._proceed()

    def leave(self, sender: int) -> None:
        """No worker has to wait for this one any more."""
        with self._lock:
            self._workers[sender].gone = True
            self._proceed()

    def waiting_for(self) -> tuple[float, list[int]]:
        """The longest wait in seconds, and the ranks whose gradients are missing; (0, []) if no worker waits."""
        with self._lock:
            if not self._complete:
                return 0.0, []
            ranks = [
                rank
                for rank, worker in enumerate(self._workers)
                if rank not in self._complete and self._is_present(worker)
            ]
            return self._now_s() - min(self._complete.values()), ranks

    def fail(self, reason: str) -> None:
        """Answer all waiting and all later requests with an error."""
        with self._lock:
            self._over = reason
            waiting = [push for worker in self._workers for push in worker.pushes.values()]
            for worker in self._workers:
                worker.pushes = {}
            self._complete.clear()
        for push in waiting:
            push.reply(push.frame.error(reason))


class FirstPushStore:
    """The parameters of one bucket, which change together with those of all other buckets."""

    def __init__(self, number: int, compression: Compressor, steps: FirstPushes, values: torch.Tensor) -> None:
        self._number = number
        self._steps = steps
        steps.hold(number, compression, values)

    def push(self, frame: Frame, reply: ReplyTo) -> None:
        """Take this bucket of a worker's gradient; it is answered when the worker may continue."""
        self._steps.push(self._number, frame, reply)

    def pull(self, sender: int) -> torch.Tensor:
        """The current parameters."""
        return self._steps.pull(self._number, sender)

    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's state, keyed "parameter|field|number of dimensions"."""
        return self._steps.state(self._number)

    def restore(self, tensors: tuple[torch.Tensor, ...], keys: list[str]) -> None:
        """Continue from saved parameters, the first tensor, and the saved state of the optimizer."""
        self._steps.restore(self._number, tensors, keys)

    def rest(self, sender: int) -> None:
        """Until this worker pushes again, no other has to wait for it."""
        self._steps.rest(self._number, sender)

    def leave(self, sender: int) -> None:
        """No worker has to wait for this one any more."""
        self._steps.leave(sender)

    def waiting_for(self) -> tuple[float, list[int]]:
        """The longest wait in seconds, and the ranks whose gradients are missing."""
        return self._steps.waiting_for()

    def fail(self, reason: str) -> None:
        """Answer all waiting and all later requests with an error."""
        self._steps.fail(reason)
