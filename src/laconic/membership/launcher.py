"""A whole elastic job from one command: the store, the keeper of the views, and the workers of this host.

On further hosts only an agent runs, which finds store and keeper by their address.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from laconic.errors import LaconicError, one_line
from laconic.membership.agent import Agent, Spawn, Worker
from laconic.membership.decisions import Decisions, OnError
from laconic.membership.keeper import ENDED, Keeper
from laconic.membership.limits import SILENT_S
from laconic.membership.view import View

ON_ERROR, RANKS_PER_REPLICA = "on-error", "ranks-per-replica"
"""The keys under which the store has these settings of the launch, for agents of other hosts."""
_OPENING = timedelta(seconds=30)
"""The time in which this process must reach its own store: an address of another host is a typing error."""
_ANSWER = timedelta(minutes=5)
_POLL_S = 0.2
_GRACE_S = 5.0
"""Time for workers to report why they stopped before they are killed."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What to start, and what to do when a worker ends."""

    spawn: Spawn
    """The command that starts a worker."""
    num_workers: int
    """Processes on this host."""
    ranks_per_replica: int = 1
    """Processes that hold one copy of the model together. All numbers below are numbers of replicas."""
    first: int = 0
    """The number in the first view, on all hosts; 0: those of this host."""
    min_ranks: int = 1
    max_ranks: int = 2**31
    max_restarts: int = 100
    """The total number of killed ones that are replaced."""
    on_error: OnError = "end"
    """What becomes of the job when the script of a worker raises: it ends, or the replica is replaced."""
    replace_after_s: float = 0.0
    """How long after its death a replica is replaced."""
    silent_s: float = SILENT_S
    """A host that sends no heartbeat for this long counts as dead."""
    environment: Mapping[str, str] = field(default_factory=dict)
    bind: tuple[str, int] = ("127.0.0.1", 0)
    """The address of the store; port 0: any free port."""

    @property
    def num_replicas(self) -> int:
        """Replicas on this host."""
        return self.num_workers // self.ranks_per_replica


class Launcher:
    """Runs a job; `on_event` gets every event as one line."""

    def __init__(self, launch: Launch, *, on_event: Callable[[str], None] = lambda text: None) -> None:
        self._launch = launch
        self._on_event = on_event
        self._why: str | None = None
        self._over = False
        self._leaving = False
        host, port = launch.bind
        try:
            self._store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=_OPENING)
        except RuntimeError as exc:
            raise LaconicError(
                f"the job's store cannot be reached at {host}:{port}: {one_line(exc, 120)}. Listen on a free port "
                "of an address of this host."
            ) from exc
        self._store.set_timeout(_ANSWER)
        self.address = (host, self._store.port)
        first = launch.first or launch.num_replicas
        rules = Decisions(
            first=first,
            min_ranks=launch.min_ranks,
            max_ranks=launch.max_ranks,
            ranks_per_replica=launch.ranks_per_replica,
            on_error=launch.on_error,
        )
        self._store.set(ON_ERROR, launch.on_error)
        self._store.set(RANKS_PER_REPLICA, str(launch.ranks_per_replica))
        self._keeper = Keeper(
            self.address,
            rules,
            silent_s=launch.silent_s,
            on_view=self._show_view,
            on_end=self._note_end,
            on_over=self._note_over,
        )
        name = str(self._store.add("agents", 1) - 1)
        self.agent = Agent(
            self.address, name, launch.spawn, launch.environment, on_event, ranks_per_replica=launch.ranks_per_replica
        )

    def why_ended(self) -> str | None:
        return self._why

    @property
    def view(self) -> View | None:
        """The current view; None before there is one."""
        return self._keeper.view

    def is_ending(self) -> bool:
        return self._keeper.finished or self._leaving

    def is_over(self) -> bool:
        return self._over

    def has_left(self, worker: str) -> bool:
        return self._keeper.has_left(worker)

    def is_cut_off(self) -> bool:
        return False

    def was_given_up(self, worker: str) -> bool:
        return self._keeper.was_silent(worker)

    def _show_view(self, view: View) -> None:
        why = f" ({view.why})" if view.why else ""
        split = f" in {len(view.replicas)} replicas" if view.seats else ""
        self._on_event(f"view {view.number}: {len(view.members)} ranks{split}: {', '.join(view.members)}{why}")

    def _note_end(self, why: str) -> None:
        self._why = why

    def _note_over(self) -> None:
        self._over = True

    def leave(self) -> None:
        """Tell every worker to finish its step and end; none is replaced any more."""
        self._leaving = True
        self.agent.signal_all(signal.SIGTERM)

    def run(self) -> None:
        """Return when every worker has ended; raises LaconicError if the job was given up."""
        try:
            for slot in range(self._launch.num_replicas):
                self.agent.start(slot)
            run_workers(self.agent, self._launch, self)
        except KeyboardInterrupt:
            self.agent.signal_all(signal.SIGINT)
            self.agent.end_all(grace_s=_GRACE_S)
            raise
        finally:
            self.close()

    def close(self) -> None:
        """End the workers of this host, and the keeper."""
        self.agent.end_all(grace_s=0.0)
        self.agent.stop()
        self._keeper.stop()


