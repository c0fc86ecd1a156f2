"""A process group that can be aborted: every operation on it then fails at once.

ProcessGroupGloo cannot be aborted (its abort() does nothing), so the sockets that Gloo has opened for the group are
found by their ports, duplicated, and shut down. ProcessGroupNCCL is aborted. A Gloo operation that waits for its last
message to be sent may not notice; it keeps waiting, but writes nothing (`is_still`).
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from laconic.core.job_store import JobStore, sockets
from laconic.errors import one_line
from laconic.membership.view import ViewBroken

_CONNECT_S = 10.0
"""How long one rank tries to connect to another: all ranks are alive when a view is made."""
CONNECTED_S = 6 * _CONNECT_S
"""How long a rank waits until it has connected to all: Gloo tries five times, then there is a problem to report."""
_GRACE_S = 5.0
"""How much longer the backend's own timeout is than ours, whose error says more."""
_GPU_GRACE_S = 60.0
_DESTROYED_S = 5.0
"""How long a process that ends waits until its groups are destroyed."""
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_GLOO_THREADS = ("pt_gloo_runloop", "gloo_tcp_loop")
"""Names of the threads that run Gloo's operations, and of those that receive for them."""
_THREADS = Path("/proc/self/task")


class CuttableGroup:
    """One rank's end of a process group over a store of its own."""

    def __init__(
        self, address: tuple[str, int], place: str, *, rank: int, world_size: int, cuda: bool, timeout_s: float
    ) -> None:
        """place: a prefix in the store that no other group ever uses."""
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._nccl: dist.ProcessGroupNCCL | None = None
        self.is_cut = False
        self._store = JobStore(timeout_s=_CONNECT_S, address=address)
        store = self._store.under(place)
        before = sockets()
        gloo = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=_CONNECT_S))
        made = [descriptor for number, descriptor in sockets().items() if number not in before]
        self._find_connections(store, made, rank, world_size)
        gloo._set_default_timeout(timedelta(seconds=timeout_s + _GRACE_S))
        kinds = dist.ProcessGroup.BackendType
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(kinds.GLOO)
        group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        if cuda:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout_s + _GPU_GRACE_S)
            with _errors_left_to_us():
                self._nccl = dist.ProcessGroupNCCL(store, rank, world_size, options)
            # Here, where it can be abandoned: in the first operation a rank that dies would block the others.
            self._nccl.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
            group._register_backend(torch.device("cuda"), kinds.NCCL, self._nccl)
        group._set_group_name(f"laconic/{place}")  # pyrefly: ignore[bad-argument-type]
        # torch uses this to find the rank that a message goes to.
        dist.distributed_c10d._world.pg_group_ranks[group] = {number: number for number in range(world_size)}
        self.group: dist.ProcessGroup | None = group

    def _find_connections(self, store: dist.Store, made: list[int], rank: int, world_size: int) -> None:
        """Keep the new sockets that lead to other ranks; the training script may have opened others meanwhile."""
        opened = [own for number in sorted(made) if (own := _duplicate(number)) is not None]
        listening = [own.getsockname()[1] for own in opened if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
        store.set(f"ports/{rank}", ",".join(map(str, listening)))
        said = store.multi_get([f"ports/{other}" for other in range(world_size)])
        ports = {int(port) for text in said for port in text.decode().split(",") if port}
        for own in opened:
            if _leads_to(own, ports):
                self._connections.append(own)
            else:
                own.close()
        if len(self._connections) < world_size - 1:
            raise RuntimeError(f"found {len(self._connections)} of the {world_size - 1} connections to other ranks")

    def cut(self) -> None:
        """End every operation, from any thread: they raise, and so does every later one."""
        self.is_cut = True  # before aborting: results that complete afterwards may be wrong
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):  # it has ended already
                    connection.shutdown(socket.SHUT_RDWR)
        self._store.cut()
        if self._nccl is not None:
            self._nccl.abort()

    def is_still(self) -> bool:
        """Whether, after a cut, Gloo writes to no tensor any more: its connections are closed, its threads idle."""
        with self._lock:
            own = {connection.fileno() for connection in self._connections}
        numbers = {os.fstat(descriptor).st_ino for descriptor in own}
        return numbers.isdisjoint(sockets(without=own)) and _gloo_waits()

    def close(self) -> None:
        """Release everything; no operation may be in flight."""
        self.cut()
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()
        group, self.group = self.group, None
        self._nccl = None
        if group is not None:
            dist.distributed_c10d._world.pg_group_ranks.pop(group, None)
            last = [group]
            del group
            _destroy(last)


