"""How the ranks of a session find each other: a prefix in the job's store, and a process group of laconic's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from laconic.core.heartbeat import Heartbeat, say_that_it_failed
from laconic.core.job_store import JobStore, PatientStore, in_time, is_hosted_by_launcher
from laconic.errors import PeerLost, one_line

_REFUSAL_S = 5.0
"""The time limit for a rank that cannot attach to say so."""
_STAY_S = 0.5
"""How long the others can read why."""
_GRACE_S = 1.0
_GPU_GRACE_S = 60.0
"""NCCL ends the whole process at its timeout, so it gets a generous one."""
_GLOO_TRIES = 5
"""The number of times Gloo tries to connect to a rank, each for its whole timeout."""


class Meeting:
    """Two connections to the job's store, and a prefix in it for the ranks of this session."""

    def __init__(self, rank: int, parent: dist.ProcessGroup, timeout_s: float) -> None:
        self._parent = parent
        self._timeout_s = timeout_s
        with _naming_the_store(rank):
            self.questions = JobStore(timeout_s=timeout_s)
            sessions = self.questions.under(f"laconic/{parent.group_name}/sessions")
            try:
                self.number = in_time(
                    lambda: sessions.add(str(rank), 1), timeout_s=timeout_s, thread_name="laconic-store"
                )
                self.beats = JobStore(timeout_s=timeout_s)
            except BaseException:
                self.questions.cut()
                raise
        self.place = f"laconic/{parent.group_name}/{self.number}"
        self.beats_place = f"{self.place}/beats"
        # Groups that train one model attach equally often.
        self.guests = f"laconic/guests/{self.number}"

    def group(self, config: str, heartbeat: Heartbeat) -> tuple[dist.ProcessGroup, bool]:
        """A group with the ranks of the parent, and whether it may be destroyed while the job runs.

        Called when all ranks have arrived.
        """
        backends = {item.split(":", 1)[1] for item in config.split(",")}
        # Our own timeout comes first, because it can name the rank to blame.
        limit = timedelta(seconds=self._timeout_s + (_GPU_GRACE_S if torch.cuda.is_available() else _GRACE_S))
        if backends == {"gloo"}:
            return heartbeat.in_time(lambda: self._gloo(limit), "attaching"), True
        name = next(iter(backends)) if len(backends) == 1 else config
        # torch names a part of the job after its ranks and how many groups exist, so destroying one would give its
        # name, and the stale addresses stored under it, to the next.
        return heartbeat.in_time(lambda: self._other(name, limit), "attaching"), self._parent is dist.group.WORLD

    def _gloo(self, limit: timedelta) -> dist.ProcessGroup:
        """A Gloo group as new_group makes it, but over our own connection to the store.

        Gloo asks the store for the addresses of all ranks. If one of them has just ended, the question blocks for the
        timeout of the training script's own connection, unless it is made over one that can be shut down. If a rank
        ends a moment later, Gloo tries several times to connect, in a thread that nothing waits for and that also ends
        in time. A late address is waited for until the deadline.
        """
        c10d, ranks = dist.distributed_c10d, dist.get_process_group_ranks(self._parent)
        store = PatientStore(self.questions.under(self.place), timeout_s=limit.total_seconds())
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            dist.get_rank(self._parent),
            ranks,
            dist.Backend("gloo"),
            store,
            self.place,  # pyrefly: ignore[bad-argument-type]
            timeout=limit / _GLOO_TRIES,
            group_desc="laconic",
        )
        assert isinstance(group, dist.ProcessGroup)
        group._get_backend(torch.device("cpu"))._set_default_timeout(limit)
        c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        return group

    def _other(self, backend: str, limit: timedelta) -> dist.ProcessGroup:
        group = dist.new_group(
            ranks=dist.get_process_group_ranks(self._parent),
            timeout=limit,
            backend=backend,
            use_local_synchronization=self._parent is not dist.group.WORLD,
            group_desc="laconic",
        )
        assert isinstance(group, dist.ProcessGroup)
        return group


def refuse_to_meet(parent: dist.ProcessGroup, reason: str) -> None:
    """Tell the ranks of a group, which attach or soon will, why this rank cannot; wait a moment at most.

    Like a rank that attaches, it counts a session, so that the next one has the same number on all ranks, which call
    attach() equally often.
    """
    rank = dist.get_rank(parent)

    def tell() -> None:
        meeting = Meeting(rank, parent, _REFUSAL_S)
        call = f" in its call {meeting.number} of attach()" if meeting.number > 1 else ""
        try:
            say_that_it_failed(meeting.beats.store, meeting.beats_place, rank, f"{reason}{call}")
        finally:
            meeting.beats.cut()
            meeting.questions.cut()

    try:
        in_time(tell, timeout_s=_REFUSAL_S, thread_name="laconic-store")
    except PeerLost:
        return  # the store has ended, which the others notice themselves
    if dist.get_rank() == 0 and not is_hosted_by_launcher():
        time.sleep(_STAY_S)  # the store ends with this process


@contextmanager
def _naming_the_store(rank: int) -> Iterator[None]:
    """For calls to the job's store while attaching; an error says who hosts it and how long this rank waited."""
    began_s = time.monotonic()
    try:
        yield
    except (RuntimeError, TimeoutError) as exc:
        state = "does not answer" if isinstance(exc, TimeoutError) else "is gone"
        raise PeerLost(
            f"attaching on rank {rank} failed after {time.monotonic() - began_s:.1f} s: rank 0 or the launcher, which "
            f"hosts the job's store, {state} ({one_line(exc, 120)})."
        ) from exc
