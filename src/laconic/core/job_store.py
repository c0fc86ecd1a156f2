"""A connection of our own to the job's store, on which no call blocks for ever.

A call to a store whose host has frozen does not return, and torch gives it no timeout. So calls are made in threads,
and a call that does not return is ended by shutting down its connection.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

_T = TypeVar("_T")
_SLICE_S = 0.5
"""Poll interval of a wait for failed peers."""
_ATTEMPT_S = 2.0
"""Time limit of the first attempt to connect."""
_CONNECTING = threading.Lock()
_OPEN_FILES = Path("/proc/self/fd")


class JobStore:
    """The job's store, over a connection that no other code uses.

    address: of the store; default: the store of torch.distributed's default group.
    """

    def __init__(self, *, timeout_s: float, address: tuple[str, int] | None = None) -> None:
        host, port = address or _address()
        with _CONNECTING:  # sockets that are new afterwards are ours
            _raise_if_refused(host, port)
            before = sockets()
            self._connections: list[socket.socket] = []
            try:
                # A blocking call on a shared connection would block all other callers.
                self._store = in_time(
                    lambda: _connect(host, port, timeout_s),
                    timeout_s=timeout_s,
                    thread_name="laconic-store",
                    look=lambda: _raise_if_refused(host, port),
                )
            except BaseException:
                self._find_connections(before, port)
                self.cut()
                raise
            self._find_connections(before, port)

    def _find_connections(self, before: Collection[int], port: int | None) -> None:
        new = [descriptor for number, descriptor in sockets().items() if number not in before]
        made = [_duplicate(descriptor, port) for descriptor in sorted(new)]
        self._connections = [sock for sock in made if sock is not None]

    @property
    def store(self) -> dist.Store:
        """All of the store."""
        return self._store

    def under(self, prefix: str) -> dist.Store:
        """The part of the store whose keys begin with `prefix`."""
        return dist.PrefixStore(prefix, self._store)

    def cut(self) -> None:
        """End all calls on this connection, from any thread: they raise, and so does every later one."""
        connections, self._connections = self._connections, []
        for connection in connections:
            with suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def close(self) -> None:
        """No further calls are made; the connection ends when the store is freed."""
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()


class PatientStore(dist.Store):
    """A store in which all waits for a key end at the same deadline, whatever timeout a caller passes.

    Gloo has a single timeout: for the address of a rank, and for each of its attempts to connect to it.
    """

    def __init__(self, store: dist.Store, *, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._deadline_s = time.monotonic() + timeout_s

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of a key, waiting as the store does."""
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and return its new value."""
        return self._store.add(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until this store's deadline; `timeout` is not used."""
        left_s = max(0.001, self._deadline_s - time.monotonic())
        self._store.wait(keys, timedelta(seconds=left_s))


def is_hosted_by_launcher() -> bool:
    """Whether torchrun hosts the job's store; rank 0 does otherwise."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def in_time(
    call: Callable[[], _T], *, timeout_s: float, thread_name: str, look: Callable[[], None] = lambda: None
) -> _T:
    """Return or raise what `call` does; TimeoutError after `timeout_s`, and then the thread of `call` keeps waiting.

    look: called at intervals meanwhile; its exceptions are raised here.
    """
    results: list[_T] = []
    errors: list[BaseException] = []
    given_up = threading.Event()
    device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # every thread has its own
            results.append(call())
        except BaseException as exc:  # noqa: BLE001 - raised below, in the thread that asked
            # If it is not consumed, it keeps this frame, and with it the connection, until the next garbage collection.
            if not given_up.is_set():
                errors.append(exc)

    thread = threading.Thread(target=run, name=thread_name, daemon=True)
    deadline_s = time.monotonic() + timeout_s
    thread.start()
    while thread.join(max(0.0, min(_SLICE_S, deadline_s - time.monotonic()))) or thread.is_alive():
        try:
            look()
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"no answer in {timeout_s:g} s")
        except BaseException:
            given_up.set()
            raise
    if errors:
        raise errors.pop()
    return results[0]


def _default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _connect(host: str | None, port: int | None, timeout_s: float) -> dist.Store:
    if host is None or port is None:
        return _default_store().clone()  # pyrefly: ignore[missing-attribute]
    # Not a clone, which would keep trying to connect for as long as the training script's own timeout. In attempts that
    # become longer: torch goes on trying where connections are refused, and nothing can end an attempt.
    deadline_s, attempt_s = time.monotonic() + timeout_s, _ATTEMPT_S
    while True:
        limit = timedelta(seconds=max(0.001, min(attempt_s, deadline_s - time.monotonic())))
        try:
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        except RuntimeError:
            _raise_if_refused(host, port)
            if time.monotonic() >= deadline_s:
                raise
            attempt_s *= 2
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store


def sockets(*, without: Collection[int] = ()) -> dict[int, int]:
    """The sockets of this process: inode number -> descriptor, without the descriptors in `without`.

    A descriptor may be reused for another socket between two calls; the inode number of a socket is never reused.
    """
    found: dict[int, int] = {}
    if _OPEN_FILES.exists():
        for descriptor in {int(entry.name) for entry in _OPEN_FILES.iterdir()} - set(without):
            with suppress(OSError):  # closed since it was listed
                about = os.fstat(descriptor)
                if stat.S_ISSOCK(about.st_mode):
                    found[about.st_ino] = descriptor
    return found


def _duplicate(descriptor: int, port: int | None) -> socket.socket | None:
    """A duplicate of the descriptor, if it is a connection to the job's store at this port."""
    try:
        own = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None  # closed since it was listed
    try:
        ours = own.getpeername()[1] == port
    except (OSError, IndexError):
        ours = False  # it listens, or is of another kind
    if not ours:
        own.close()
    return own if ours else None


def _raise_if_refused(host: str | None, port: int | None) -> None:
    """Raise if the store is gone: torch would keep trying to connect."""
    if host is None or port is None:
        return
    try:
        socket.create_connection((host, port), timeout=_SLICE_S).close()
    except ConnectionRefusedError as exc:
        raise RuntimeError(f"{host}:{port} refuses connections") from exc
    except OSError:
        return  # too slow to tell; the caller keeps waiting


def _address() -> tuple[str | None, int | None]:
    """The address of the job's store, if it is on the network."""
    store: object = _default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None), getattr(store, "port", None)
