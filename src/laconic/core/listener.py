"""The side that is called: a socket on one interface of this host, a thread per connection, a handler for all of them.

A handler may keep `reply` and call it later from any thread, so a barrier or a wait for slow ranks blocks no thread.
No input ends the listener: a refused frame ends its connection, and an exception of the handler is sent to the calling
rank. A connection belongs to the job when its first frame has shown the job's token.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from laconic.core.admission import Unauthenticated
from laconic.core.connection import LAST_PORT, LEFT, Address, Connection, Count
from laconic.core.frames import FIRST_RESERVED_KIND, HELLO, LIMIT_BYTES, TOKEN_BYTES, Frame
from laconic.core.paced import PacedLink
from laconic.errors import CommunicationError, FrameRefused, LaconicError, one_line

_LOG = logging.getLogger("laconic")
_JOIN_S = 5.0
"""How long close() waits for threads that are busy in a handler."""
_FIRST_FRAME_S = 5.0
"""How long a new connection may take to show the token; a rank sends it at once."""
_UNAUTHENTICATED = 128
"""Connections that may be without a token at a time; each has a thread."""
_UNAUTHENTICATED_PER_ADDRESS = 32
_BACKLOG = 128
_LINES_PER_PERIOD = 5
_PERIOD_S = 10.0

ReplyTo = Callable[[Frame], None]
"""Sends an answer made by Frame.answer or Frame.error. Its tensors must not change afterwards: they are not copied. An
answer to a connection that has ended is dropped; Handler.left has reported the end."""


class Handler(Protocol):
    """The handler that the owner of a listener provides."""

    def frame(self, frame: Frame, reply: ReplyTo) -> None:
        """Serve one request; `reply` must be called once, now or later.

        Requests of one connection arrive one after the other, those of different connections concurrently. An exception
        is sent to the calling rank as the error of this request.
        """
        ...

    def left(self, sender: int, reason: str) -> None:
        """A connection of rank `sender` has ended; `reason` continues a sentence that begins with the rank's name.

        Not called by close().
        """
        ...


class Listener:
    """Accepts connections of ranks that have the job's token and passes their frames to a handler."""

    def __init__(
        self,
        handler: Handler,
        *,
        address: Address,
        token: bytes,
        limit_bytes: int = LIMIT_BYTES,
        name: str = "listener",
        max_connections: int = 256,
        frame_timeout_s: float = 30.0,
        count: Count | None = None,
        link: PacedLink | None = None,
    ) -> None:
        """`max_connections`: of ranks that have the token; connections without it have a limit of their own."""
        if len(token) != TOKEN_BYTES:
            raise CommunicationError(f"the token of {name} must have {TOKEN_BYTES} bytes, got {len(token)}.")
        self.name = name
        self._handler = handler
        self._token = token
        self._limit_bytes = limit_bytes
        self._max_connections = max_connections
        self._frame_timeout_s = frame_timeout_s
        self._count = count
        self._link = link
        self._complaints = _Complaints()
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._unauthenticated = Unauthenticated(
            at_most=_UNAUTHENTICATED, at_most_per_address=_UNAUTHENTICATED_PER_ADDRESS
        )
        self._closing = threading.Event()
        self._socket = _listening(address, name)
        bound = self._socket.getsockname()
        self.address: Address = (bound[0], bound[1])
        """The address for callers."""
        self._acceptor = threading.Thread(target=self._accept, name=f"laconic-{name}-accept", daemon=True)
        self._acceptor.start()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_connections(self) -> int:
        """Connections that are open now, also those that have not shown the token."""
        with self._lock:
            return len(self._connections) + len(self._unauthenticated)

    def close(self) -> None:
        """End all connections and threads; closing twice is fine. Answers that wait in a queue are dropped."""
        with self._lock:
            first = not self._closing.is_set()
            self._closing.set()
            connections = [*self._connections, *self._unauthenticated.all()]
        if first:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
        for connection in connections:
            connection.end("closed here")
        if threading.current_thread() is not self._acceptor:
            self._acceptor.join()
        self._socket.close()
        deadline_s = time.monotonic() + _JOIN_S
        late = [one for one in connections if not one.join(max(0.0, deadline_s - time.monotonic()))]
        if late:
            _LOG.warning("%s: the handler still serves %d requests %g s after close.", self.name, len(late), _JOIN_S)
        self._complaints.flush()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, peer = self._socket.accept()
            except OSError as exc:
                if not self._closing.is_set():
                    self._complaints.add(f"{self.name} cannot accept a connection: {one_line(exc)}.")
                    self._closing.wait(0.1)  # out of descriptors or memory: some may become free
                continue
            try:
                self._admit(sock, peer[0], peer[1])
            except (OSError, RuntimeError) as exc:  # the peer is gone already, or no thread can be started
                sock.close()
                self._complaints.add(f"{self.name} cannot serve {peer[0]}:{peer[1]}: {one_line(exc)}.")

    def _admit(self, sock: socket.socket, host: str, port: int) -> None:
        peer = f"{host}:{port}"
        connection = Connection(
            sock,
            token=self._token,
            limit_bytes=self._limit_bytes,
            frame_timeout_s=self._frame_timeout_s,
            first_frame_timeout_s=min(_FIRST_FRAME_S, self._frame_timeout_s),
            answers_strangers=True,
            name=f"laconic-{self.name}-{peer}",
            on_frame=self._take,
            on_end=lambda connection, reason, refused: self._ended(connection, peer, reason, refused),
            count=self._count,
            link=self._link,
        )
        with self._lock:
            if self._closing.is_set():
                sock.close()
                return
            crowded_out = self._unauthenticated.add(connection, host)
            try:
                connection.start()
            except RuntimeError:
                self._unauthenticated.remove(connection)
                raise
        if crowded_out is not None:
            crowded_out.end("had not shown its token when newer connections needed its place")

    def _take(self, connection: Connection, frame: Frame) -> None:
        with self._lock:
            first = self._unauthenticated.remove(connection)
            if first and len(self._connections) < self._max_connections:
                self._connections.add(connection)
            admitted = connection in self._connections
        if admitted:
            self._serve(connection, frame)
        else:
            # No answer: the caller retries until its timeout, and others may leave meanwhile.
            connection.end(f"was turned away: all {self._max_connections} connections are in use")

    def _serve(self, connection: Connection, frame: Frame) -> None:
        if frame.kind == HELLO:
            connection.send(frame.answer())
            return
        if frame.kind >= FIRST_RESERVED_KIND:
            raise FrameRefused(
                f"a request has the reserved kind {frame.kind}, allowed are 0 to {FIRST_RESERVED_KIND - 1}."
            )

        def reply(answer: Frame) -> None:
            connection.send(answer)

        try:
            self._handler.frame(frame, reply)
        except Exception as exc:  # noqa: BLE001 - the request failed, not the listener; the rank that asked is told
            ours = isinstance(exc, LaconicError)
            problem = one_line(exc).rstrip(".") if ours else f"{type(exc).__name__}: {one_line(exc)}"
            self._complaints.add(f"{self.name} failed to serve rank {frame.sender}: {problem}", None if ours else exc)
            connection.send(frame.error(problem))

    def _ended(self, connection: Connection, peer: str, reason: str, refused: bool) -> None:
        sender = connection.sender
        who = peer if sender is None else f"rank {sender} at {peer}"
        with self._lock:
            admitted = connection in self._connections
        try:
            if self._closing.is_set():
                return
            if refused or (not admitted and reason != LEFT):
                self._complaints.add(f"{self.name}: {who} {reason}. The connection is closed.")
            if sender is not None and admitted:
                self._handler.left(sender, reason)
        except Exception as exc:  # noqa: BLE001 - there is no caller to report to, only the log
            self._complaints.add(f"{self.name} failed when {who} left: {one_line(exc)}.", exc)
        finally:
            with self._lock:
                self._connections.discard(connection)
                self._unauthenticated.remove(connection)