_being_destroyed: list[threading.Thread] = []


def _destroy(last: list[dist.ProcessGroup]) -> None:
    """Drop the last reference to a group in another thread: destroying a Gloo group waits for its own threads."""
    _being_destroyed[:] = [thread for thread in _being_destroyed if thread.is_alive()]
    thread = threading.Thread(target=last.clear, name="laconic-last-reference", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # while the interpreter ends, from Python 3.12 on
        last.clear()
    else:
        _being_destroyed.append(thread)


@atexit.register
def _wait_until_destroyed() -> None:
    """A thread that is still inside Gloo when the interpreter ends would abort the process."""
    until_s = time.monotonic() + _DESTROYED_S
    for thread in _being_destroyed:
        thread.join(max(0.0, until_s - time.monotonic()))


def connect(
    make: Callable[[], CuttableGroup], *, call_when_over: Callable[[Callable[[], None]], None], what: str
) -> CuttableGroup:
    """Return what `make` returns; raise ViewBroken as soon as the view is over, or if ranks cannot connect.

    A rank that dies while others connect to it would block them, so `make` runs in a thread that may be abandoned: Gloo
    gives up by itself a little later.
    """
    made: list[CuttableGroup] = []
    problems: list[Exception] = []
    ended = threading.Event()
    over = threading.Event()
    device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # every thread has its own
            group = make()
            if over.is_set():
                group.close()
            else:
                made.append(group)
        except Exception as exc:  # noqa: BLE001 - raised below, in the thread that asked
            problems.append(exc)
        ended.set()

    def give_up() -> None:
        over.set()
        ended.set()

    threading.Thread(target=run, name="laconic-connect", daemon=True).start()
    call_when_over(give_up)
    if not ended.wait(CONNECTED_S):
        over.set()
        raise ViewBroken(f"{what}: ranks did not connect in {CONNECTED_S:g} s")
    if made:
        return made[0]
    if problems:
        raise ViewBroken(f"{what}: ranks could not connect: {one_line(problems[0], 200)}") from problems[0]
    raise ViewBroken(f"{what}: the view was over before its ranks had connected")


@contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """Turn off NCCL's error handling for groups made here: its watchdog would end this process when a peer dies."""
    before = os.environ.get(_NCCL_ERRORS)
    os.environ[_NCCL_ERRORS] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NCCL_ERRORS]
        else:
            os.environ[_NCCL_ERRORS] = before


def _gloo_waits() -> bool:
    """Whether every thread of Gloo in this process sleeps; False if that cannot be determined."""
    if not _THREADS.exists():
        return False
    states = []
    for thread in _THREADS.iterdir():
        with suppress(OSError):  # it has ended
            name, _, rest = (thread / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
            if name.partition("(")[2] in _GLOO_THREADS:
                states.append(rest.split()[0])
    return all(state == "S" for state in states)


def _duplicate(descriptor: int) -> socket.socket | None:
    """A duplicate of the file descriptor, if it is an internet socket."""
    try:
        own = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None  # closed since it was listed
    if own.family in (socket.AF_INET, socket.AF_INET6):
        return own
    own.close()
    return None


def _leads_to(own: socket.socket, ports: set[int]) -> bool:
    """Whether a socket is a connection with one end at one of these ports."""
    try:
        return own.getpeername()[1] in ports or own.getsockname()[1] in ports
    except OSError:
        return False  # not connected