class JobState(Protocol):
    """The state of the whole job, as known on an agent's host."""

    def why_ended(self) -> str | None:
        """Why the keeper has given up, once it has."""
        ...

    def is_ending(self) -> bool:
        """Whether some worker has completed training."""
        ...

    def is_over(self) -> bool:
        """Whether all workers have completed training."""
        ...

    def has_left(self, worker: str) -> bool:
        """Whether this worker has completed training, or left in an orderly way; its script may still run."""
        ...

    def is_cut_off(self) -> bool:
        """Whether the host that holds the job's store is gone: then no worker can be replaced."""
        ...

    def was_given_up(self, worker: str) -> bool:
        """Whether the job goes on without this worker, as its host was silent: it is then replaced, however it ends."""
        ...


class StateInStore:
    """The job as seen from a host without a keeper: what its store says."""

    def __init__(self, agent: Agent, store: dist.TCPStore) -> None:
        self._agent = agent
        self._store = store
        self._leaving = False
        self._store_is_gone = False

    def leave(self) -> None:
        """Tell every worker of this host to finish its step and end; none is replaced any more."""
        self._leaving = True
        self._agent.signal_all(signal.SIGTERM)

    def why_ended(self) -> str | None:
        try:
            return self._store.get(ENDED).decode() if self._store.check([ENDED]) else None
        except RuntimeError:
            self._store_is_gone = True
            return None

    def is_ending(self) -> bool:
        return self._leaving or self.is_cut_off()

    def is_over(self) -> bool:
        return False

    def has_left(self, worker: str) -> bool:
        return False

    def is_cut_off(self) -> bool:
        self.why_ended()  # asks the store
        return self._store_is_gone

    def was_given_up(self, worker: str) -> bool:
        return False


def run_workers(agent: Agent, launch: Launch, job: JobState) -> None:
    """Replace killed workers until all have ended; raises LaconicError if the job was given up."""
    num_restarts = 0
    failed: Worker | None = None
    given_up_s: float | None = None
    over_s: float | None = None
    noun = "worker" if launch.ranks_per_replica == 1 else "replica"
    lost: list[tuple[float, Worker]] = []
    """A worker of each replica that is to be replaced, and when."""
    while agent.workers or not agent.ended.empty() or lost:
        if job.why_ended() is not None:
            given_up_s = given_up_s or time.monotonic()
        if given_up_s is not None and time.monotonic() - given_up_s > _GRACE_S:
            break  # they have had the time to say it themselves
        if job.is_over():
            over_s = over_s or time.monotonic()
            # Scripts may evaluate and save the model after training. Processes that are frozen or still start do not.
            if time.monotonic() - over_s > _GRACE_S and not any(job.has_left(name) for name in [*agent.workers]):
                break
        if given_up_s is not None or job.is_ending():
            lost.clear()
        for due in [(when_s, one) for when_s, one in lost if when_s <= time.monotonic()]:
            if agent.has_ended(due[1].replica):
                lost.remove(due)
                agent.on_event(f"{noun} {agent.start(agent.free_slot(due[1].slot)).name} takes its place")
        try:
            worker = agent.ended.get(timeout=_POLL_S)
        except queue.Empty:
            continue
        code = worker.process.returncode
        assert code is not None, "only workers that have ended are in this queue"
        if code == 0 or worker.after_others:
            continue
        agent.on_event(f"worker {worker.name} {worker.how}")
        counts = launch.on_error == "end" or job.is_cut_off()
        if code > 0 and counts and not job.was_given_up(worker.name):
            failed = failed or worker
            given_up_s = given_up_s or time.monotonic()
        elif job.why_ended() is None and not job.is_ending() and failed is None:
            agent.kill_others(worker)
            if num_restarts >= launch.max_restarts:
                agent.on_event(f"{noun} {worker.replica} is not replaced: {num_restarts} have been (max restarts)")
            else:
                num_restarts += 1
                lost.append((time.monotonic() + launch.replace_after_s, worker))
    if job.why_ended() is not None:
        raise LaconicError(f"the job has ended: {(job.why_ended() or '').rstrip('.')}.")
    if failed is not None and job.is_cut_off():
        raise LaconicError(
            f"worker {failed.name} {failed.how}, and the host that started the job is gone, or has ended it. Start the "
            "job again from a checkpoint. The worker's output is above."
        )
    if failed is not None:
        raise LaconicError(f"worker {failed.name} {failed.how}, so the job has ended. Its output is above.")
