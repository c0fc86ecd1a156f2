"""The process that decides on membership: it reads messages of workers and agents, and writes views and news."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from laconic.errors import LaconicError, one_line
from laconic.membership.decisions import Action, Decisions, Over, Publish, Refuse
from laconic.membership.view import (
    KEEPER,
    Ask,
    Beat,
    Broken,
    Ended,
    Left,
    Message,
    News,
    Raised,
    Ready,
    Stop,
    View,
    message_of,
    news_queue,
    to_text,
)

ENDED = "ended"
"""The key under which the store says why the job was given up, for agents of other hosts."""
_FOREVER = timedelta(days=365)
_RAISED_S = 5.0
"""How long the error of a rank waits until its process has ended, or another one of its replica, its cause."""


class Keeper:
    """Runs Decisions on a thread of its own, in the process that hosts the job's store."""

    def __init__(
        self,
        address: tuple[str, int],
        decisions: Decisions,
        *,
        silent_s: float,
        on_view: Callable[[View], None] = lambda view: None,
        on_end: Callable[[str], None] = lambda why: None,
        on_over: Callable[[], None] = lambda: None,
    ) -> None:
        """silent_s: an agent without a heartbeat for this long counts as dead, with all its workers."""
        self._address = address
        self._store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=_FOREVER)
        self._decisions = decisions
        self._silent_s = silent_s
        self._on_view = on_view
        self._on_end = on_end
        self._on_over = on_over
        self._waiting: dict[str, int] = {}
        self._agents: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._silent: set[str] = set()
        self._looked_s = time.monotonic()
        self._raised: dict[str, tuple[float, list[Raised]]] = {}
        """By replica, if it has several ranks: their errors, and the time at which the first of these counts."""
        self._thread = threading.Thread(target=self._run, name="laconic-keeper", daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        """Whether some worker has completed training."""
        return self._decisions.finished

    @property
    def view(self) -> View | None:
        """The last view that was made."""
        return self._decisions.view

    def has_left(self, worker: str) -> bool:
        """Whether this worker has left in an orderly way."""
        return self._decisions.has_left(worker)

    def was_silent(self, worker: str) -> bool:
        """Whether this worker was counted as dead because its host said nothing."""
        return worker in self._silent

    def _run(self) -> None:
        try:
            self._keep()
        except Exception as exc:
            # No other process may decide instead, so the job is over; the launcher ends the workers.
            self._on_end(f"the keeper of the views failed: {type(exc).__name__}: {one_line(exc)}")
            raise

    def _keep(self) -> None:
        while True:
            message = message_of(self._store.queue_pop(KEEPER))
            if isinstance(message, Stop):
                return
            self._carry_out(self._take(message))
            self._carry_out(self._look_for_silence())
            self._carry_out(self._look_for_errors())
            if self._decisions.view is not None:
                missing = ", ".join(self._decisions.missing())
                self._store.set(f"missing/{self._decisions.view.number + 1}", missing)

    def _take(self, message: Message) -> Sequence[Action]:
        rules = self._decisions
        match message:
            case Ready():
                self._waiting[message.worker] = message.turn
                actions = rules.ready(message)
            case Ask():
                if message.fresh:
                    self._waiting[message.worker] = message.turn
                actions = rules.asked(message)
            case Left():
                actions = rules.left(message.worker, finished=message.finished)
            case Broken():
                actions = rules.broken(message)
            case Raised():
                if rules.shares_a_replica(message.worker):
                    replica, due_s = rules.replica_of(message.worker), time.monotonic() + _RAISED_S
                    self._raised.setdefault(replica, (due_s, []))[1].append(message)
                    return []
                actions = rules.raised(message.worker, message.error)
            case Ended():
                self._waiting.pop(message.worker, None)
                _, errors = self._raised.get(rules.replica_of(message.worker), (0.0, list[Raised]()))
                # The agent has said before if another rank of the replica was killed: then this changes nothing.
                counts = any(raised.worker == message.worker for raised in errors)
                actions = rules.raised(errors[0].worker, errors[0].error) if counts else []
                actions += rules.gone(message.worker, message.how)
                self._raised.pop(rules.replica_of(message.worker), None)
            case Beat():
                self._agents[message.agent] = (time.monotonic(), message.workers)
                actions = []
            case _:
                raise LaconicError(f"the keeper does not know {type(message).__name__} messages.")
        return actions

    def _look_for_silence(self) -> list[Action]:
        """Count workers of silent agents as gone; every heartbeat of another agent runs this check."""
        actions: list[Action] = []
        now_s = time.monotonic()
        slept, self._looked_s = now_s - self._looked_s > self._silent_s / 2, now_s
        if slept:
            # This process itself was stopped, and has not read the messages sent meanwhile.
            self._agents = {agent: (now_s, workers) for agent, (_, workers) in self._agents.items()}
        for agent, (heard_s, workers) in list(self._agents.items()):
            if now_s - heard_s > self._silent_s:
                del self._agents[agent]
                self._silent.update(workers)
                for worker in workers:
                    actions += self._decisions.gone(worker, f"is on a host that said nothing for {self._silent_s:g} s")
        return actions

    def _look_for_errors(self) -> list[Action]:
        """The errors that were not caused by the death of another rank of the replica."""
        now_s, actions = time.monotonic(), list[Action]()
        for replica, (due_s, errors) in list(self._raised.items()):
            if now_s >= due_s:
                del self._raised[replica]
                actions += self._decisions.raised(errors[0].worker, errors[0].error)
        return actions

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case News():
                    self._tell(action)
                case Publish():
                    view = action.view
                    for worker, turn in action.turns.items():
                        self._waiting.pop(worker, None)
                        self._store.set(f"admitted/{worker}/{turn}", to_text(view))
                    self._store.set(f"view/{view.number}", to_text(view))
                    self._on_view(view)
                case Refuse():
                    turn = self._waiting.pop(action.worker, 0)
                    news = News(view=-1, kind="refused", why=action.why)
                    self._store.set(f"admitted/{action.worker}/{turn}", to_text(news))
                case Over():
                    self._answer_waiting(News(view=-1, kind="over"))
                    self._on_over()
                case _:
                    self._end(action.why)

    def _end(self, why: str) -> None:
        number = -1 if self._decisions.view is None else self._decisions.view.number
        news = News(view=number, kind="end", why=why)
        self._store.set(ENDED, why)
        # A worker that waits for the next view, or to be admitted, finds this instead.
        self._store.set(f"view/{number + 1}", to_text(news))
        self._answer_waiting(news)
        self._tell(news)
        self._on_end(why)

    def _answer_waiting(self, news: News) -> None:
        for worker, turn in self._waiting.items():
            self._store.set(f"admitted/{worker}/{turn}", to_text(news))
        self._waiting.clear()

    def _tell(self, news: News) -> None:
        for worker in self._decisions.view.members if self._decisions.view is not None else ():
            self._store.queue_push(news_queue(worker), to_text(news))

    def stop(self) -> None:
        """End the thread."""
        # Over a connection of its own: the thread waits on the other one.
        store = dist.TCPStore(*self._address, is_master=False, wait_for_workers=False)
        store.queue_push(KEEPER, to_text(Stop()))
        self._thread.join(timeout=5)
