"""The transport over torch.distributed: Gloo, NCCL or whatever backend the process group has.

It makes a process group of its own with the same ranks, so laconic's operations never mix with those the training
script issues. A wait that fails finds out who is to blame (see heartbeat.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from laconic.core.group_operations import GroupOperations, Issue
from laconic.core.heartbeat import Heartbeat, Mark
from laconic.core.hosts import Hosts, hosts_of, name_of_host
from laconic.core.job_store import JobStore
from laconic.core.meeting import Meeting
from laconic.core.tallies import Tallies
from laconic.core.transport import (
    DETACHED,
    Purpose,
    Traffic,
    Work,
)
from laconic.errors import AttachError, CommunicationError, one_line

_SLICE_S = 0.5
"""Poll interval of a wait for failed peers."""


class TorchTransport(GroupOperations):
    """One rank of a torch.distributed process group."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 300.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise AttachError(
                "no process group: call torch.distributed.init_process_group() first and start the script with "
                "torchrun, or pass transport= to run without a cluster."
            )
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise AttachError("this rank is not a member of the process group given as process_group.")
        parent = group or dist.group.WORLD
        assert parent is not None
        self.timeout_s = timeout_s
        self.in_process = False
        self.link = None
        self.rank = dist.get_rank(parent)
        self.world_size = dist.get_world_size(parent)
        self.traffic = Traffic()
        config = str(dist.get_backend_config(parent))  # e.g. "cpu:gloo,cuda:nccl"
        self._backends = dict(item.split(":", 1) for item in config.split(","))
        self.control_device = (
            torch.device("cpu") if "cpu" in self._backends else torch.device("cuda", torch.cuda.current_device())
        )
        self.description = f"torch.distributed, {config}, {self.world_size} ranks"
        self._group: dist.ProcessGroup | None = None
        self._may_destroy = False
        self._taken = False
        self._num_sessions = 0
        self._heartbeat: Heartbeat | None = None
        self._questions: JobStore | None = None
        self._tallies: Tallies | None = None
        self.hosts: Hosts = ((0,),)
        if self.world_size == 1:
            return
        meeting = Meeting(self.rank, parent, timeout_s)
        self._questions, place = meeting.questions, meeting.place
        ranks = dist.get_process_group_ranks(parent)
        self._heartbeat = Heartbeat(
            meeting.beats, meeting.beats_place, self.rank, ranks, timeout_s, guests=meeting.guests
        )
        try:
            # Before a group is made: a missing rank is named here.
            advice = "every rank of the process group must call laconic.attach"
            names = self._heartbeat.gather_texts(name_of_host(), what="attaching", exchange=0, advice=advice)
            self.hosts = hosts_of(names)
            self._group, self._may_destroy = meeting.group(config, self._heartbeat)
        except BaseException:
            self.close()
            raise
        self._heartbeat.group = self._group
        self._tallies = Tallies(self._questions.under(place), self._heartbeat)

    @property
    def is_open(self) -> bool:
        return self.world_size == 1 or (self._group is not None and dist.is_initialized())

    def waits_on_stream(self, device: torch.device) -> bool:
        return device.type == "cuda" and self._backends.get("cuda") != "gloo"

    def _start(
        self,
        issue: Issue,
        device: torch.device,
        *,
        operation: str,
        sent: int,
        purpose: Purpose,
        what: str,
        peers: bool = False,
    ) -> Work:
        if self._group is None or self._heartbeat is None:
            raise CommunicationError("the transport is closed; attach again to communicate.")
        label = f"{operation} of {what or 'a tensor'}"
        self.traffic.count(purpose, operation, sent)
        try:
            works = issue(self._group)
        except RuntimeError as exc:
            raise self._heartbeat.explain(label, one_line(exc)) from exc
        started = [works] if isinstance(works, dist.Work) else list(works or [])
        if self.waits_on_stream(device):
            return _DeviceWork(started, label, self._heartbeat)
        if peers:
            return _PeerWork(started, label, self._heartbeat, self.timeout_s)
        return _HostWork(started, label, self._heartbeat, self.timeout_s)

    def tally(self, name: str, amount: int) -> int:
        """The count is kept in the job's store."""
        return self._open_tallies().add(name, amount)

    def drop_tally(self, name: str) -> None:
        self._open_tallies().drop(name)

    def _open_tallies(self) -> Tallies:
        if self._tallies is None:
            raise CommunicationError("the transport is closed or has one rank only; nothing is counted together.")
        return self._tallies

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
        if self._heartbeat is not None:
            self._heartbeat.status = status
            if exchange is not None:
                self._heartbeat.exchange = exchange

    def compare_steps(self, passes: int, step: int, *, last: bool = False) -> None:
        """Through the job's store, at some of the passes, and in a thread that communication does not wait for."""
        if self._heartbeat is not None:
            self._heartbeat.compare_steps(Mark(self._num_sessions, passes, step, last))

    def gather_texts(self, text: str, *, what: str, exchange: int, advice: str) -> list[str]:
        """The texts go through the job's store."""
        if self.world_size == 1:
            return [text]
        if self._heartbeat is None:
            raise CommunicationError("the transport is closed; attach again to communicate.")
        return self._heartbeat.gather_texts(text, what=what, exchange=exchange, advice=advice)

    def wait_for(self, event: threading.Event, what: str, *, heard_s: Callable[[], float]) -> None:
        if self._heartbeat is not None:
            self._heartbeat.wait_for(event, what, heard_s=heard_s)

    def waiting_until(self, deadline_s: float) -> AbstractContextManager[None]:
        return nullcontext() if self._heartbeat is None else self._heartbeat.waiting_until(deadline_s)

    def silent_rank(self, operation: str) -> int | None:
        return None if self._heartbeat is None else self._heartbeat.silent_rank(operation)

    def known_failure(self) -> CommunicationError | None:
        return self._heartbeat.lost if self._heartbeat is not None else None

    def raise_if_peer_failed(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.check("communication")

    def announce_failure(self, reason: str, *, rank: int | None = None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.fail(self.rank if rank is None else rank, reason)

    def close(self) -> None:
        self._tallies = None
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
        group, self._group = self._group, None
        if group is not None and dist.is_initialized() and self._may_destroy:
            dist.destroy_process_group(group)
        questions, self._questions = self._questions, None
        if questions is not None:
            questions.cut()


class _DeviceWork:
    """Operations that run on the device: waiting makes the current stream wait, not the host."""

    def __init__(self, works: list[dist.Work], operation: str, heartbeat: Heartbeat) -> None:
        self._works = works
        self._operation = operation
        self._heartbeat = heartbeat

    def wait(self) -> None:
        for work in self._works:
            work.wait()  # without a time limit: with one, NCCL makes the host wait
        finished = torch.cuda.Event()
        finished.record()
        # The event, not the works: those would keep their tensors in memory.
        self._heartbeat.watch(self._operation, finished)

    def done(self) -> bool:
        return True


class _HostWork:
    """Operations the host waits for, a slice of time at a time."""

    def __init__(self, works: list[dist.Work], operation: str, heartbeat: Heartbeat, timeout_s: float) -> None:
        self._works = works
        self._operation = operation
        self._heartbeat = heartbeat
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s

    def wait(self) -> None:
        with self._heartbeat.waiting_until(self._deadline_s):
            self._wait()

    def _wait(self) -> None:
        for work in self._works:
            while True:
                try:
                    work.wait(timedelta(seconds=_SLICE_S))
                    break
                except RuntimeError as exc:
                    # Gloo says "timed out" both when the slice ends and when the operation itself gave up.
                    if "timed out" not in str(exc).lower():
                        raise self._heartbeat.explain(self._operation, one_line(exc)) from exc
                    if work.is_completed():
                        self._end_of(work)
                        break
                    self._heartbeat.check(self._operation)
                    if time.monotonic() >= self._deadline_s:
                        raise self._heartbeat.explain(
                            self._operation, f"did not finish in {self._timeout_s:g} s", timed_out=True
                        ) from exc

    def _end_of(self, work: dist.Work) -> None:
        """Return if the operation has succeeded, which may have happened just after a slice had ended."""
        try:
            work.wait()
        except RuntimeError as exc:
            raise self._heartbeat.explain(self._operation, one_line(exc)) from exc

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)


class _PeerWork:
    """Sends and receives between two ranks, which the host waits for in one piece.

    Gloo closes all connections when such a wait times out, so it cannot be divided into slices. A peer that ends is
    noticed at once, because its connections break; one that stalls is noticed at the timeout.
    """

    def __init__(self, works: list[dist.Work], operation: str, heartbeat: Heartbeat, timeout_s: float) -> None:
        self._works = works
        self._operation = operation
        self._heartbeat = heartbeat
        self._deadline_s = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._waited = False

    def wait(self) -> None:
        with self._heartbeat.waiting_until(self._deadline_s):
            self._wait()

    def _wait(self) -> None:
        for work in [] if self._waited else self._works:
            left_s = max(0.001, self._deadline_s - time.monotonic())
            try:
                work.wait(timedelta(seconds=left_s))
            except RuntimeError as exc:
                timed_out = "timed out" in str(exc).lower() and time.monotonic() >= self._deadline_s
                cause = f"did not finish in {self._timeout_s:g} s" if timed_out else one_line(exc)
                raise self._heartbeat.explain(self._operation, cause, timed_out=timed_out) from exc
        self._waited = True

    def done(self) -> bool:
        # Gloo knows only after a wait.
        return self._waited
