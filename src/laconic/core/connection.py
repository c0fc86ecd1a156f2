"""One connected socket: a thread reads frames, and sending a frame never blocks the sender.

A small frame is sent at once, on the calling thread, if no other frame is queued; otherwise it is queued for a writing
thread, which is started for the first queued frame. On a paced link a frame is sent when it would have arrived.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections import deque
from collections.abc import Callable

from laconic.core.frames import Frame, StrangerRefused, pack, receive_frame, send_all, send_some
from laconic.core.paced import PacedLink
from laconic.errors import CommunicationError, FrameRefused

Address = tuple[str, int]
LAST_PORT = 65535
Count = Callable[[int, int], None]
"""Gets payload bytes and overhead bytes of every frame sent; called from any thread."""
LEFT = "closed the connection"
"""The reason when the other side ended it between two frames: on purpose, or because its process ended."""

_AT_ONCE_BYTES = 2**16
"""Frames up to this size are sent on the calling thread: copying them is cheaper than waking another."""
_SLICE_S = 0.5
"""How often the writing thread reads the clock of a paced link."""


class Connection:
    """Frames in, frames out.

    `on_frame(connection, frame)` and, once, `on_end(connection, reason, refused)` are called on the reading thread;
    `reason` completes a sentence that begins with the name of the other side. FrameRefused raised by `on_frame` ends
    the connection.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        token: bytes,
        limit_bytes: int,
        frame_timeout_s: float,
        first_frame_timeout_s: float | None,
        answers_strangers: bool,
        name: str,
        on_frame: Callable[[Connection, Frame], None],
        on_end: Callable[[Connection, str, bool], None],
        count: Count | None,
        link: PacedLink | None,
    ) -> None:
        """`first_frame_timeout_s`: how long the peer may take to identify itself; None: no limit.

        `answers_strangers`: a peer with another token or version gets an error before the connection ends.
        """
        _watch_peer(sock, frame_timeout_s)
        self.sender: int | None = None
        """The rank at the other side, known from its first frame."""
        self._sock = sock
        self._token = token
        self._limit_bytes = limit_bytes
        self._timeout_s = frame_timeout_s
        self._first_timeout_s = first_frame_timeout_s
        self._answers_strangers = answers_strangers
        self._name = name
        self._on_frame = on_frame
        self._on_end = on_end
        self._count = count
        self._link = link
        self._state = threading.Condition()
        self._outgoing: deque[tuple[float, deque[memoryview]]] = deque()
        self._ended: str | None = None
        self._refused = False
        self._writer: threading.Thread | None = None
        self._reader = threading.Thread(target=self._read, name=f"{name}-read", daemon=True)

    def start(self) -> None:
        """Begin to read; RuntimeError if no thread can be started."""
        try:
            self._reader.start()
        except RuntimeError:
            self._sock.close()
            raise

    def send(self, frame: Frame) -> bool:
        """Send a frame, now or when its turn comes; False if the connection has ended: then the frame is dropped."""
        pieces = pack(frame, self._token, limit_bytes=self._limit_bytes)
        payload_bytes, header_bytes = frame.payload_bytes, frame.header_bytes
        with self._state:
            if self._ended is not None:
                return False
            at_once = self._link is None and not self._outgoing and payload_bytes + header_bytes <= _AT_ONCE_BYTES
            try:
                sent = at_once and send_some(self._sock, pieces)
            except OSError as exc:
                self._end(_broken(exc))
                return False
            if not sent:
                due_s = -math.inf if self._link is None else self._link.reserve(payload_bytes + header_bytes)
                self._outgoing.append((due_s, pieces))
                if self._writer is None:
                    writer = threading.Thread(target=self._write, name=f"{self._name}-write", daemon=True)
                    writer.start()
                    self._writer = writer
                self._state.notify()
        if self._count is not None:
            self._count(payload_bytes, header_bytes)
        return True

    def end(self, reason: str) -> None:
        """End the connection from this side; frames not yet sent are dropped. The first reason given stays."""
        with self._state:
            self._end(reason)

    def join(self, timeout_s: float) -> bool:
        """Wait until the threads and the socket of an ended connection are gone; False if some are still there."""
        if threading.current_thread() is not self._reader:  # a callback may close what called it
            self._reader.join(timeout_s)
            return not self._reader.is_alive()
        return True

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
            self._state.notify()
            # Wakes both threads. The other side may have gone first: then there is nothing to shut down.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        reason = "failed here"
        try:
            while (frame := self._next_frame()) is not None:
                self._on_frame(self, frame)
            reason = LEFT
        except FrameRefused as exc:
            self._refused = True
            if isinstance(exc, StrangerRefused) and self._answers_strangers:
                self._answer_stranger(exc)
            reason = f"sent what this side refuses: {str(exc).rstrip('.')}"
        except OSError as exc:
            reason = _broken(exc)
        finally:
            self.end(reason)
            if self._writer is not None:
                self._writer.join()
            self._sock.close()
            assert self._ended is not None
            self._on_end(self, self._ended, self._refused)

    def _answer_stranger(self, refused: StrangerRefused) -> None:
        """Send the peer the reason why it is refused, if that does not block."""
        with contextlib.suppress(OSError):  # it may be gone
            send_some(self._sock, pack(refused.header.error(str(refused).rstrip(".")), refused.token))

    def _next_frame(self) -> Frame | None:
        first_timeout_s = self._first_timeout_s if self.sender is None else None
        frame = receive_frame(
            self._sock,
            self._token,
            limit_bytes=self._limit_bytes,
            timeout_s=self._timeout_s if first_timeout_s is None else first_timeout_s,
            idle_timeout_s=first_timeout_s,
        )
        if frame is not None:
            if self.sender not in (None, frame.sender):
                raise FrameRefused(f"a frame of rank {frame.sender} came on the connection of rank {self.sender}.")
            self.sender = frame.sender
        return frame

    def _write(self) -> None:
        try:
            while (pieces := self._next_pieces()) is not None:
                send_all(self._sock, pieces, timeout_s=self._timeout_s)
                with self._state:
                    self._outgoing.popleft()
        except CommunicationError:
            self.end(f"took no bytes for {self._timeout_s:g} s")
        except OSError as exc:
            self.end(_broken(exc))
        finally:
            with self._state:
                self._outgoing.clear()  # drops tensors that will not be sent

    def _next_pieces(self) -> deque[memoryview] | None:
        with self._state:
            while self._ended is None:
                left_s: float | None = None
                if self._outgoing:
                    due_s, pieces = self._outgoing[0]
                    left_s = 0.0 if self._link is None else due_s - self._link.clock.now()
                    if left_s <= 0:
                        return pieces
                self._state.wait(None if left_s is None else min(left_s, _SLICE_S))
            return None


def _watch_peer(sock: socket.socket, timeout_s: float) -> None:
    """Make the kernel notice within about `timeout_s` that the other host is gone, also while nothing is sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(timeout_s / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(timeout_s / 8)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1000 * timeout_s)))


def _broken(exc: OSError) -> str:
    return f"broke the connection: {exc.strerror or exc}"
