"""The thread of a rank that sends its part of every chunk to the aggregator and receives the sums.

Chunks are numbered when a request is made, equally on all ranks because all make the same requests in the same order. A
rank asks for sums that do not arrive, and retransmits only the frames that the aggregator lacks. So a rank that waits
for a slow one sends only an occasional question.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from laconic.core.caller import RequestFailed
from laconic.core.connection import Address
from laconic.core.paced import PacedLink
from laconic.core.transport import Traffic
from laconic.errors import CommunicationError, one_line
from laconic.runtime.datagrams import FRAMES_PER_CALL, Datagrams
from laconic.runtime.in_network import frames as wire
from laconic.runtime.in_network.request import Request, Run
from laconic.runtime.in_network.window import Window

_LOOK_S = 0.2
"""Interval between checks of the connection to the server."""
_CLOSE_S = 5.0


class SlotWorker:
    """One rank's side of an aggregator; requests come from one thread."""

    def __init__(
        self,
        datagrams: Datagrams,
        aggregator: Address,
        *,
        rank: int,
        world_size: int,
        num_slots: int,
        tag: int,
        timeout_s: float,
        lost: Callable[[str], CommunicationError | None],
        traffic: Traffic,
        link: PacedLink | None = None,
    ) -> None:
        """`lost(what)`: the error for `what` if the server with the aggregator is gone, else None."""
        self._datagrams = datagrams
        self._to = aggregator
        self._name = f"the aggregator at {aggregator[0]}:{aggregator[1]}"
        self._rank = rank
        self._world_size = world_size
        self._tag = tag
        self._timeout_s = timeout_s
        self._lost = lost
        self._traffic = traffic
        self._link = link
        self._window = Window(num_slots)
        self._lock = threading.Lock()
        self._open: deque[tuple[Request, Run]] = deque()
        """Runs that lack sums, in the order of their chunks."""
        self._next_chunk = 0
        self._error: CommunicationError | None = None
        self._wake, self._woken = socket.socketpair()
        self._arrivals = select.poll()
        for source in (datagrams, self._woken):
            self._arrivals.register(source, select.POLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="laconic-in-network", daemon=True)
        self._thread.start()

    def sum(self, tensors: Sequence[torch.Tensor], *, what: str) -> Request:
        """Launch the sum of CPU tensors over all ranks."""
        where = f"{what} on rank {self._rank}"
        request = Request(
            tensors, self._world_size, what=what, timeout_s=self._timeout_s, late=f"{where}: {self._name}"
        )
        frames = sum(run.count for run in request.runs)
        self._traffic.count("control", "frames", wire.HEADER_BYTES * frames)
        self._traffic.count("control", "scales", request.scale_bytes)
        with self._lock:
            if self._error is not None:
                raise self._lost(what) or self._error
            for run in request.runs:
                run.first, self._next_chunk = self._next_chunk, self._next_chunk + run.count
                self._open.append((request, run))
        self._wake_up()
        return request

    def close(self) -> None:
        """End the thread; requests that are open fail. Closing twice is fine."""
        if not self._closing:
            self._closing = True
            self._wake_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
        self._datagrams.close()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended, and waiting requests have its error
            self._wake.send(b"!")

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wait()
                self._receive()
                if (lost := self._lost(self._what())) is not None:
                    self._fail(lost)
                if self._error is not None:
                    return
                self._send()
                self._ask()
            self._fail(CommunicationError(f"the connection to {self._name} was closed on this side."))
        except Exception as exc:  # noqa: BLE001 - waiting requests must get any error
            self._fail(CommunicationError(f"frames to {self._name} failed: {type(exc).__name__}: {one_line(exc)}."))
        finally:
            self._wake.close()
            self._woken.close()

    def _wait(self) -> None:
        left_s = min(_LOOK_S, max(0.0, self._window.due_s - time.monotonic()))
        if self._woken.fileno() in (file for file, _ in self._arrivals.poll(1000 * left_s)):
            self._woken.recv(4096)

    def _receive(self) -> None:
        for datagram in self._datagrams.receive():
            if datagram.sender != self._to:
                continue
            for frames in wire.read(datagram.content, datagram.segment_bytes, self._tag):
                kinds = frames.headers["kind"]
                sums = frames.only(kinds == wire.SUM)
                if len(sums):
                    self._take(sums)
                for other in np.flatnonzero(kinds != wire.SUM).tolist():
                    self._heed(int(kinds[other]), int(frames.headers["chunk"][other]), frames.values[other].tobytes())

    def _take(self, sums: wire.Frames) -> None:
        chunks = sums.headers["chunk"].astype(np.int64)
        new = self._window.come(chunks, time.monotonic())
        if not new.any():
            return
        chunks, sums = chunks[new], sums.only(new)
        for request, run in self._runs():
            numbers = chunks - run.first
            inside = (numbers >= 0) & (numbers < run.count)
            # A frame from the network may have an unexpected length.
            fits = inside & (sums.headers["code"] == run.code)
            if inside.any():
                if not fits[inside].all() or not _right_length(run, numbers[inside], sums.values.shape[1]):
                    raise CommunicationError("a sum is not of the kind or of the length that was sent")
                run.take(numbers[inside], sums.values[inside])
                if run.complete and all(one.complete for one in request.runs):
                    request.finish()
        with self._lock:
            while self._open and self._open[0][1].complete:
                self._open.popleft()

    def _heed(self, kind: int, chunk: int, content: bytes) -> None:
        """Handle messages of the aggregator other than sums."""
        if kind == wire.LACK and len(content) % 2 == 0:
            self._send_again(self._window.send_again(chunk, np.frombuffer(content, "<u2").tolist()))
        elif kind == wire.FAIL:
            reason = one_line(content.decode(errors="replace"), 400)
            self._fail(RequestFailed(f"{self._what()} on rank {self._rank} failed at {self._name}: {reason}."))

    def _what(self) -> str:
        """The request that is waited for."""
        with self._lock:
            return self._open[0][0].what if self._open else "communication"

    def _runs(self) -> list[tuple[Request, Run]]:
        with self._lock:
            return list(self._open)

    def _send(self) -> None:
        """Send ready chunks up to the limit in flight."""
        window = self._window
        for _, run in self._runs():
            if run.first >= window.end:
                return
            while run.ready and run.sent < run.count:
                count = min(run.count - run.sent, window.end - run.first - run.sent, window.room, FRAMES_PER_CALL)
                if count <= 0:
                    break
                window.send(run.first + run.sent, count, time.monotonic())
                self._send_rows(run, run.sent, count)
                run.sent += count

    def _send_rows(self, run: Run, number: int, count: int) -> None:
        for rows in run.rows(number, count):
            chunks = run.first + number + np.arange(len(rows))
            sent = wire.write(wire.PART, chunks, rows, code=run.code, rank=self._rank, tag=self._tag)
            if self._link is not None:
                time.sleep(max(0.0, self._link.reserve(sent.size) - self._link.clock.now()))
            self._datagrams.send(sent, self._to)
            number += len(rows)

    def _send_again(self, lost: Sequence[int]) -> None:
        runs = self._runs()
        for chunk in lost:
            run = next((run for _, run in runs if run.first <= chunk < run.first + run.count), None)
            if run is not None:
                self._send_rows(run, chunk - run.first, 1)
                self._traffic.count("control", "sent again", wire.FRAME_BYTES)

    def _ask(self) -> None:
        now_s = time.monotonic()
        if now_s < self._window.due_s:
            return
        first, count = self._window.ask(now_s)
        asked = np.array([min(count, 2**16 - 1)], "<u2").tobytes()
        self._datagrams.send(wire.write_one(wire.ASK, first, asked, rank=self._rank, tag=self._tag), self._to)
        self._traffic.count("control", "frames", wire.HEADER_BYTES + len(asked))

    def _fail(self, error: CommunicationError) -> None:
        with self._lock:
            self._error = self._error or error
            requests = [request for request, _ in self._open]
            self._open.clear()
        for request in requests:
            request.finish(self._error)


def _right_length(run: Run, numbers: np.ndarray, nbytes: int) -> bool:
    """Whether all these chunks of a run have this length."""
    last = run.nbytes - (run.count - 1) * wire.VALUE_BYTES
    return bool(np.where(numbers == run.count - 1, nbytes == last, nbytes == wire.VALUE_BYTES).all())
