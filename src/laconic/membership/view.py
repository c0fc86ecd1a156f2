"""The messages between workers and the keeper of the views: plain records, as JSON in the job's store.

queue "keeper"             workers and agents -> keeper: Ready, Ask, Broken, Left, Raised, Ended, Beat
view/<number>              keeper -> members of the previous view: the next View, or why there is none
admitted/<worker>/<turn>   keeper -> a worker that is ready: the first view it is in, or why it is not admitted
queue "news/<worker>"      keeper -> a member: News
missing/<number>           keeper -> workers waiting for that view: the workers that have not asked for it yet

A worker is one rank. A replica, one copy of the model, is on one worker or, if the model is sharded, on several workers
of one host, which are members together or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

from laconic.errors import CommunicationError, LaconicError, one_line

KEEPER = "keeper"
"""The queue of messages to the keeper."""


def news_queue(worker: str) -> str:
    """The queue of news for a worker."""
    return f"news/{worker}"


class ViewBroken(CommunicationError):
    """The view is over: a member died or left, or a connection between two members broke."""


class Seat(NamedTuple):
    """The place of a worker in a replica."""

    replica: str
    position: int


@dataclass(frozen=True, kw_only=True)
class View:
    """The ranks that train together between two changes."""

    number: int
    members: tuple[str, ...]
    """Names of the workers, those of a replica one after the other."""
    seats: tuple[Seat, ...] = ()
    """The seat of each member; empty: every member is a replica of its own."""
    fresh: tuple[str, ...] = ()
    """Members that do not have the state of training yet; all of them in the first view."""
    units: int = 0
    """Units of work that count as done when this view begins; see Ask."""
    boundary: bool = True
    """Whether every member was between two units when it asked."""
    ahead: bool = False
    """Whether some member had begun the next unit, in the previous view."""
    leaving: tuple[str, ...] = ()
    """Members that hand over their residuals and then leave."""
    lost: tuple[str, ...] = ()
    """Members of the previous view that died."""
    flags: str = "0"
    """Flags that members had raised in the last unit that is done, as in Ask."""
    why: str = ""
    """Why the previous view ended."""

    def seat_of(self, worker: str) -> Seat:
        """The replica of a member, and its position there."""
        return self.seats[self.members.index(worker)] if self.seats else Seat(worker, 0)

    @property
    def replicas(self) -> tuple[str, ...]:
        """Names of the replicas, in the order of their ranks in exchanges."""
        return tuple(dict.fromkeys(seat.replica for seat in self.seats)) or self.members

    def replicas_of(self, workers: Sequence[str]) -> tuple[str, ...]:
        """The replicas of some members."""
        return tuple(dict.fromkeys(self.seat_of(name).replica for name in workers))

    def with_shards_of(self, worker: str) -> tuple[str, ...]:
        """The members that hold the same shards as this one, itself included: one of each replica."""
        if not self.seats:
            return self.members
        position = self.seat_of(worker).position
        return tuple(name for name, seat in zip(self.members, self.seats, strict=True) if seat.position == position)

    def with_state_of(self, worker: str) -> tuple[str, ...]:
        """The fresh members with this one's shards, after the member whose state they take over; empty: none is fresh.

        Without any state of training, as in the first view, they take over that of the first of them.
        """
        alike = self.with_shards_of(worker)
        fresh = [name for name in alike if name in self.fresh]
        source = next((name for name in alike if name not in fresh), alike[0])
        return (source, *(name for name in fresh if name != source)) if fresh else ()


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A worker is ready to become a member."""

    worker: str
    turn: int
    """How often it has been ready before: a view may break before the worker has the state of training."""
    replica: str = ""
    """The replica that the worker belongs to; empty: one of its own."""
    position: int = 0
    """The position of the worker among those of its replica."""
    ranks_per_replica: int = 1
    min_ranks: int = 1
    """The job ends with fewer replicas; the job takes no more than `max_ranks`."""
    max_ranks: int = 2**31


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A member has left its view and asks for the next one.

    Joint work is divided into units, the same on every member. A unit is prepared on a member that has everything it
    needs to complete it, and is done once all members have prepared it.
    """

    worker: str
    view: int
    unit: int = 0
    """How many units are done here."""
    prepared: bool = False
    """Whether the next unit is prepared."""
    boundary: bool = False
    """Whether the next unit has not been begun."""
    fresh: bool = False
    """Whether this member lacks the state of training; if so, the fields above do not count."""
    turn: int = 0
    """Of a fresh member: as in Ready."""
    inside: bool = False
    """Whether this member, although its last unit is done, waits inside it for another rank of its replica, which does
    not know that."""
    leaving: bool = False
    """Whether this member was asked to end and will leave."""
    flags: str = "0"
    """Flags that any member had raised in the last unit that is done here: a number in hexadecimal, a bit per flag."""
    own_flags: str = "0"
    """Flags that this member raises in the next unit."""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A member cannot go on in a view, and will ask for the next one when the other ranks of its replica do."""

    worker: str
    view: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Left:
    """A worker has left in an orderly way."""

    worker: str
    finished: bool
    """Whether training is complete; otherwise the worker was asked to end."""


