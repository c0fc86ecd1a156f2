"""The members of the next view, and the units that count as done: pure rules, without a store, a clock or a process.

A unit is done if every survivor of its view has prepared it. A member completes a unit only when it knows that all
members have prepared it. So a unit that one member has completed is done for all, even if that member has died since:
no two views complete the same unit with different results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Literal

from laconic.membership.view import Ask, Broken, News, Ready, Seat, View

OnError = Literal["end", "replace"]
_MOST_BARREN = 5
"""Consecutive views of the same members without a finished unit, after which the job is given up."""


@dataclass(frozen=True)
class Publish:
    """Publish a view."""

    view: View
    turns: dict[str, int]
    """The turn of each worker that waits to be admitted."""


@dataclass(frozen=True)
class Give:
    """Give up: there is no further view."""

    why: str


@dataclass(frozen=True)
class Refuse:
    """A worker that waits is not admitted."""

    worker: str
    why: str


@dataclass(frozen=True)
class Over:
    """Training is complete: no further worker is admitted."""


Action = Publish | News | Give | Refuse | Over


class Decisions:
    """The state of all workers, and the decisions that follow. Every method returns the actions to take now."""

    def __init__(
        self, *, first: int, min_ranks: int, max_ranks: int, ranks_per_replica: int = 1, on_error: OnError = "end"
    ) -> None:
        """first: the number of replicas in the first view. min_ranks, max_ranks: limits of the number of replicas.

        on_error: what becomes of the job when the script of a worker raises an error.
        """
        self._first = first
        self._per_replica = ranks_per_replica
        self._on_error: OnError = on_error
        self._min = min_ranks
        self._max = max_ranks
        self.view: View | None = None
        self._seats: dict[str, Seat] = {}
        """The seat of every worker that has ever been ready."""
        self._gone: set[str] = set()
        """Replicas of which a worker is gone; the others of such a replica are no longer listened to."""
        self._left: set[str] = set()
        """Workers that have left in an orderly way."""
        self._waiting: dict[str, int] = {}
        """Workers that are ready, in order of arrival, with their turns."""
        self._alive: list[str] = []
        self._lost: list[str] = []
        self._asks: dict[str, Ask] = {}
        self._down = False
        self._changing = False
        self._finished = False
        self._over = False
        self._barren = 0
        self._why = ""

    @property
    def finished(self) -> bool:
        """Whether some worker has completed training."""
        return self._finished

    def has_left(self, worker: str) -> bool:
        """Whether this worker has left in an orderly way."""
        return worker in self._left

    def missing(self) -> list[str]:
        """Members of the current view that have not asked for the next one."""
        return [name for name in self._alive if name not in self._asks]

    # -- inputs --------------------------------------------------------------------------------------------------

    def ready(self, ready: Ready) -> list[Action]:
        """A worker wants to be a member."""
        if ready.ranks_per_replica != self._per_replica:
            return [
                Refuse(
                    ready.worker,
                    f"its replica has {ready.ranks_per_replica} ranks, those of this job have {self._per_replica}. "
                    f"Start it with laconic run --ranks-per-replica {self._per_replica}",
                )
            ]
        seat = self._seats[ready.worker] = Seat(ready.replica or ready.worker, ready.position)
        if seat.replica in self._gone:
            return []
        self._min, self._max = max(self._min, ready.min_ranks), min(self._max, ready.max_ranks)
        self._waiting[ready.worker] = ready.turn
        return self._next()

    def asked(self, ask: Ask) -> list[Action]:
        """A member asks for the next view."""
        if self.view is None or ask.view != self.view.number or ask.worker not in self._alive:
            return []  # it was counted as dead and is not admitted again
        self._asks[ask.worker] = ask
        actions: list[Action] = [] if ask.boundary else self._take_down(ask.why)
        return actions + self._next()

    def broken(self, broken: Broken) -> list[Action]:
        """A member cannot go on in its view: no other one may wait in it any longer."""
        if self.view is None or broken.view != self.view.number or broken.worker not in self._alive:
            return []
        return self._take_down(broken.why)

    def gone(self, worker: str, how: str) -> list[Action]:
        """The process of a worker has ended, or its host is silent; its replica is gone with it."""
        if worker in self._left:
            return self._next()
        replica = self._seat(worker).replica
        self._gone.add(replica)
        for name in [name for name in self._waiting if self._seat(name).replica == replica]:
            del self._waiting[name]
        lost = [name for name in self._alive if self._seat(name).replica == replica]
        if not lost:
            return self._next()
        self._alive = [name for name in self._alive if name not in lost]
        for name in lost:
            self._asks.pop(name, None)
        self._lost += lost
        actions = self._take_down(f"worker {worker} {how}")
        # The cause; its symptom, a broken connection, may have been reported before.
        first = len(self._lost) == len(lost)
        self._why = f"worker {worker} {how}" if first else f"{self._why}, worker {worker} {how}"
        return actions + self._next()

    def is_gone(self, worker: str) -> bool:
        """Whether the replica of this worker is no longer listened to."""
        return self._seat(worker).replica in self._gone

    def shares_a_replica(self, worker: str) -> bool:
        """Whether there are other workers of this one's replica."""
        return self._per_replica > 1 and worker in self._seats

    def replica_of(self, worker: str) -> str:
        """The name of this worker's replica."""
        return self._seat(worker).replica

    def _seat(self, worker: str) -> Seat:
        return self._seats.get(worker, Seat(worker, 0))

    def left(self, worker: str, *, finished: bool) -> list[Action]:
        """A worker has left in an orderly way."""
        self._left.add(worker)
        # Also once all have left because they were asked to end.
        self._finished |= finished or self._alive == [worker]
        self._waiting.pop(worker, None)
        if self.view is None or worker not in self._alive:
            return self._next()
        self._alive.remove(worker)
        self._asks.pop(worker, None)
        # After its hand-over the view goes on: the others are about to ask for one without it.
        actions = [] if worker in self.view.leaving else self._take_down(f"worker {worker} has left")
        return actions + self._next()

    def raised(self, worker: str, error: str) -> list[Action]:
        """The script of a worker has raised an error: the job ends, or goes on without the worker and its replica."""
        if self.is_gone(worker):
            return []
        if self._on_error == "replace":
            return self.gone(worker, f"raised {error}")
        return self._give(f"worker {worker} raised {error}")

    def give(self, why: str) -> list[Action]:
        """End the job for another reason."""
        return self._give(why)

    # -- decisions -----------------------------------------------------------------------------------------------

    def _take_down(self, why: str) -> list[Action]:
        if self._down or self.view is None or self._over:
            return []
        self._down, self._why = True, why
        return [News(view=self.view.number, kind="down", why=why)]

    def _give(self, why: str) -> list[Action]:
        if self._over:
            return []
        self._over = True
        return [Give(why)]

    def _next(self) -> list[Action]:
        if self._over:
            return [Over()] if self._finished and self._waiting else []
        if self.view is None:
            begins = self._num_replicas(self._ready_to_join()) >= self._first
            return self._publish([], self._ready_to_join(), 0, boundary=True) if begins else []
        if not self._alive:
            if self._finished:
                self._over = True
                return [Over()]
            return self._give(f"every rank that had the state of training is gone; the last: {self._why}")
        if any(name not in self._asks for name in self._alive):
            return self._let_join()
        return self._decide(self.view)

    @property
    def _noun(self) -> str:
        return "replicas" if self._per_replica > 1 else "ranks"

    def _num_replicas(self, workers: Sequence[str]) -> int:
        return len({self._seat(name).replica for name in workers})

    def _ready_to_join(self, most: int | None = None) -> list[str]:
        """The waiting workers of whole replicas, replica by replica; `most`: the number of replicas, if limited."""
        waiting: dict[str, list[str]] = {}
        for name in self._waiting:
            waiting.setdefault(self._seat(name).replica, []).append(name)
        whole = [names for names in waiting.values() if len(names) == self._per_replica][:most]
        return [name for names in whole for name in sorted(names, key=lambda one: self._seat(one).position)]

    def _let_join(self) -> list[Action]:
        """Announce to members, once, that others want to join, if there is room and no change is in progress."""
        if self._down or self._changing or self._asks or self._finished or self.view is None:
            return []
        if not self._ready_to_join() or self._num_replicas(self._alive) >= self._max:
            return []
        self._changing = True
        return [News(view=self.view.number, kind="change", why="others want to join")]

    def _decide(self, view: View) -> list[Action]:
        """Decide on the next view: all members that are alive have asked for it."""
        asks = [self._asks[name] for name in self._alive]
        fresh = [ask for ask in asks if ask.fresh]
        held = [ask for ask in asks if not ask.fresh]
        for ask in fresh:
            self._waiting[ask.worker] = ask.turn
        if not held:
            if not set(view.members) <= set(view.fresh):
                return self._give(f"every rank that had the state of training is gone; {self._why}")
            # The first view broke before training had begun: start again with the remaining workers.
            return self._publish([], self._ready_to_join(), 0, boundary=True)
        units = units_done(held)
        boundary = all(ask.boundary and ask.unit == units for ask in held)
        names = [ask.worker for ask in held]
        going = {self._seat(ask.worker).replica for ask in held if ask.leaving} if boundary else set[str]()
        leaving = [name for name in names if self._seat(name).replica in going]
        room = max(0, self._max - self._num_replicas(names))
        joining = self._ready_to_join(room) if boundary and not leaving else []
        left = self._num_replicas(names)
        if left + self._num_replicas(joining) < self._min and not self._finished:
            return self._give(
                f"{left} of at least {self._min} {self._noun} are left ({self._why}). Start it again from a "
                "checkpoint, or allow fewer with min_ranks"
            )
        same = names == list(view.members) and not joining and not leaving
        self._barren = self._barren + 1 if same and units == view.units else 0
        if self._barren >= _MOST_BARREN:
            return self._give(
                f"{_MOST_BARREN} consecutive views of the same ranks broke without a step; the last: {self._why}"
            )
        ahead = [ask for ask in held if ask.unit == units]
        # If no survivor has completed the vote, only the survivors' own flags are known.
        flags = ahead[0].flags if ahead else f"{reduce(or_, (int(ask.own_flags, 16) for ask in held)):x}"
        begun = any(not ask.inside for ask in ahead)
        return self._publish(names, joining, units, boundary=boundary, ahead=begun, leaving=leaving, flags=flags)

    def _publish(
        self,
        names: Sequence[str],
        joining: Sequence[str],
        units: int,
        *,
        boundary: bool,
        ahead: bool = False,
        leaving: Sequence[str] = (),
        flags: str = "0",
    ) -> list[Action]:
        room = max(0, self._max - self._num_replicas(names))
        fresh = [name for name in joining if name in self._ready_to_join(room)]
        members = [*names, *fresh]
        count = self._num_replicas(members)
        if count < self._min and not self._finished:
            why = f" ({self._why})" if self._why else ""
            return self._give(f"{count} of at least {self._min} {self._noun} are there{why}")
        self.view = View(
            number=0 if self.view is None else self.view.number + 1,
            members=tuple(members),
            seats=tuple(map(self._seat, members)) if self._per_replica > 1 else (),
            fresh=tuple(fresh),
            units=units,
            boundary=boundary,
            ahead=ahead,
            leaving=tuple(leaving),
            lost=tuple(self._lost),
            flags=flags,
            why=self._why,
        )
        turns = {name: self._waiting.pop(name) for name in fresh}
        self._alive, self._lost, self._asks = members, [], {}
        self._down = self._changing = False
        self._why = ""
        return [Publish(self.view, turns), *self._next()]


def units_done(asks: Sequence[Ask]) -> int:
    """The number of units that are done, from the survivors' reports: a unit that all have prepared is done."""
    most = max(ask.unit for ask in asks)
    behind = [ask for ask in asks if ask.unit < most]
    for ask in behind:
        prepared = ask.unit == most - 1 and ask.prepared
        assert prepared, f"worker {ask.worker} is behind and has not prepared: {asks}"
    if behind:
        return most
    return most + all(ask.prepared for ask in asks)
