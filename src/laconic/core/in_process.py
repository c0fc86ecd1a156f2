"""Ranks as threads of one process: every strategy can be tried and tested without a cluster.

    cluster = InProcessCluster(4)
    losses = cluster.run(lambda transport: train(laconic.attach(model(), ..., transport=transport)))

Sums are formed in rank order, so results are reproducible bit for bit. Ranks that call different operations get an
error that shows both calls, instead of the hang or the mixed-up data a real network would give.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from laconic.core.hosts import Hosts, checked_hosts
from laconic.core.sent_bytes import all_gather_sent, all_reduce_sent, broadcast_sent, shard_exchange_sent
from laconic.core.transport import (
    DETACHED,
    DETACHING,
    DoneWork,
    Purpose,
    ReduceOp,
    Traffic,
    Work,
    left_out,
    will_not_come,
)
from laconic.errors import AttachError, CommunicationError, LaconicError, PeerLost, one_line

Result = TypeVar("Result")
_STEPS_KEPT = 64
"""The number of passes for which the steps of ranks are compared."""
_SLICE_S = 0.05
"""Poll interval of a wait for failed peers."""


class InProcessCluster:
    """A fixed number of ranks in this process.

    hosts: which ranks are to count as sharing a host, e.g. ((0, 1), (2, 3)); all of them if left out.
    """

    def __init__(self, world_size: int, *, hosts: Hosts | None = None, timeout_s: float = 30.0) -> None:
        if world_size < 1:
            raise LaconicError(f"world_size must be >= 1, got {world_size}.")
        self.world_size = world_size
        self.hosts = checked_hosts((range(world_size),) if hosts is None else hosts, world_size)
        self.timeout_s = timeout_s
        self._lock = threading.Condition()
        self._meetings: dict[int, _Meeting] = {}
        self._mail: dict[tuple[int, int, int], torch.Tensor] = {}
        # Messages are numbered per pair of ranks when sent and when received, so that they match in that order,
        # whatever the order of waits.
        self._num_sent: Counter[tuple[int, int]] = Counter()
        self._num_asked: Counter[tuple[int, int]] = Counter()
        self._tallies: Counter[str] = Counter()
        self._failure: tuple[int, str] | None = None
        self._status: dict[int, str] = {}
        self._begun: dict[int, int] = {}
        """By rank: the number of the last exchange it has begun."""
        self._texts: dict[int, dict[int, str]] = {}
        self._steps: dict[tuple[int, int, bool], tuple[int, int]] = {}
        """By session, number of passes, and whether it is the last: the steps of the rank that was there first, and
        this rank."""

    def transport(self, rank: int) -> InProcessTransport:
        """The transport of one rank; use each from one thread at a time."""
        return InProcessTransport(self, rank)

    def run(self, work: Callable[[InProcessTransport], Result]) -> list[Result]:
        """Call `work` once per rank, each in a thread of its own; results in rank order.

        If a rank raises, the others stop waiting for it and the first rank's error is raised here.
        """
        self._failure = None
        self._meetings.clear()
        counts = (self._num_sent, self._num_asked, self._tallies)
        for noted in (self._mail, *counts, self._status, self._begun, self._texts, self._steps):
            noted.clear()
        results: dict[int, Result] = {}
        errors: list[BaseException] = []

        def one_rank(rank: int) -> None:
            transport = self.transport(rank)
            try:
                results[rank] = work(transport)
            except BaseException as exc:  # noqa: BLE001 - carried to the caller's thread below
                errors.append(exc)
                transport.announce_failure(f"raised {type(exc).__name__}: {one_line(exc)}")

        threads = [
            threading.Thread(target=one_rank, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self.stop("was interrupted")  # Ctrl-C reaches only the main thread
            raise
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerLost)), errors[0])
        return [results[rank] for rank in range(self.world_size)]

    def stop(self, reason: str) -> None:
        """Make every operation of a rank raise, including those in which ranks wait for each other."""
        self.transport(0).announce_failure(reason)


class _Meeting:
    """One collective: the tensors of each rank; it is done once all have called it."""

    def __init__(self) -> None:
        self.calls: dict[int, str] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        self.inputs: dict[int, torch.Tensor] = {}
        self.done = threading.Event()
        self.error: CommunicationError | None = None


class _MeetingWork:
    def __init__(self, transport: InProcessTransport, meeting: _Meeting, operation: str) -> None:
        self._transport = transport
        self._meeting = meeting
        self._operation = operation

    def wait(self) -> None:
        cluster = self._transport.cluster
        waited_s = 0.0
        while not self._meeting.done.wait(_SLICE_S):
            waited_s += _SLICE_S
            self._transport.raise_if_peer_failed(self._operation)
            if waited_s >= cluster.timeout_s:
                missing = [rank for rank in range(cluster.world_size) if rank not in self._meeting.calls]
                raise CommunicationError(
                    f"{self._operation} did not finish in {cluster.timeout_s:g} s on rank {self._transport.rank}: "
                    + "; ".join(f"rank {rank} is {cluster._status.get(rank, 'silent')}" for rank in missing)
                    + "."
                )
        if self._meeting.error is not None:
            raise self._meeting.error

    def done(self) -> bool:
        return self._meeting.done.is_set()


class _ReceiveWork:
    def __init__(
        self,
        transport: InProcessTransport,
        receives: Sequence[tuple[tuple[int, int, int], torch.Tensor]],
        operation: str,
    ) -> None:
        self._transport = transport
        self._receives = receives
        self._operation = operation

    def wait(self) -> None:
        cluster, rank = self._transport.cluster, self._transport.rank
        for letter, tensor in self._receives:
            waited_s, peer = 0.0, letter[0]
            with cluster._lock:
                while letter not in cluster._mail:
                    self._transport.raise_if_peer_failed(self._operation)
                    if waited_s >= cluster.timeout_s:
                        raise CommunicationError(
                            f"{self._operation} on rank {rank} got nothing from rank {peer} in {cluster.timeout_s:g} s."
                        )
                    cluster._lock.wait(_SLICE_S)
                    waited_s += _SLICE_S
                sent = cluster._mail.pop(letter)
            if sent.shape != tensor.shape or sent.dtype != tensor.dtype:
                raise CommunicationError(
                    f"{self._operation}: rank {peer} sent {tuple(sent.shape)} {sent.dtype}, "
                    f"rank {rank} expected {tuple(tensor.shape)} {tensor.dtype}."
                )
            tensor.copy_(sent)
        self._receives = ()

    def done(self) -> bool:
        cluster = self._transport.cluster
        with cluster._lock:
            return all(letter in cluster._mail for letter, _ in self._receives)


class InProcessTransport:
    """One rank of an InProcessCluster."""

    def __init__(self, cluster: InProcessCluster, rank: int) -> None:
        self.cluster = cluster
        self.rank = rank
        self.world_size = cluster.world_size
        self.hosts = cluster.hosts
        self.traffic = Traffic()
        self.control_device = torch.device("cpu")
        self.description = f"{cluster.world_size} threads of one process"
        self.timeout_s = cluster.timeout_s
        self.in_process = True
        self.is_open = True
        self.link = None
        self._sequence = 0
        self._num_texts = 0
        self._taken = False
        self._num_sessions = 0

    def waits_on_stream(self, device: torch.device) -> bool:
        return False

    def _meet(
        self,
        operation: str,
        output: torch.Tensor,
        tensor: torch.Tensor,
        finish: Callable[[_Meeting], None],
        *,
        sent: int,
        purpose: Purpose,
        what: str,
    ) -> Work:
        if self.world_size == 1:
            meeting = _Meeting()
            meeting.inputs[0], meeting.outputs[0] = tensor, output
            finish(meeting)
            return DoneWork()
        self.traffic.count(purpose, operation, sent)
        label = f"{operation} of {what or 'a tensor'}"
        cluster = self.cluster
        with cluster._lock:
            number, self._sequence = self._sequence, self._sequence + 1
            meeting = cluster._meetings.setdefault(number, _Meeting())
            meeting.calls[self.rank] = f"{label}, {tuple(tensor.shape)} {tensor.dtype}"
            meeting.inputs[self.rank], meeting.outputs[self.rank] = tensor, output
            complete = len(meeting.calls) == self.world_size
            if complete:
                del cluster._meetings[number]
        if complete:
            calls = sorted(meeting.calls.items())
            other = next((item for item in calls if item[1] != calls[0][1]), None)
            if other is not None:
                meeting.error = CommunicationError(
                    f"ranks disagree on operation {number}: rank 0 called {calls[0][1]}; "
                    f"rank {other[0]} called {other[1]}."
                )
            else:
                try:
                    finish(meeting)
                except RuntimeError as exc:
                    meeting.error = CommunicationError(f"{label} failed: {one_line(exc)}.")
            meeting.done.set()
        return _MeetingWork(self, meeting, label)

    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = "sum", purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]

        def finish(meeting: _Meeting) -> None:
            total = meeting.inputs[0].clone()
            for rank in range(1, self.world_size):
                combine(total, meeting.inputs[rank], out=total)
            for output in meeting.outputs.values():
                output.copy_(total)

        sent = all_reduce_sent(tensor.nbytes, self.world_size)
        return self._meet(f"all_reduce({op})", tensor, tensor, finish, sent=sent, purpose=purpose, what=what)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, purpose: Purpose = "payload", what: str = "") -> Work:
        def finish(meeting: _Meeting) -> None:
            for rank, output in meeting.outputs.items():
                if rank != source:
                    output.copy_(meeting.inputs[source])

        sent = broadcast_sent(tensor.nbytes, self.world_size, (self.rank - source) % self.world_size)
        return self._meet(f"broadcast({source})", tensor, tensor, finish, sent=sent, purpose=purpose, what=what)

    def all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, *, purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        def finish(meeting: _Meeting) -> None:
            for row in meeting.outputs.values():
                for rank in range(self.world_size):
                    row[rank].copy_(meeting.inputs[rank])

        sent = all_gather_sent(tensor.nbytes, self.world_size)
        return self._meet("all_gather", output, tensor, finish, sent=sent, purpose=purpose, what=what)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, *, purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        def finish(meeting: _Meeting) -> None:
            for rank, result in meeting.outputs.items():
                total = meeting.inputs[0][rank].clone()
                for other in range(1, self.world_size):
                    total += meeting.inputs[other][rank]
                result.copy_(total)

        sent = shard_exchange_sent(tensor.nbytes, self.world_size)
        return self._meet("reduce_scatter", output, tensor, finish, sent=sent, purpose=purpose, what=what)

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, *, purpose: Purpose = "payload", what: str = ""
    ) -> Work:
        def finish(meeting: _Meeting) -> None:
            for rank, result in meeting.outputs.items():
                for other in range(self.world_size):
                    result[other].copy_(meeting.inputs[other][rank])

        sent = shard_exchange_sent(tensor.nbytes, self.world_size)
        return self._meet("all_to_all", output, tensor, finish, sent=sent, purpose=purpose, what=what)

    def send_receive(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        *,
        purpose: Purpose = "payload",
        what: str = "",
    ) -> Work:
        operation, cluster = f"send_receive of {what or 'tensors'}", self.cluster
        with cluster._lock:
            for peer, tensor in sends:
                self.traffic.count(purpose, "send_receive", tensor.nbytes)
                # A copy, because the receiver may read it long after the sender has continued.
                cluster._mail[self.rank, peer, cluster._num_sent[self.rank, peer]] = tensor.clone()
                cluster._num_sent[self.rank, peer] += 1
            asked: list[tuple[tuple[int, int, int], torch.Tensor]] = []
            for peer, tensor in receives:
                asked.append(((peer, self.rank, cluster._num_asked[peer, self.rank]), tensor))
                cluster._num_asked[peer, self.rank] += 1
            cluster._lock.notify_all()
        return _ReceiveWork(self, asked, operation)

    def tally(self, name: str, amount: int) -> int:
        with self.cluster._lock:
            self.cluster._tallies[name] += amount
            return self.cluster._tallies[name]

    def drop_tally(self, name: str) -> None:
        with self.cluster._lock:
            self.cluster._tallies.pop(name, None)

    def acquire(self) -> None:
        if self._taken:
            raise AttachError("this transport already carries a session; detach that one or use another transport.")
        self._taken = True
        self._num_sessions += 1
        self.set_status("attaching", exchange=0)

    def release(self) -> None:
        self._taken = False
        self.set_status(DETACHED)

    def set_status(self, status: str, *, exchange: int | None = None) -> None:
        with self.cluster._lock:
            self.cluster._status[self.rank] = status
            if exchange is not None:
                self.cluster._begun[self.rank] = exchange

    def compare_steps(self, passes: int, step: int, *, last: bool = False) -> None:
        with self.cluster._lock:
            mine = (step, self.rank)
            first = self.cluster._steps.setdefault((self._num_sessions, passes, last), mine)
            self.cluster._steps.pop((self._num_sessions, passes - _STEPS_KEPT, False), None)
        if first[0] != step:
            (fewest, behind), (most, ahead) = sorted([first, mine])
            reason = left_out(passes, behind, fewest, ahead, most)
            self.announce_failure(reason, rank=behind)
            raise CommunicationError(f"rank {behind} {reason}.")

    def gather_texts(self, text: str, *, what: str, exchange: int, advice: str) -> list[str]:
        cluster = self.cluster
        with cluster._lock:
            number, self._num_texts = self._num_texts, self._num_texts + 1
            texts = cluster._texts.setdefault(number, {})
            texts[self.rank] = text
            cluster._lock.notify_all()
            waited_s = 0.0
            while len(texts) < self.world_size:
                self.raise_if_peer_failed(what)
                missing = [rank for rank in range(self.world_size) if rank not in texts]
                for rank in missing:
                    status = cluster._status.get(rank, "silent")
                    if cluster._begun.get(rank, 0) > exchange or status in (DETACHING, DETACHED):
                        problem = will_not_come(what, rank, status, advice)
                        self.announce_failure(problem)
                        raise CommunicationError(f"rank {self.rank} {problem}.")
                if waited_s >= cluster.timeout_s:
                    raise CommunicationError(
                        f"{what} did not finish in {cluster.timeout_s:g} s on rank {self.rank}: "
                        + "; ".join(f"rank {rank} is {cluster._status.get(rank, 'silent')}" for rank in missing)
                        + "."
                    )
                cluster._lock.wait(_SLICE_S)
                waited_s += _SLICE_S
            # A rank that asks for the next texts has these, so all ranks have read the ones before.
            cluster._texts.pop(number - 1, None)
        return [texts[rank] for rank in range(self.world_size)]

    def wait_for(self, event: threading.Event, what: str, *, heard_s: Callable[[], float]) -> None:
        while not event.wait(_SLICE_S):
            self.raise_if_peer_failed(what)
            if time.monotonic() - heard_s() >= self.cluster.timeout_s:
                said = [
                    f'rank {rank} says "{said}"' for rank, said in self.cluster._status.items() if rank != self.rank
                ]
                problem = f"did not finish in {self.cluster.timeout_s:g} s; {', '.join(said)}"
                self.announce_failure(f"gave up: {what} {problem}")
                raise CommunicationError(f"{what} on rank {self.rank}: {problem}.")

    def waiting_until(self, deadline_s: float) -> AbstractContextManager[None]:
        return nullcontext()

    def silent_rank(self, operation: str) -> int | None:
        """None: threads of one process do not stop answering."""
        self.raise_if_peer_failed(operation)
        return None

    def known_failure(self, operation: str = "communication") -> CommunicationError | None:
        failure = self.cluster._failure
        if failure is None:
            return None
        return PeerLost(
            f"{operation} on rank {self.rank} cannot finish: rank {failure[0]} {failure[1]}.", rank=failure[0]
        )

    def raise_if_peer_failed(self, operation: str = "communication") -> None:
        lost = self.known_failure(operation)
        if lost is not None:
            raise lost

    def announce_failure(self, reason: str, *, rank: int | None = None) -> None:
        with self.cluster._lock:
            if self.cluster._failure is None:
                self.cluster._failure = (self.rank if rank is None else rank, reason)
            self.cluster._lock.notify_all()

    def close(self) -> None:
        """Threads hold nothing that must be closed."""
