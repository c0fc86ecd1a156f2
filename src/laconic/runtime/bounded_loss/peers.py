"""The thread of a rank that sends its rows to their owners, adds up those that it owns, and receives the means.

The thread works while the training loop computes. So an owner whose loop is late still adds up the rows that the
others have sent, without its own rows, and sends them the means: no rank waits for it longer than for a lost frame.
Each owner decides alone which rows are in its sums, and all ranks get those sums, so replicas stay identical.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from laconic.architecture.datagrams.loss_bound import LossBound
from laconic.core.connection import Address
from laconic.core.paced import PacedLink
from laconic.core.transport import Traffic
from laconic.errors import CommunicationError, one_line
from laconic.runtime.bounded_loss import frames as wire
from laconic.runtime.bounded_loss.deadline import Deadline
from laconic.runtime.bounded_loss.ledger import LossLedger
from laconic.runtime.bounded_loss.pace import Pace
from laconic.runtime.bounded_loss.partial_sum import PartialSum
from laconic.runtime.bounded_loss.retries import RoundTrip
from laconic.runtime.datagrams import FRAMES_PER_CALL, Bytes, Datagram, Datagrams, Frames

_TICK_S = 0.002
"""Poll interval while an exchange is open."""
_IDLE_S = 0.2
_GRACE_S = 0.005
"""How much later than its successors a frame may arrive, because the network reorders frames."""
_QUIET_S = 0.25
"""After this long without a row an owner asks for missing ones, even where it may not go on without them."""
_FEW = 8
"""Rows, known to be lost, that are asked for twice."""
_AHEAD = 4096
"""Exchanges that peers may be ahead of this rank's training loop."""
_EARLY_BYTES = 2**30
"""Memory for exchanges that this rank's training loop has not reached; frames of further ones are requested later."""
_KEPT_BYTES = 2**26
_KEPT = 4
"""Finished exchanges whose means are kept for slower ranks: so many, or so many bytes; then the next one waits."""
_CLOSE_S = 5.0


@dataclass(eq=False)
class Request:
    """Rows whose sums were asked for."""

    number: int
    rows: Bytes
    code: int
    what: str
    means: Bytes | None = None
    lost_ratio: float = 0.0
    error: CommunicationError | None = None
    over: threading.Event = field(default_factory=threading.Event)
    """Set when the means are here, or will not come."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows that each rank owns, bytes of a row, code."""
        return self.rows.shape[1], self.rows.shape[2], self.code


@dataclass(frozen=True)
class _Batch:
    """Frames that are to be sent to one peer."""

    kind: int
    number: int
    peer: int
    rows: np.ndarray
    again: bool = False


