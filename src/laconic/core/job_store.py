"""A connection of our own to the store torch.distributed already has, which never keeps anybody waiting for ever.

A call to a store whose host has frozen does not return, and torch gives it no time limit. So calls are made in threads,
and one that does not come back is ended by shutting down the connection it waits on.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

_T = TypeVar("_T")
_SLICE_S = 0.5
"""How long a wait sleeps before it looks whether a peer has failed."""
_CONNECTING = threading.Lock()
_OPEN_FILES = Path("/proc/self/fd")


class JobStore:
    """The job's store, over a connection that nobody else uses."""

    def __init__(self, *, timeout_s: float) -> None:
        with _CONNECTING:  # what is new afterwards is ours
            _raise_if_refused()
            before = _sockets()
            try:
                # A blocking call on a shared connection would hold up everybody else's.
                self._store = in_time(
                    lambda: _connect(timeout_s),
                    timeout_s=timeout_s,
                    thread_name="laconic-store",
                    look=_raise_if_refused,
                )
            finally:
                made = [_duplicate(descriptor) for descriptor in sorted(_sockets() - before)]
                self._connections = [sock for sock in made if sock is not None]
                if sys.exception() is not None:
                    self.cut()

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
        """Nothing is called here any more; the connection ends when the store is freed."""
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()


class PatientStore(dist.Store):
    """A store in which everybody waits for a key until one and the same moment, whatever time limit a caller has.

    Gloo has a single time limit: for the address of a rank, and for each of its tries to connect to it.
    """

    def __init__(self, store: dist.Store, *, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._deadline_s = time.monotonic() + timeout_s

    def set(self, key: str, value: str) -> None:
        """See Store."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """See Store."""
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        """See Store."""
        return self._store.check(keys)

    def add(self, key: str, value: int) -> int:
        """See Store."""
        return self._store.add(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See Store; `timeout` is what this class is there to replace."""
        left_s = max(0.001, self._deadline_s - time.monotonic())
        self._store.wait(keys, timedelta(seconds=left_s))


def in_time(
    call: Callable[[], _T], *, timeout_s: float, thread_name: str, look: Callable[[], None] = lambda: None
) -> _T:
    """What `call` returns or raises; TimeoutError if it takes longer, and then its thread goes on waiting.

    look: called now and then meanwhile; what it raises is raised.
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
            # Kept for nobody, it would keep this frame, and with it the connection, until the next garbage collection.
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


def _connect(timeout_s: float) -> dist.Store:
    host, port = _address()
    if host is None or port is None:
        return _default_store().clone()  # pyrefly: ignore[missing-attribute]
    # Not a clone, which would go on trying to connect for as long as the training script has allowed its own.
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _sockets() -> set[int]:
    """Descriptors of this process that are sockets."""
    found: set[int] = set()
    if _OPEN_FILES.exists():
        for entry in _OPEN_FILES.iterdir():
            with suppress(OSError):  # closed since it was listed
                if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                    found.add(int(entry.name))
    return found


def _duplicate(descriptor: int) -> socket.socket | None:
    """The same socket under a number that stays ours, if it is a connection to the job's store."""
    try:
        own = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None  # closed since it was listed
    try:
        ours = own.getpeername()[1] == _address()[1]
    except (OSError, IndexError):
        ours = False  # it listens, or is of another kind
    if not ours:
        own.close()
    return own if ours else None


def _raise_if_refused() -> None:
    """Raise if nobody hosts the store any more: torch would go on trying to connect."""
    host, port = _address()
    if host is None or port is None:
        return
    try:
        socket.create_connection((host, port), timeout=_SLICE_S).close()
    except ConnectionRefusedError as exc:
        raise RuntimeError(f"{host}:{port} refuses connections") from exc
    except OSError:
        return  # too slow to tell; whoever asked waits on


def _address() -> tuple[str | None, int | None]:
    """Where the job's store is, if it is on the network."""
    store: object = _default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None), getattr(store, "port", None)
