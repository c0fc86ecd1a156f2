"""The side that calls: one connection to one listener, any number of calls in flight on it.

reply = caller.call(PUSH, key=bucket, tensors=[gradient], what="bucket 3")
...
reply.wait()
parameters = reply.frame.tensors[0]
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence

import torch

from laconic.core.connection import LAST_PORT, LEFT, Address, Connection, Count
from laconic.core.frames import ERROR, FIRST_RESERVED_KIND, HELLO, LIMIT_BYTES, TOKEN_BYTES, Frame
from laconic.core.paced import PacedLink
from laconic.errors import CommunicationError, FrameRefused, PeerLost, one_line

_RETRY_S = 0.05
"""Pause before the second attempt to connect; it doubles with every further one."""
_LONGEST_RETRY_S = 1.0
_JOIN_S = 5.0
"""How long close() waits for its threads; they need milliseconds."""
_CLOSED = "is no longer called: the connection was closed here"


class RequestFailed(CommunicationError):
    """The listener has answered that it cannot serve this request; the connection stays open."""


class Reply:
    """The answer to a call, once it has arrived; a Work."""

    def __init__(self, caller: Caller, number: int, what: str, timeout_s: float) -> None:
        self.what = what
        """The operation, for error messages."""
        self._caller = caller
        self._number = number
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._come = threading.Event()
        self._frame: Frame | None = None
        self._error: CommunicationError | None = None

    @property
    def frame(self) -> Frame:
        """The answer; waits for it."""
        self.wait()
        assert self._frame is not None
        return self._frame

    def wait(self) -> None:
        """Wait for the answer; CommunicationError if it is an error or late, PeerLost if it cannot come."""
        if not self._come.wait(max(0.0, self._deadline_s - time.monotonic())):
            # An answer that arrives right now is still taken.
            self._caller._give_up(
                self._number,
                CommunicationError(
                    f"{self.what} on rank {self._caller.rank}: {self._caller.server} did not answer in "
                    f"{self._timeout_s:g} s."
                ),
            )
            self._come.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._come.is_set()

    def _finish(self, result: Frame | CommunicationError) -> None:
        if isinstance(result, Frame):
            self._frame = result
        else:
            self._error = result
        self._come.set()


class Caller:
    """One rank's connection to one listener; usable from any thread."""

    def __init__(
        self,
        address: Address,
        *,
        token: bytes,
        rank: int,
        timeout_s: float = 300.0,
        name: str = "server",
        peer: int | None = None,
        connect_timeout_s: float = 30.0,
        frame_timeout_s: float = 30.0,
        limit_bytes: int = LIMIT_BYTES,
        count: Count | None = None,
        link: PacedLink | None = None,
    ) -> None:
        """`peer`: the rank that is lost when the connection is."""
        if len(token) != TOKEN_BYTES:
            raise CommunicationError(f"the token for {name} must have {TOKEN_BYTES} bytes, got {len(token)}.")
        if not 0 < address[1] <= LAST_PORT:
            raise CommunicationError(
                f"rank {rank} cannot reach {name} at {address[0]}:{address[1]}: a port is a number from 1 to "
                f"{LAST_PORT}."
            )
        self.rank = rank
        self.peer = peer
        self.address = address
        """The address of the listener."""
        self.local_host = ""
        """The address of this host's interface that leads there, once connected."""
        self.server = f"{name} at {address[0]}:{address[1]}"
        """Name and address, for messages."""
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pending: dict[int, Reply] = {}
        self._next_number = 0
        self._ended: str | None = None
        self._refused = False
        self._closed = False

        def connect(left_s: float) -> Connection:
            return Connection(
                self._connect(address, left_s, connect_timeout_s),
                token=token,
                limit_bytes=limit_bytes,
                frame_timeout_s=frame_timeout_s,
                first_frame_timeout_s=None,
                answers_strangers=False,
                name=f"laconic-{name}-caller",
                on_frame=self._take,
                on_end=self._lose,
                count=count,
                link=link,
            )

        self._connection = self._join(connect, connect_timeout_s)

    def _join(self, connect: Callable[[float], Connection], timeout_s: float) -> Connection:
        """A connection on which the listener has answered.

        The first frame names the calling rank, and checks now, not in the first step, whether the listener accepts the
        token. A listener that closes the connection without an answer may have been full, so the caller tries again.
        """
        deadline_s = time.monotonic() + timeout_s
        pause_s, attempts = _RETRY_S, 0
        while True:
            attempts += 1
            self._connection = connect(deadline_s - time.monotonic())
            self._connection.start()
            try:
                self._send(HELLO, what="joining", timeout_s=max(0.0, deadline_s - time.monotonic())).wait()
            except CommunicationError as exc:
                turned_away = isinstance(exc, PeerLost) and not self._refused
                self.close()
                if not turned_away:
                    raise
                if time.monotonic() + pause_s >= deadline_s:
                    raise PeerLost(
                        f"rank {self.rank} cannot join {self.server} within {timeout_s:g} s: it closed {attempts} "
                        "connections without an answer. It is ending, or all its connections are in use; its log says "
                        "which.",
                        rank=self.peer,
                    ) from exc
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
                with self._lock:
                    self._ended, self._closed = None, False
            else:
                return self._connection

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(
        self,
        kind: int,
        key: int = 0,
        tensors: Sequence[torch.Tensor] = (),
        note: str = "",
        *,
        what: str = "",
        timeout_s: float | None = None,
    ) -> Reply:
        """Send a request without blocking; its tensors must stay untouched until the reply is done.

        `what` names the operation in errors; the answer must come within `timeout_s` (the caller's if not given).
        """
        if kind >= FIRST_RESERVED_KIND:
            raise FrameRefused(f"a request has the reserved kind {kind}, allowed are 0 to {FIRST_RESERVED_KIND - 1}.")
        what = what or f"request {kind} for key {key}"
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        return self._send(kind, key, tensors, note, what=what, timeout_s=timeout_s)

    @property
    def lost(self) -> CommunicationError | None:
        """Why no call can succeed any more, if the connection has ended."""
        return self.why_lost("communication")

    def why_lost(self, what: str) -> CommunicationError | None:
        """Why `what` cannot finish, if the connection has ended."""
        with self._lock:
            return None if self._ended is None else self._failure(what, self._ended)

    def close(self) -> None:
        """End the connection; calls that are pending fail. Closing twice is fine."""
        self._closed = True
        self._connection.end(_CLOSED)
        self._connection.join(_JOIN_S)

    def _connect(self, address: Address, left_s: float, timeout_s: float) -> socket.socket:
        deadline_s = time.monotonic() + left_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                sock = socket.create_connection(address, timeout=max(left_s, 0.001))
            except (OSError, UnicodeError) as exc:  # names that cannot be looked up raise the latter
                # A server that was started a moment ago may not listen yet.
                if not isinstance(exc, ConnectionError) or left_s <= _RETRY_S:
                    raise PeerLost(
                        f"rank {self.rank} cannot reach {self.server} within {timeout_s:g} s: {one_line(exc)}.",
                        rank=self.peer,
                    ) from exc
                time.sleep(_RETRY_S)
                continue
            sock.settimeout(None)
            self.local_host = sock.getsockname()[0]
            return sock

    def _send(
        self,
        kind: int,
        key: int = 0,
        tensors: Sequence[torch.Tensor] = (),
        note: str = "",
        *,
        what: str,
        timeout_s: float,
    ) -> Reply:
        with self._lock:
            if self._ended is not None or self._closed:
                raise self._failure(what, self._ended or _CLOSED)
            number, self._next_number = self._next_number, self._next_number + 1
            reply = self._pending[number] = Reply(self, number, what, timeout_s)
        try:
            # False means that the connection ends right now; then its end also ends this reply.
            self._connection.send(Frame(kind, self.rank, number, key, note, tuple(tensors)))
        except FrameRefused as exc:
            with self._lock:
                self._pending.pop(number, None)
            raise FrameRefused(f"{what} on rank {self.rank} cannot be sent to {self.server}: {exc}") from exc
        return reply

    def _take(self, connection: Connection, frame: Frame) -> None:
        with self._lock:
            if frame.number >= self._next_number:
                raise FrameRefused(f"an answer has number {frame.number}, but only {self._next_number} were asked for.")
            reply = self._pending.pop(frame.number, None)
        if reply is None:
            return  # its wait has timed out and raised
        if frame.kind == ERROR:
            reply._finish(
                RequestFailed(f"{reply.what} on rank {self.rank} failed at {self.server}: {one_line(frame.note)}.")
            )
        else:
            reply._finish(frame)

    def _give_up(self, number: int, error: CommunicationError) -> None:
        with self._lock:
            reply = self._pending.pop(number, None)
        if reply is not None:
            reply._finish(error)

    def _lose(self, connection: Connection, reason: str, refused: bool) -> None:
        with self._lock:
            self._ended, self._refused = reason, refused
            pending = list(self._pending.values())
            self._pending.clear()
        for reply in pending:
            reply._finish(self._failure(reply.what, reason))

    def _failure(self, what: str, reason: str) -> CommunicationError:
        text = f"{what} on rank {self.rank} cannot finish: {self.server} {reason}."
        if reason == _CLOSED:
            return CommunicationError(text)
        if reason == LEFT:
            text += " It has ended, or refused a frame; its log says which."
        return PeerLost(text, rank=self.peer)
