"""Who is to blame when a wait fails: heartbeats, status lines and last words in the job's store.

Every rank writes a heartbeat and its status into the store that torch.distributed already has; the first rank that
fails writes why. One thread makes all calls to the store, because a call to a store whose host has frozen never
returns, and no wait for other ranks may depend on it. Other threads read the results of that thread, with timeouts of
their own.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from laconic.core.job_store import JobStore, in_time, is_hosted_by_launcher
from laconic.core.transport import DETACHED, DETACHING, left_out, will_not_come
from laconic.errors import CommunicationError, PeerLost, one_line

_T = TypeVar("_T")
_LOG = logging.getLogger("laconic")
_LOOKS = 4
"""Beats that must be missing before a rank counts as silent."""
_LOOKS_AHEAD = _LOOKS + 2
"""Beats before the end of a wait at which this rank begins to watch the others, so that silent ones are known in
time."""
_NOTHING = "nothing yet"
_WHY_SILENT = {
    # Ranks that run out of data at different times are the usual reason.
    DETACHED: "has detached: ranks must make the same number of steps, or train inside session.join(), which is not "
    "for sharded models, servers and gossip",
    _NOTHING: "did not attach: every rank of the process group must call laconic.attach",
}
_FAILURE = "failure"
"""The key of the record of the first rank that fails."""
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.05
"""Poll interval for the texts of all ranks: short at first, then longer and longer."""


_MARKS_KEPT = 16
"""The number of marks of one rank that stay in the store."""


class Mark(NamedTuple):
    """The steps that a rank has made in so many passes of a session; all ranks must have made as many."""

    session: int
    passes: int
    step: int
    last: bool
    """Made at the end of the session; other marks are made by the first step after a pass."""

    def replaces(self, other: Mark) -> bool:
        """Whether to post this mark instead of an earlier one.

        Of the passes between two of its beats each rank posts the one whose number has most factors of two, so that
        different ranks often post the same.
        """
        return self.last or (self.passes & -self.passes) >= (other.passes & -other.passes)


class _Texts:
    """The texts of all ranks that one rank waits for."""

    def __init__(self, number: int, text: str, exchange: int) -> None:
        self.number = number
        self.text = text
        self.exchange = exchange
        self.said = False
        self.poll_s = _FIRST_POLL_S
        self.looked_s = time.monotonic()
        self.found: list[str] = []
        self.elsewhere: tuple[int, str] | None = None
        self.over = threading.Event()


def say_that_it_failed(store: dist.Store, place: str, rank: int, reason: str) -> None:
    """The last words of a rank that never had a heartbeat."""
    dist.PrefixStore(place, store).compare_set(_FAILURE, "", _record(rank, reason))


def _record(rank: int, reason: str) -> str:
    return json.dumps({"rank": rank, "reason": reason})


class Heartbeat:
    """Heartbeats and last words of one rank, and its knowledge of the others."""

    def __init__(
        self,
        connection: JobStore,
        place: str,
        rank: int,
        global_ranks: Sequence[int],
        timeout_s: float,
        *,
        guests: str = "guests",
    ) -> None:
        """Owns `connection` from now on.

        place: the prefix in the store for all ranks of this session. global_ranks: of its process group, in order.
        guests: a prefix in the store for such sessions of other process groups as go on beside this one, whose ranks
        need the store that rank 0 may host.
        """
        self.rank = rank
        self.world_size = len(global_ranks)
        self._is_rank_0 = global_ranks[rank] == 0
        self._is_guest = 0 not in global_ranks and not is_hosted_by_launcher()
        self._host_leaves = False
        """Rank 0 hosts the store for other groups too, and has said that it has detached."""
        self.status = "attaching"
        self.exchange = 0
        """The number of the last exchange this rank has begun."""
        # A thousand ranks must not flood the store: two hundred beats a second in all are plenty.
        self.period_s = max(0.5, self.world_size / 200)
        self._timeout_s = timeout_s
        self.group: dist.ProcessGroup | None = None
        """The groups to abort when an operation on a GPU is given up."""
        self._connection = connection
        self._store = connection.under(place)
        self._guests = connection.under(guests)
        self._wake = threading.Event()
        self._stopping = False
        self._answered_s = time.monotonic()
        self._store_gone = False
        self._failure: tuple[int, str] | None = None
        self._stayed = False
        self._last_words: str | None = None
        self._look = False
        self._looked = threading.Event()
        self._listened_s = 0.0
        self._deadlines: list[float] = []
        """Deadlines of current waits."""
        self._heard: dict[int, tuple[str, str]] = {}
        self._unchanged: dict[int, int] = {}
        """For each rank, the number of checks since its beat changed."""
        self._alive: set[int] = set()
        self._num_texts = 0
        self._texts: _Texts | None = None
        self._mark: Mark | None = None
        self._own_marks: deque[str] = deque()
        """Those in the store that this rank was the first to post."""
        self._watched: deque[tuple[float, str, torch.cuda.Event]] = deque()
        self.lost: CommunicationError | None = None
        """The error that ends all further communication, if there is one."""
        self._thread = threading.Thread(target=self._run, name="laconic-heartbeat", daemon=True)
        self._thread.start()

    # -- the thread that calls the store -------------------------------------------------------------------------

    def _run(self) -> None:
        beat = 0
        try:
            if self._is_guest:
                self._guests.add("here", 1)
            while True:
                stopping = self._stopping
                self._store.set(f"beat/{self.rank}", f"{beat}|{self.exchange}|{self.status}")
                if self._last_words is not None:
                    self._store.compare_set(_FAILURE, "", self._last_words)
                if self._failure is None and self._store.check([_FAILURE]):
                    record = json.loads(self._store.get(_FAILURE))
                    self._failure = (record["rank"], record["reason"])
                if self._is_guest:
                    self._host_leaves = self._guests.check(["host leaves"])
                if self._look or self._is_late():
                    # Not in each iteration: these may be much more frequent than heartbeats.
                    if time.monotonic() - self._listened_s >= 0.9 * self.period_s:
                        self._listened_s = time.monotonic()
                        self._listen()
                elif self._heard:
                    self._heard, self._unchanged, self._alive = {}, {}, set()
                if self._texts is not None:
                    self._gather(self._texts)
                if self._mark is not None:
                    mark, self._mark = self._mark, None
                    self._post(mark)
                self._answered_s = time.monotonic()
                self._looked.set()
                if stopping:
                    if self._is_guest:
                        self._guests.add("here", -1)
                    if self._is_rank_0:
                        self._see_others_off()
                    return
                beat += 1
                self._wake.wait(self.period_s if self._texts is None else self._texts.poll_s)
                self._wake.clear()
                self._watch_over()
        except RuntimeError:
            self._store_gone = True  # the connection is broken; the next wait that needs the store reports it
            self._looked.set()
        while not self._stopping:
            self._watch_over()
            self._wake.wait(self.period_s)
            self._wake.clear()
            self._looked.set()

    def _see_others_off(self) -> None:
        """Rank 0 often hosts the store, and leaves last if it can: the others may still have to read who failed.

        Also those of other groups, which end at other times: of a sharded model each shard has its own group.
        """
        if self._failure is None and self._last_words is None:
            self._guests.set("host leaves", "")
        beats = [f"beat/{rank}" for rank in range(1, self.world_size)]
        deadline_s = time.monotonic() + _LOOKS_AHEAD * self.period_s
        poll_s = _FIRST_POLL_S
        while not self._stayed and time.monotonic() < deadline_s and self._store.check(beats):
            left = all(beat.decode().split("|", 2)[2] == DETACHED for beat in self._store.multi_get(beats))
            if left and not self._guests.add("here", 0):
                return
            time.sleep(poll_s)
            poll_s = min(_LAST_POLL_S, 1.5 * poll_s)

    def _is_late(self) -> bool:
        """Whether a wait is about to be given up."""
        begin_s = time.monotonic() + _LOOKS_AHEAD * self.period_s
        watched = [began_s + self._timeout_s for began_s, _, _ in list(self._watched)[:1]]
        return any(deadline_s <= begin_s for deadline_s in (*self._deadlines, *watched))

    def _listen(self) -> None:
        for rank in range(self.world_size):
            if rank != self.rank:
                beat, _, status = self._hear(rank)
                self._unchanged[rank] = self._unchanged.get(rank, -1) + 1
                if rank in self._heard and beat != self._heard[rank][0]:
                    self._alive.add(rank)
                    self._unchanged[rank] = 0
                self._heard[rank] = (beat, status)

    def _hear(self, rank: int) -> tuple[str, int, str]:
        """A rank's last beat, the exchange it had begun by then, and its status."""
        if not self._store.check([f"beat/{rank}"]):
            return "", 0, _NOTHING
        beat, exchange, status = self._store.get(f"beat/{rank}").decode().split("|", 2)
        return beat, int(exchange), status

    def _gather(self, texts: _Texts) -> None:
        """Write this rank's text, and read those of the others."""
        keys = [f"texts/{texts.number}/{rank}" for rank in range(self.world_size)]
        if not texts.said:
            texts.said = True
            self._store.set(keys[self.rank], texts.text)
            if texts.number > 1:
                # All ranks have written the previous texts, so the ones before are no longer read.
                self._store.delete_key(f"texts/{texts.number - 2}/{self.rank}")
        if self._store.check(keys):
            texts.found = [value.decode() for value in self._store.multi_get(keys)]
        elif time.monotonic() - texts.looked_s >= self.period_s:
            texts.looked_s = time.monotonic()
            for rank, key in enumerate(keys):
                if rank != self.rank and not self._store.check([key]):
                    _, exchange, status = self._hear(rank)
                    # Checked again: it may have arrived, met all others and continued in between.
                    gone = exchange > texts.exchange or status in (DETACHING, DETACHED)
                    if gone and not self._store.check([key]):
                        texts.elsewhere = (rank, status)
                        break
        texts.poll_s = min(_LAST_POLL_S, 1.5 * texts.poll_s)
        if texts.found or texts.elsewhere is not None:
            self._texts = None
            texts.over.set()

    def _post(self, mark: Mark) -> None:
        """Post a mark, or compare it with that of the rank that was the first to post it."""
        key = f"steps/{mark.session}/{'last' if mark.last else mark.passes}"
        mine = (mark.step, self.rank)
        step, rank = map(int, self._store.compare_set(key, "", f"{mark.step}|{self.rank}").decode().split("|"))
        if rank == self.rank:
            self._own_marks.append(key)
            if len(self._own_marks) > _MARKS_KEPT:
                self._store.delete_key(self._own_marks.popleft())
        elif step != mark.step:
            (fewest, behind), (most, ahead) = sorted([(step, rank), mine])
            reason = left_out(mark.passes, behind, fewest, ahead, most)
            self.lost = CommunicationError(f"rank {behind} {reason}.")
            if self._failure is None and self._last_words is None:
                self._last_words = _record(behind, reason)
                self._wake.set()

    def _watch_over(self) -> None:
        """Watch operations on a GPU, for which the host does not wait."""
        try:
            while self._watched and self._watched[0][2].query():
                self._watched.popleft()
        except RuntimeError as exc:
            # Not an error of the store: the device itself has failed, and every later call fails as well.
            operation = self._watched[0][1]
            self._watched.clear()
            problem = f"failed on the device: {one_line(exc)}"
            self.lost = CommunicationError(f"{operation} on rank {self.rank}, or work before it, {problem}.")
            if self._failure is None and self._last_words is None:
                self._last_words = _record(self.rank, f"{problem} ({operation})")
                self._wake.set()
            _LOG.error("%s", self.lost)
        if not self._watched or self.lost is not None:
            return
        began_s, operation, _ = self._watched[0]
        late = time.monotonic() - began_s >= self._timeout_s
        if late or self._failure is not None:
            # In another thread, because finding the rank to blame needs this one.
            threading.Thread(target=self._give_up, args=(operation,), name="laconic-watch", daemon=True).start()
            self._watched.clear()

    def _give_up(self, operation: str) -> None:
        self.lost = self.explain(operation, f"did not finish in {self._timeout_s:g} s", timed_out=True)
        _LOG.error("%s", self.lost)
        # Ends the operation, so that a host that waits for the device continues and gets the error.
        if self.group is not None:
            self.group.abort()

    # -- called by other threads --------------------------------------------------------------------------------

    def watch(self, operation: str, finished: torch.cuda.Event) -> None:
        """Watch an operation that the host does not wait for: name the rank that blocks it at the timeout."""
        self._watched.append((time.monotonic(), operation, finished))

    def stop(self) -> None:
        """Stop beating; the last status stays readable."""
        self.status = DETACHED
        self._stopping = True
        self._wake.set()
        if self._store_answers():
            self._thread.join(timeout=2 + _LOOKS_AHEAD * self.period_s)
        if self._thread.is_alive():
            self._connection.cut()
            self._thread.join(timeout=2)
        self._connection.close()

    def compare_steps(self, mark: Mark) -> None:
        """Compare a mark with those of other ranks, the last one here, others at the next beat."""
        before = self._mark
        if before is None or mark.replaces(before):
            self._mark = mark
        if mark.last:
            while self._mark is not None and not self._store_gone and self._beat_at_once():
                pass
            if not self._store_gone:
                self._beat_at_once()  # the beat that took the mark has ended
            if self.lost is not None:
                raise self.lost

    def _beat_at_once(self) -> bool:
        self._wake.set()
        return self._next_look()

    def gather_texts(self, text: str, *, what: str, exchange: int, advice: str) -> list[str]:
        texts, self._num_texts = _Texts(self._num_texts, text, exchange), self._num_texts + 1
        self._texts = texts
        self._wake.set()
        deadline_s = time.monotonic() + self._timeout_s
        with self.waiting_until(deadline_s):
            while not texts.over.wait(self.period_s):
                self._check(what, needs_store=True)
                if time.monotonic() >= deadline_s:
                    self._texts = None
                    raise self.explain(what, f"did not finish in {self._timeout_s:g} s", timed_out=True)
        if texts.elsewhere is not None:
            problem = will_not_come(what, *texts.elsewhere, advice)
            self.fail(self.rank, problem)
            raise CommunicationError(f"rank {self.rank} {problem}.")
        return texts.found

    @contextmanager
    def waiting_until(self, deadline_s: float) -> Iterator[None]:
        """Inside, this rank waits for others until a deadline; shortly before that it begins to watch them."""
        self._deadlines.append(deadline_s)
        try:
            yield
        finally:
            self._deadlines.remove(deadline_s)

    def wait_for(self, event: threading.Event, what: str, *, heard_s: Callable[[], float]) -> None:
        ended = False
        while not ended:
            deadline_s = heard_s() + self._timeout_s
            if time.monotonic() >= deadline_s:
                raise self.explain(what, f"did not finish in {self._timeout_s:g} s", timed_out=True)
            with self.waiting_until(deadline_s):
                ended = event.wait(min(self.period_s, max(0.0, deadline_s - time.monotonic())))
            if not ended:
                self.check(what)

    def in_time(self, call: Callable[[], _T], what: str) -> _T:
        """The result of a call that waits for other ranks; if it fails or is late, an error names the one to blame.

        The call is made in another thread, which is abandoned if it does not return.
        """
        try:
            with self.waiting_until(time.monotonic() + self._timeout_s):
                return in_time(
                    call,
                    timeout_s=self._timeout_s,
                    thread_name="laconic-store",
                    look=lambda: self._check(what, needs_store=True),
                )
        except TimeoutError as exc:
            raise self.explain(what, f"did not finish in {self._timeout_s:g} s", timed_out=True) from exc
        except RuntimeError as exc:
            raise self.explain(what, one_line(exc)) from exc

    def fail(self, rank: int, reason: str) -> None:
        """Record that `rank` has failed; the first record wins. Returns once others can read it or the store blocks."""
        if self._failure is None and self._last_words is None:
            self._last_words = _record(rank, reason)
            self._wake.set()
            self._next_look()
            self._stay()

    def _stay(self) -> None:
        """Rank 0 often hosts the store: it waits, once, until the others have read who failed and why."""
        if self._is_rank_0 and not self._stayed:
            self._stayed = True
            time.sleep(1.5 * self.period_s)

    def check(self, operation: str) -> None:
        """Raise PeerLost if some rank is known to have failed.

        A store that has ended means that its host has failed, unless that is rank 0, has its session in another group,
        and had detached: operations among the ranks of this group need no store.
        """
        self._check(operation, needs_store=not self._host_leaves)

    def _check(self, operation: str, *, needs_store: bool) -> None:
        if self._failure is not None:
            self._stay()
            rank, reason = self._failure
            raise PeerLost(f"{operation} on rank {self.rank} cannot finish: rank {rank} {reason}.", rank=rank)
        if self._store_gone and needs_store:
            raise self._no_store(operation, "is gone")

    def explain(self, operation: str, cause: str, *, timed_out: bool = False) -> CommunicationError:
        """Find the rank to blame for a failed wait, announce it to the others, and make the error."""
        try:
            rank = self.silent_rank(operation)
        except PeerLost as lost:
            return lost
        if rank is not None:
            status = self._heard[rank][1]
            reason = _WHY_SILENT.get(status, f'stopped answering; it last said "{status}"')
            self.fail(rank, reason)
            return PeerLost(f"{operation} on rank {self.rank} cannot finish: rank {rank} {reason}.", rank=rank)
        said = ", ".join(f'rank {rank} says "{status}"' for rank, (_, status) in sorted(self._heard.items()))
        said = one_line(said, 400) or "the job's rank 0 has ended, and with it the store that tells what others do"
        # With the observations: this rank only gave up first, another one is to blame.
        self.fail(self.rank, f"gave up: {operation} {cause}; {said}")
        return CommunicationError(f"{operation} {'' if timed_out else 'failed '}on rank {self.rank}: {cause}; {said}.")

    def silent_rank(self, operation: str) -> int | None:
        """The rank that has stopped answering, if one is known; raises PeerLost if one is known to have failed.

        Takes a few beats, unless a wait near its deadline has already made this rank watch the others.
        """
        self._look = True
        try:
            while True:
                self.check(operation)
                if self._store_gone:
                    return None
                silent = [rank for rank, looks in sorted(self._unchanged.items()) if looks >= _LOOKS]
                if silent:
                    # A detached rank is not to blame, unless there is no other.
                    return min(silent, key=lambda rank: (self._heard[rank][1] == DETACHED, rank))
                if len(self._alive) == self.world_size - 1:
                    return None
                if not self._next_look():
                    raise self._no_store(operation, "does not answer")
        finally:
            self._look = False

    def _next_look(self) -> bool:
        """Wait until the thread has made one more iteration; False if a call to the store blocks it."""
        self._looked.clear()
        if threading.current_thread() is not self._thread and self._store_answers():
            self._looked.wait(4 * self.period_s)
        return self._looked.is_set() or self._store_answers()

    def _store_answers(self) -> bool:
        """Whether the thread's calls to the store have returned recently."""
        return time.monotonic() - self._answered_s < 4 * self.period_s

    def _no_store(self, operation: str, state: str) -> PeerLost:
        return PeerLost(
            f"{operation} on rank {self.rank} cannot finish: rank 0 or the launcher, which hosts the job's store, "
            f"{state}."
        )
