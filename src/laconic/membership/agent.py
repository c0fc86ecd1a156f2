"""The agent of one host in an elastic job: it starts, watches and replaces workers, and reports to the keeper.

A process that ends is announced at once (waitpid). One that is stopped (SIGSTOP, a debugger) neither ends nor goes on,
and all ranks would wait for it: after a moment it is killed. The agent itself sends a heartbeat four times a second, so
that a host that is cut off or frozen is noticed.

If a replica has several ranks, these are processes of one host. Where one of them dies, the others are killed, because
they hold only parts of the model, and all of them are replaced.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from laconic.core.child_process import die_with_parent
from laconic.errors import UsageError
from laconic.membership.limits import BEAT_S, STOPPED_S
from laconic.membership.member import REPLICA_VARIABLE, STORE_VARIABLE, WORKER_VARIABLE
from laconic.membership.view import KEEPER, Beat, Ended, Message, to_text

_NOTICED_S = 5.0
"""How long after the error of a worker it may be noticed that another worker of its replica was killed before."""
_STOPPED = ("T", "t")
"""States of a stopped process in /proc."""


class Process(Protocol):
    """The part of subprocess.Popen that is used."""

    pid: int
    returncode: int | None
    """Its exit code once `wait` has returned; negative if a signal ended it."""

    def wait(self, timeout: float | None = None) -> int:
        """Return when it has ended; subprocess.TimeoutExpired if that takes longer."""
        ...


Spawn = Callable[[Mapping[str, str]], Process]
"""Starts a process with these environment variables, in a session of its own."""


@dataclass
class Worker:
    """One process."""

    name: str
    replica: str
    """The name of its replica: that of the first worker of it."""
    slot: int
    """The slot of its replica on this host, which a replacement takes over."""
    process: Process
    after_others: bool = False
    """Whether it ended because another worker of its replica had ended."""
    stopped_s: float | None = None
    """The time since which the process has been stopped."""
    used_ticks: int = 0
    """The processor time that the process had used by then."""

    @property
    def how(self) -> str:
        """How it ended, in words."""
        code = self.process.returncode
        assert code is not None, "it has not ended"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@dataclass
class Agent:
    """Starts workers on this host and reports when they end, to the keeper and in `ended`."""

    address: tuple[str, int]
    name: str
    spawn: Spawn
    environment: Mapping[str, str] = field(default_factory=dict)
    on_event: Callable[[str], None] = lambda text: None
    ranks_per_replica: int = 1
    own_address: str = "127.0.0.1"
    """The address at which the workers of this host reach this process."""

    def __post_init__(self) -> None:
        self.ended: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self.workers: dict[str, Worker] = {}
        self.num_started = 0
        """Replicas started so far."""
        self._stores: dict[str, dist.TCPStore] = {}
        """For each replica of several ranks, the store in which these meet."""
        self._failed: set[str] = set()
        """Replicas of which a worker has ended with an error, or by a signal."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.frozen = False
        """Set by the lab: sends no heartbeat and checks no worker, as if this host were frozen."""
        self._store = dist.TCPStore(
            *self.address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        threading.Thread(target=self._beat, name="laconic-agent", daemon=True).start()

    def start(self, slot: int) -> Worker:
        """Start a replica in a slot that is free; returns its first worker."""
        first, count = self.num_started * self.ranks_per_replica, self.ranks_per_replica
        self.num_started += 1
        replica = f"{self.name}.{first}"
        meeting = self._meeting(replica) if count > 1 else {}
        workers = []
        for position in range(count):
            name = f"{self.name}.{first + position}"
            variables = {
                **os.environ,
                **self.environment,
                STORE_VARIABLE: f"{self.address[0]}:{self.address[1]}",
                WORKER_VARIABLE: name,
                "LOCAL_RANK": str(slot * count + position),
                "PYTHONUNBUFFERED": "1",
            }
            # A worker has no rank before it is a member, but one inside its replica.
            for fixed in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", REPLICA_VARIABLE):
                variables.pop(fixed, None)
            if meeting:
                variables |= {**meeting, "RANK": str(position)}
            worker = Worker(name, replica, slot, self.spawn(variables))
            with self._lock:
                self.workers[name] = worker
            workers.append(worker)
            threading.Thread(target=self._see_off, args=(worker,), name=f"laconic-wait-{name}", daemon=True).start()
        for worker in workers:
            if (worker.process.returncode or 0) < 0:
                self.kill_others(worker)  # also those that have been started since it died
        return workers[0]

    def _meeting(self, replica: str) -> dict[str, str]:
        """A store for the ranks of a replica, and the variables by which init_process_group() finds it."""
        with socket.socket() as listening:
            listening.bind((self.own_address, 0))
            listening.listen()
            port = listening.getsockname()[1]
            self._stores[replica] = dist.TCPStore(
                self.own_address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
        return {
            REPLICA_VARIABLE: replica,
            "WORLD_SIZE": str(self.ranks_per_replica),
            "MASTER_ADDR": self.own_address,
            "MASTER_PORT": str(port),
            # As torchrun sets them: no rank starts a store of its own.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    def has_ended(self, replica: str) -> bool:
        """Whether no process of this replica is left."""
        with self._lock:
            return all(worker.replica != replica for worker in self.workers.values())

    def free_slot(self, wanted: int = 0) -> int:
        """This slot if no process is in it, else the first free one."""
        with self._lock:
            taken = {worker.slot for worker in self.workers.values()}
        return next(slot for slot in (wanted, *range(len(taken) + 1)) if slot not in taken)

    def _see_off(self, worker: Worker) -> None:
        code = worker.process.wait()
        worker.after_others = code > 0 and self._another_was_killed(worker)
        with self._lock:
            if code != 0 and not worker.after_others:
                worker.after_others = worker.replica in self._failed
                self._failed.add(worker.replica)
        # First of all: others may be waiting for this one.
        self._say(Ended(worker=worker.name, how=worker.how))
        with self._lock:
            self.workers.pop(worker.name, None)
            if not self._others(worker):
                self._stores.pop(worker.replica, None)
        if code < 0:
            self.kill_others(worker)
        self.ended.put(worker)

    def _another_was_killed(self, worker: Worker) -> bool:
        """Whether this error comes from the death of another worker of the replica, noticed a little later."""
        with self._lock:
            others = self._others(worker)
        until_s = time.monotonic() + _NOTICED_S
        for other in others:
            with suppress(subprocess.TimeoutExpired):
                if other.process.wait(max(0.0, until_s - time.monotonic())) < 0:
                    # Before this worker's end, which would seem to be the cause.
                    self._say(Ended(worker=other.name, how=other.how))
                    return True
        return False

    def _others(self, worker: Worker) -> list[Worker]:
        return [one for one in self.workers.values() if one.replica == worker.replica and one is not worker]

    def kill_others(self, worker: Worker) -> None:
        """Kill the other workers of a replica, which cannot go on without this one."""
        with self._lock:
            others = self._others(worker)
        for other in others:
            send_signal(other.process, signal.SIGKILL)

    def _beat(self) -> None:
        while not self._stopping.wait(BEAT_S):
            if self.frozen:
                continue
            with self._lock:
                workers = list(self.workers.values())
            self._say(Beat(agent=self.name, workers=tuple(worker.name for worker in workers)))
            for worker in workers:
                self._kill_if_stopped(worker)

    def _kill_if_stopped(self, worker: Worker) -> None:
        state, used_ticks = _state(worker.process.pid)
        # One that is stopped and continued many times a second makes progress, even if it is stopped at every look.
        if state not in _STOPPED or used_ticks != worker.used_ticks:
            worker.stopped_s, worker.used_ticks = None, used_ticks
        if state not in _STOPPED:
            return
        worker.stopped_s = worker.stopped_s or time.monotonic()
        if time.monotonic() - worker.stopped_s >= STOPPED_S:
            self.on_event(f"worker {worker.name} has been stopped for {STOPPED_S:g} s and is killed")
            send_signal(worker.process, signal.SIGKILL)

    def _say(self, message: Message) -> None:
        with suppress(RuntimeError):  # without a store the job is over, which workers notice themselves
            self._store.queue_push(KEEPER, to_text(message))

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every worker."""
        with self._lock:
            workers = list(self.workers.values())
        for worker in workers:
            send_signal(worker.process, number)

    def end_all(self, *, grace_s: float) -> None:
        """Ask every worker to end, and after a while kill the remaining ones with all their children."""
        with self._lock:
            workers = list(self.workers.values())
        until_s = time.monotonic() + grace_s
        for worker in workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, until_s - time.monotonic()))
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.wait(None)

    def stop(self) -> None:
        """Stop sending heartbeats."""
        self._stopping.set()


def spawn_command(command: Sequence[str]) -> Spawn:
    """Starts `command` with this process's standard output and error."""

    def spawn(environment: Mapping[str, str]) -> Process:
        try:
            return subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                # A session of its own: Ctrl-C reaches only the launcher, which ends the workers.
                start_new_session=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509 - one system call, no lock
            )
        except OSError as exc:
            raise UsageError(f"cannot start {command[0]}: {exc.strerror}.") from exc

    return spawn


def send_signal(process: Process, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _state(pid: int) -> tuple[str, int]:
    """The state of a process as /proc has it, and the processor time it has used, in ticks; empty: there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])
    except (OSError, IndexError):
        return "", 0