@dataclass(frozen=True, kw_only=True)
class Raised:
    """The script of a worker has raised an error."""

    worker: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The process of a worker has ended."""

    worker: str
    how: str


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A heartbeat of an agent, with its workers."""

    agent: str
    workers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Asks the keeper to end."""


Message = Ready | Ask | Broken | Left | Raised | Ended | Beat | Stop
_MESSAGES: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Ready, Ask, Broken, Left, Raised, Ended, Beat, Stop)
}


@dataclass(frozen=True, kw_only=True)
class News:
    """News for all members of a view.

    down: the view is over, no rank may wait in it any longer.
    change: the view will be over after the next unit, because others want to join.
    end: there will be no further view.
    over: no further view is needed, because training is complete.
    refused: this worker is not admitted, as it does not fit the job.
    closed: a member sends this to itself to stop listening.
    """

    view: int
    kind: Literal["down", "change", "end", "over", "refused", "closed"]
    why: str = ""


def to_text(record: Message | View | News) -> str:
    """One line of JSON."""
    return json.dumps({"record": type(record).__name__, **asdict(record)}, separators=(",", ":"))


def message_of(text: bytes | str) -> Message:
    """Read a message to the keeper."""
    record = _loaded(text)
    kind = _MESSAGES.get(record.pop("record", ""))
    if kind is None:
        raise LaconicError(f"not a message of a worker: {one_line(text, 80)}.")
    return _made(kind, record, text)


def view_of(text: bytes | str) -> View | News:
    """Read a view, or why there is none."""
    record = _loaded(text)
    if record.get("record") == News.__name__:
        return _made(News, record, text)
    try:
        record["seats"] = [Seat(*seat) for seat in record.get("seats", ())]
    except TypeError as exc:
        raise LaconicError(f"not a View record: {one_line(text, 80)} ({one_line(exc, 80)}).") from exc
    return _made(View, record, text)


def news_of(text: bytes | str) -> News:
    """Read news."""
    return _made(News, _loaded(text), text)


def _loaded(text: bytes | str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except ValueError as exc:
        raise LaconicError(f"not a record of the job's store: {one_line(text, 80)}.") from exc
    if not isinstance(record, dict):
        raise LaconicError(f"not a record of the job's store: {one_line(text, 80)}.")
    return record


def _made(kind: type[Any], record: Mapping[str, Any], text: bytes | str) -> Any:
    known = {field.name for field in fields(kind)}
    try:
        return kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in record.items() if key in known})
    except TypeError as exc:
        raise LaconicError(f"not a {kind.__name__} record: {one_line(text, 80)} ({one_line(exc, 80)}).") from exc
