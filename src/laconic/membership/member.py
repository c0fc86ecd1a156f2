"""A worker's side of the membership: it asks for views, and is notified at once when its view is over."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta

from laconic.core.job_store import JobStore, in_time
from laconic.errors import AttachError, CommunicationError, PeerLost, one_line
from laconic.membership.view import (
    KEEPER,
    Ask,
    Broken,
    Left,
    Message,
    News,
    Raised,
    Ready,
    View,
    news_of,
    news_queue,
    to_text,
    view_of,
)

STORE_VARIABLE, WORKER_VARIABLE = "LACONIC_STORE", "LACONIC_WORKER"
"""Environment variables that `laconic run` sets for a worker: the address of the store, host:port, and its own name."""
REPLICA_VARIABLE = "LACONIC_REPLICA"
"""The name of the worker's replica, if that has several ranks: RANK and WORLD_SIZE are then those inside it."""
_FOREVER_S = 365 * 86400.0
_CONNECT_S = 30.0


def is_started_by_laconic(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a worker of `laconic run`."""
    return STORE_VARIABLE in environment and WORKER_VARIABLE in environment


def ranks_per_replica(environment: Mapping[str, str] = os.environ) -> int:
    """The number of ranks that hold one copy of the model together, in an elastic job."""
    return _replica(environment)[2]


def _replica(environment: Mapping[str, str]) -> tuple[str, int, int]:
    """The name of this worker's replica, the worker's position there and the number of workers."""
    if REPLICA_VARIABLE not in environment:
        return environment[WORKER_VARIABLE], 0, 1
    return environment[REPLICA_VARIABLE], int(environment["RANK"]), int(environment["WORLD_SIZE"])


class Member:
    """This process as a worker of an elastic job."""

    def __init__(self, *, timeout_s: float, environment: Mapping[str, str] = os.environ) -> None:
        host, _, port = environment[STORE_VARIABLE].rpartition(":")
        if not host or not port.isdigit():
            raise AttachError(f"{STORE_VARIABLE} must be host:port, got {environment[STORE_VARIABLE]!r}.")
        self.name = environment[WORKER_VARIABLE]
        self._replica, self._position, self.ranks_per_replica = _replica(environment)
        self.address = (host, int(port))
        self.timeout_s = timeout_s
        self.lost: CommunicationError | None = None
        """Why there will be no further view, once that is known."""
        self._over: dict[int, str] = {}
        self._changing: set[int] = set()
        self._cuts: dict[int, list[Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self._turn = 0
        self.closed = False
        """Whether this worker has left the job."""
        try:
            self._questions = JobStore(timeout_s=_CONNECT_S, address=self.address)
            self._messages = JobStore(timeout_s=_CONNECT_S, address=self.address)
            self._listening = JobStore(timeout_s=_CONNECT_S, address=self.address)
        except (RuntimeError, TimeoutError) as exc:
            raise self._no_store(exc) from exc
        self._listening.store.set_timeout(timedelta(seconds=_FOREVER_S))
        self._listener = threading.Thread(target=self._listen, name="laconic-news", daemon=True)
        self._listener.start()

    # -- views ---------------------------------------------------------------------------------------------------

    def ready(self, *, min_ranks: int, max_ranks: int) -> View:
        """Announce that this worker is ready; returns when it is a member."""
        store = self._questions.store
        if in_time(lambda: store.check([self._admission]), timeout_s=_CONNECT_S, thread_name="laconic-view"):
            raise AttachError(
                "this process has been in an elastic session already, and the job ends with that session. Train in one "
                "session, or start each part of the training with a laconic run of its own."
            )
        self._say(
            Ready(
                worker=self.name,
                turn=self._turn,
                replica=self._replica,
                position=self._position,
                ranks_per_replica=self.ranks_per_replica,
                min_ranks=min_ranks,
                max_ranks=max_ranks,
            )
        )
        return self._admitted()

    def next_view(self, ask: Ask) -> View:
        """Leave a view; returns the next view that has this worker as a member."""
        self._say(ask)
        if ask.fresh:
            return self._admitted()
        return self._view(f"view/{ask.view + 1}", self.timeout_s, ask)

    @property
    def turn(self) -> int:
        """How often this worker has been admitted."""
        return self._turn

    @property
    def _admission(self) -> str:
        """The key under which the store has the view that admits this worker next."""
        return f"admitted/{self.name}/{self._turn}"

    def _admitted(self) -> View:
        # No timeout: a worker is admitted when the others have finished their current unit, however long that takes.
        view = self._view(self._admission, _FOREVER_S, None)
        self._turn += 1
        return view

    def _view(self, key: str, limit_s: float, ask: Ask | None) -> View:
        store = self._questions.store
        store.set_timeout(timedelta(seconds=limit_s))
        try:
            found = view_of(in_time(lambda: store.get(key), timeout_s=limit_s + 5, thread_name="laconic-view"))
        except (RuntimeError, TimeoutError) as exc:
            raise self._no_view(ask, limit_s, exc) from exc
        if isinstance(found, News) and found.kind == "over":
            self.close()
            raise SystemExit(0)  # training was complete before this worker could join
        if isinstance(found, News) and found.kind == "refused":
            raise AttachError(f"this worker is not admitted: {found.why}.")
        if isinstance(found, News):
            self.lost = PeerLost(f"the job has ended: {found.why}.")
            raise self.lost
        if self.name not in found.members:
            self.lost = PeerLost(
                f"this worker, {self.name}, is no member of view {found.number}: the others took it for dead "
                f"({found.why})."
            )
            raise self.lost
        return found

    def _no_view(self, ask: Ask | None, limit_s: float, exc: Exception) -> CommunicationError:
        if self.lost is not None:
            return self.lost
        if "timeout" not in str(exc).lower() and not isinstance(exc, TimeoutError):
            return self._no_store(exc)
        missing = ""
        if ask is not None:
            store = self._messages.store
            missing = in_time(lambda: store.get(f"missing/{ask.view + 1}"), timeout_s=5, thread_name="laconic-view")
            missing = f": worker {bytes(missing).decode()} did not ask for it"
        return CommunicationError(
            f"no new view in {limit_s:g} s{missing}. All members must come to the same exchange; give attach a larger "
            "timeout_s if a step takes longer."
        )

    # -- news ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                news = news_of(self._listening.store.queue_pop(news_queue(self.name)))
            except RuntimeError as exc:
                if not self.closed:
                    self.lost = self._no_store(exc)
                    self._cut_all()
                return
            if news.kind == "closed":
                return
            if news.kind == "change":
                self._changing.add(news.view)
            elif news.kind == "end":
                self.lost = PeerLost(f"the job has ended: {news.why}.")
                self._cut_all()
            else:
                self.give_up(news.view, news.why)

    def give_up(self, view: int, why: str) -> None:
        """A view is over: end every wait in it."""
        with self._lock:
            self._over.setdefault(view, why)
            cuts = self._cuts.pop(view, [])
        for cut in cuts:
            cut()

    def _cut_all(self) -> None:
        for view in list(self._cuts):
            self.give_up(view, str(self.lost))

    def call_when_over(self, view: int, cut: Callable[[], None]) -> None:
        """Call `cut` when this view is over; at once if it is already."""
        with self._lock:
            over = view in self._over or self.lost is not None
            if not over:
                self._cuts.setdefault(view, []).append(cut)
        if over:
            cut()

    def why_over(self, view: int) -> str | None:
        """Why a view is over; None while it is not."""
        return self._over.get(view, str(self.lost) if self.lost is not None else None)

    def wants_change(self, view: int) -> bool:
        """Whether others want to join this view."""
        return view in self._changing

    # -- the end -------------------------------------------------------------------------------------------------

    def leave(self, *, finished: bool) -> None:
        """Announce that this worker leaves."""
        self._say(Left(worker=self.name, finished=finished))

    def broken(self, view: int, why: str) -> None:
        """Report that this worker cannot go on in a view."""
        self._say(Broken(worker=self.name, view=view, why=why))

    def raised(self, error: str) -> None:
        """Report why this worker cannot continue."""
        self._say(Raised(worker=self.name, error=error))

    def close(self) -> None:
        """Close the connection to the store; closing twice is fine."""
        if self.closed:
            return
        self.closed = True
        store = self._messages.store
        farewell = to_text(News(view=-1, kind="closed"))
        with suppress(RuntimeError, TimeoutError):  # the store is gone, so there is nothing to listen to
            in_time(
                lambda: store.queue_push(news_queue(self.name), farewell), timeout_s=2, thread_name="laconic-message"
            )
            self._listener.join(timeout=2)
        for connection in (self._listening, self._questions, self._messages):
            connection.cut()

    def _say(self, message: Message) -> None:
        store = self._messages.store
        try:
            in_time(
                lambda: store.queue_push(KEEPER, to_text(message)), timeout_s=_CONNECT_S, thread_name="laconic-message"
            )
        except (RuntimeError, TimeoutError) as exc:
            raise self._no_store(exc) from exc

    def _no_store(self, exc: Exception) -> PeerLost:
        host, port = self.address
        return PeerLost(
            f"the launcher, which holds the job's store at {host}:{port}, is gone ({one_line(exc, 120)}). Start the "
            "job again from a checkpoint."
        )