def _listening(address: Address, name: str) -> socket.socket:
    """A listening socket; raises CommunicationError for an address that is not of a single interface."""
    host, port = address
    if not 0 <= port <= LAST_PORT:
        raise CommunicationError(f"{name} cannot listen on port {port}: a port is a number from 0 to {LAST_PORT}.")
    sock = socket.socket(socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host != "::":
            sock.bind((host, port))
        # The bound address decides, not the text: "", "0" and "0.0" stand for all interfaces as well.
        if host == "::" or sock.getsockname()[0] == "0.0.0.0":
            raise CommunicationError(
                f'{name} would listen on all interfaces of this host, got the address "{host}". Give the address of '
                "one interface."
            )
        sock.listen(_BACKLOG)
    except (OSError, UnicodeError) as exc:  # names that cannot be looked up raise the latter
        sock.close()
        raise CommunicationError(f"{name} cannot listen on {host}:{port}: {one_line(exc)}.") from exc
    except CommunicationError:
        sock.close()
        raise
    return sock


class _Complaints:
    """Log lines, a few per period: a peer that sends garbage must not fill the disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began_s = time.monotonic()
        self._lines = 0

    def add(self, text: str, cause: Exception | None = None) -> None:
        with self._lock:
            if time.monotonic() - self._began_s >= _PERIOD_S:
                self._flush()
            self._lines += 1
            if self._lines <= _LINES_PER_PERIOD:
                _LOG.warning("%s", text, exc_info=cause)

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        if self._lines > _LINES_PER_PERIOD:
            _LOG.warning("... and %d more like these.", self._lines - _LINES_PER_PERIOD)
        self._began_s = time.monotonic()
        self._lines = 0