class Peers:
    """One rank among all; requests come from one thread, in the same order on every rank."""

    def __init__(
        self,
        datagrams: Datagrams,
        addresses: Sequence[Address],
        *,
        rank: int,
        tag: int,
        bound: LossBound,
        traffic: Traffic,
        link: PacedLink | None = None,
    ) -> None:
        """`addresses`: where each rank takes datagrams."""
        self._datagrams = datagrams
        self._addresses = list(addresses)
        self._rank_at = {address: peer for peer, address in enumerate(addresses) if peer != rank}
        self._rank = rank
        self._tag = tag
        self._traffic = traffic
        self._link = link
        self._ledger = LossLedger(bound.tolerate)
        self._deadline = Deadline(bound.percentile)
        self._pace = Pace()
        self._trips = [RoundTrip() for _ in addresses]
        self._states: dict[int, PartialSum] = {}
        self._requests: dict[int, Request] = {}
        """Requests that have begun."""
        self._bases = [0] * len(addresses)
        """By rank: the number below which it has the means of all exchanges."""
        self._num_begun = 0
        self._done_s = self._looked_s = 0.0
        self._urgent: deque[_Batch] = deque()
        self._parts: deque[_Batch] = deque()
        self._lock = threading.Lock()
        self._submitted: deque[Request] = deque()
        self._num_submitted = 0
        self._error: CommunicationError | None = None
        self._wake, self._woken = socket.socketpair()
        self._arrivals = select.poll()
        for source in (datagrams, self._woken):
            self._arrivals.register(source, select.POLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="laconic-bounded-loss", daemon=True)
        self._thread.start()

    # -- what other threads ask ----------------------------------------------------------------------------------

    def reduce(self, rows: Bytes, code: int, *, what: str) -> Request:
        """Start to sum rows[r] over all ranks, which rank r does; `rows` must not change until the request is over."""
        sent = 2 * (len(rows) - 1)
        self._traffic.count("payload", "rows", sent * rows[0].size)
        self._traffic.count("control", "frames", sent * rows.shape[1] * wire.HEADER_BYTES)
        with self._lock:
            if self._error is not None:
                raise self._error
            request = Request(self._num_submitted, rows, code, what)
            self._num_submitted += 1
            self._submitted.append(request)
        self._wake_up()
        return request

    @property
    def lost_ratio(self) -> float:
        """The share of the rows sent to this rank that is missing from its sums."""
        return self._ledger.lost_ratio

    def waits_for(self, request: Request) -> str:
        """What a request lacks, for messages."""
        state = self._states.get(request.number)
        if state is None or not state.begun:
            behind = [peer for peer, base in enumerate(self._bases) if peer != self._rank and base < request.number]
            return f"earlier exchanges on rank {', '.join(map(str, behind))}" if behind else "its turn"
        owners = [str(peer) for peer in range(len(self._addresses)) if len(state.missing_means(peer))]
        return f"rows from rank {', '.join(owners)}"

    def close(self) -> None:
        """End the thread; requests that are open fail. Closing twice is fine."""
        if not self._closing:
            self._closing = True
            self._wake_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
        self._datagrams.close()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended, and said why to all who wait
            self._wake.send(b"!")

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wait()
                self._receive()
                self._begin_submitted()
                self._send()
                self._look(time.monotonic())
            self._fail(CommunicationError("datagrams are no longer exchanged: the session was detached here."))
        except CommunicationError as exc:
            self._fail(exc)
        except Exception as exc:  # noqa: BLE001 - whoever waits must be told, whatever it was
            self._fail(CommunicationError(f"datagrams between ranks failed: {type(exc).__name__}: {one_line(exc)}."))
        finally:
            self._wake.close()
            self._woken.close()

    def _fail(self, error: CommunicationError) -> None:
        with self._lock:
            self._error = self._error or error
            requests = [*self._requests.values(), *self._submitted]
            self._submitted.clear()
        for request in requests:
            request.error = self._error
            request.over.set()

    def _wait(self) -> None:
        busy = bool(self._urgent or self._parts)
        open_ones = self._submitted or any(not state.finished for state in self._states.values())
        left_s = _TICK_S if open_ones else _IDLE_S
        if busy:
            left_s = min(left_s, max(0.0, self._pace.due_s() - time.monotonic()))
        if self._woken.fileno() in (file for file, _ in self._arrivals.poll(1000 * left_s)):
            self._woken.recv(4096)

    # -- what arrives --------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        # Rows first: what says that all were sent is dropped if it comes before an exchange is known.
        for datagram in sorted(self._datagrams.receive(), key=lambda datagram: -datagram.segment_bytes):
            self.take(datagram)

    def take(self, datagram: Datagram) -> None:
        """Use the frames of a datagram that are of this job and from the address of the rank they name."""
        rank = self._rank_at.get(datagram.sender)
        if rank is None:
            return
        for frames in wire.read(datagram.content, datagram.segment_bytes, self._tag):
            own = frames.only(frames.headers["rank"] == rank)
            if not len(own):
                continue
            self._bases[rank] = max(self._bases[rank], int(own.headers["base"].max()))
            keys = 256 * own.headers["exchange"].astype(np.int64) + own.headers["kind"]
            for key in np.unique(keys).tolist():
                self._heed(rank, key // 256, key % 256, own.only(keys == key))

    def _heed(self, rank: int, number: int, kind: int, frames: Frames) -> None:
        state = None if kind == wire.DONE else self._state(number, kind, frames)
        if state is None:
            return
        now_s = time.monotonic()
        if kind in (wire.PART, wire.MEAN):
            shape = int(frames.headers["rows"][0]), frames.values.shape[1], int(frames.headers["code"][0])
            state.check_shape(shape, rank)
            rows = frames.headers["row"].astype(np.int64)
            rows_are_there = rows < state.shape[0]
            rows, values = rows[rows_are_there], frames.values[rows_are_there]
            if kind == wire.PART:
                state.add(rank, rows, values, now_s)
                if not state.closed and state.complete:
                    self._close_sum(state)
            else:
                state.take(rank, rows, values, now_s)
                self._finish_if_all_here(state)
        elif kind == wire.PARTS_END:
            state.end_parts(rank)
        elif kind == wire.MEANS_END:
            state.end_means(rank)
        else:
            for known, values in zip(frames.headers["row"].tolist(), frames.values, strict=True):
                numbers = wire.from_32_bits(values)
                lost = state.means_lost if kind == wire.ASK else state.parts_lost
                # Rows that are only late are asked for as well, and must not make this rank send more slowly.
                lost[rank] = max(lost[rank], int(numbers[0]) if kind == wire.MISSED else known)
                if kind != wire.MISSED:
                    self._answer(state, rank, kind, numbers)

    def _state(self, number: int, kind: int, frames: Frames) -> PartialSum | None:
        """The exchange of a frame; opened here if the training loop has not reached it yet and there is room."""
        found = self._states.get(number)
        if found is not None or kind not in (wire.PART, wire.MEAN):
            return found
        if not self._num_begun <= number < self._num_begun + _AHEAD:
            return None  # all ranks have had it, or nobody can be there yet
        shape = int(frames.headers["rows"][0]), frames.values.shape[1], int(frames.headers["code"][0])
        early = [state.nbytes for state in self._states.values() if not state.begun]
        if len(self._addresses) * (sum(early) + shape[0] * shape[1]) > _EARLY_BYTES:
            return None
        return self._open(number, shape)

    def _open(self, number: int, shape: tuple[int, int, int]) -> PartialSum:
        state = PartialSum(
            number,
            shape,
            rank=self._rank,
            trips=self._trips,
            limit_s=self._deadline.limit_s(shape[0] * shape[1]),
            now_s=time.monotonic(),
        )
        self._states[number] = state
        return state

    def _answer(self, state: PartialSum, rank: int, kind: int, rows: np.ndarray) -> None:
        """Send rows again that were sent before and have not arrived."""
        sent = state.means_sent[rank] if kind == wire.ASK else state.parts_sent[rank]
        lost = rows[rows < sent]
        for first in range(0, len(lost), FRAMES_PER_CALL):
            some = lost[first : first + FRAMES_PER_CALL]
            what = wire.MEAN if kind == wire.ASK else wire.PART
            self._urgent.append(_Batch(what, state.number, rank, some, again=True))

    # -- what is sent --------------------------------------------------------------------------------------------

    def _begin_submitted(self) -> None:
        while self._submitted and self._may_begin():
            with self._lock:
                request = self._submitted.popleft()
                self._requests[request.number] = request
            self._num_begun = request.number + 1
            state = self._states.get(request.number) or self._open(request.number, request.shape)
            state.check_shape(request.shape, self._rank)
            state.begin(request.rows, time.monotonic())
            for rows in _batches(state.shape[0]):
                self._parts.extend(_Batch(wire.PART, state.number, peer, rows) for peer in self._others())
            self._parts.extend(self._ends(wire.PARTS_END, state))
            if not state.closed and state.complete:
                self._close_sum(state)
            self._finish_if_all_here(state)

    def _ends(self, kind: int, state: PartialSum) -> list[_Batch]:
        """Tell all others that everything was sent once; twice, because a receiver that gets neither waits longer."""
        self._traffic.count("control", "frames", 2 * (len(self._addresses) - 1) * wire.HEADER_BYTES)
        return 2 * [_Batch(kind, state.number, peer, np.zeros(1, int)) for peer in self._others()]

    def _others(self) -> list[int]:
        """All other ranks, beginning with the next: so no two ranks send to the same one at the same time."""
        count = len(self._addresses)
        return [(self._rank + far) % count for far in range(1, count)]

    def _may_begin(self) -> bool:
        kept = [state.nbytes for state in self._states.values() if state.finished]
        return len(kept) < _KEPT or sum(kept) < _KEPT_BYTES

    def _send(self) -> None:
        """Send one batch at most, so that frames that arrive meanwhile are soon read."""
        queue = self._urgent or self._parts
        if not queue:
            self._pace.rest()
            return
        if self._pace.due_s() > time.monotonic():
            return
        batch = queue.popleft()
        state = self._states.get(batch.number)
        if state is None:
            return
        most = self._pace.num_frames(wire.HEADER_BYTES + state.shape[1], FRAMES_PER_CALL)
        if len(batch.rows) > most:
            queue.appendleft(replace(batch, rows=batch.rows[most:]))
            batch = replace(batch, rows=batch.rows[:most])
        if batch.kind == wire.MEAN:
            values = state.means_of(batch.rows)
            state.means_sent[batch.peer] = max(state.means_sent[batch.peer], int(batch.rows[-1]) + 1)
        elif batch.kind == wire.MEANS_END:
            values = np.empty((1, 0), np.uint8)
        elif state.mine is None or state.owner_closed(batch.peer):
            return  # the owner wants no rows any more
        elif batch.kind == wire.PART:
            values = state.mine[batch.peer, batch.rows]
            state.parts_sent[batch.peer] = max(state.parts_sent[batch.peer], int(batch.rows[-1]) + 1)
        else:
            values = np.empty((1, 0), np.uint8)
        if batch.again:
            self._traffic.count("control", "sent again", values.size + len(values) * wire.HEADER_BYTES)
        self._send_frames(batch.kind, batch.peer, batch.rows, values, number=state.number, shape=state.shape)

    def _send_frames(
        self, kind: int, peer: int, rows: np.ndarray, values: Bytes, *, number: int, shape: tuple[int, int, int]
    ) -> None:
        made = wire.write(
            kind,
            rows,
            values,
            exchange=number,
            rows=shape[0],
            code=shape[2],
            rank=self._rank,
            base=self._bases[self._rank],
            tag=self._tag,
        )
        if self._link is not None:
            time.sleep(max(0.0, self._link.reserve(made.size) - self._link.clock.now()))
        self._datagrams.send(made, self._addresses[peer])
        if kind in (wire.PART, wire.MEAN):
            self._pace.sent(made.size, time.monotonic())

    def _ask(self, kind: int, state: PartialSum, peer: int, numbers: np.ndarray, *, lost: int = 0) -> None:
        content = wire.in_32_bits(numbers)
        # The field of the frame is a row's number, so it cannot say that all are lost.
        known = np.array([min(lost, state.shape[0] - 1)])
        # A few rows that are lost are asked for, and so answered, twice: a second loss would cost a long wait.
        for _ in range(2 if lost == len(numbers) <= _FEW else 1):
            self._traffic.count("control", "frames", wire.HEADER_BYTES + content.size)
            self._send_frames(kind, peer, known, content, number=state.number, shape=state.shape)

    # -- what is due ---------------------------------------------------------------------------------------------

    def _look(self, now_s: float) -> None:
        """Close sums whose time is over, and ask for what is missing."""
        if now_s - self._looked_s < _TICK_S:
            return
        self._looked_s = now_s
        for state in list(self._states.values()):
            if not state.closed:
                self._look_at_parts(state, now_s)
            if state.begun and not state.finished:
                for owner in self._others():
                    retries = state.mean_retries[owner]
                    # An owner that has sent nothing has probably not closed either.
                    early = not state.closed and not state.owner_closed(owner) and now_s - state.opened_s < _QUIET_S
                    if early or not len(missing := state.missing_means(owner)):
                        continue
                    lost = state.lost_means(owner)
                    if now_s >= retries.due_s(lost=lost == len(missing)):
                        retries.ask(now_s)
                        self._ask(wire.ASK, state, owner, missing, lost=lost)
        if self._submitted and now_s - self._done_s > 0.05:
            # Another rank may wait for this one in the same way, each without knowing how far the other is.
            self._tell_done(now_s)
        self._forget()

    def _look_at_parts(self, state: PartialSum, now_s: float) -> None:
        quiet_s = now_s - state.last_part_s
        too_late = state.limit_s is not None and now_s - state.opened_s > state.limit_s
        cut = too_late or (state.all_ended and quiet_s > _GRACE_S)
        unit = state.shape[1]
        if cut and state.can_close and self._ledger.allows(state.missing * unit, state.expected * unit):
            self._close_sum(state)
        elif cut or quiet_s > _QUIET_S:
            for peer in self._others():
                retries = state.part_retries[peer]
                if now_s >= retries.due_s(lost=state.has_ended(peer)) and len(missing := state.missing_parts(peer)):
                    retries.ask(now_s)
                    self._ask(wire.LACK, state, peer, missing, lost=state.lost_parts(peer))

    def _close_sum(self, state: PartialSum) -> None:
        for peer in self._others():
            if state.has_ended(peer) and (missing := len(state.missing_parts(peer))):
                self._ask(wire.MISSED, state, peer, np.array([missing]))
        state.close(time.monotonic())
        self._ledger.settle(state.lost * state.shape[1], state.expected * state.shape[1])
        self._deadline.note(state.nbytes, state.last_part_s - state.opened_s)
        for rows in _batches(state.shape[0]):
            self._urgent.extend(_Batch(wire.MEAN, state.number, peer, rows) for peer in self._others())
        self._urgent.extend(self._ends(wire.MEANS_END, state))
        self._finish_if_all_here(state)

    def _finish_if_all_here(self, state: PartialSum) -> None:
        if not state.begun or state.finished or not state.all_means:
            return
        request = self._requests.pop(state.number)
        request.lost_ratio = state.lost / state.expected
        request.means = state.finish()
        base = self._bases[self._rank]
        while (done := self._states.get(base)) is not None and done.finished:
            base += 1
        self._bases[self._rank] = base
        self._tell_done(time.monotonic())
        request.over.set()

    def _tell_done(self, now_s: float) -> None:
        self._done_s = now_s
        for peer in self._others():
            self._traffic.count("control", "frames", wire.HEADER_BYTES)
            empty = np.empty((1, 0), np.uint8)
            self._send_frames(wire.DONE, peer, np.zeros(1, int), empty, number=0, shape=(1, 0, 1))

    def _forget(self) -> None:
        """Free exchanges that every rank has finished."""
        had = min(self._bases)
        for number in [number for number in self._states if number < had]:
            state = self._states.pop(number)
            self._pace.update(state.num_lost, state.num_sent)


def _batches(num_rows: int) -> list[np.ndarray]:
    """Row numbers, in batches that one system call can send."""
    numbers = np.arange(num_rows)
    return [numbers[first : first + FRAMES_PER_CALL] for first in range(0, num_rows, FRAMES_PER_CALL)]
