"""Computes from the events of an elastic run who trained when, what each change of the ranks cost, and the goodput.

    lost     = (first unit after a change - last unit before it) - typical time of a unit afterwards; the same of that
               last unit, if it was completed only after the change had been noticed
    lost     = longer of the unit a fault strikes and the next one - typical time, where the same ranks go on
    goodput  = 1 - sum of lost / time from the first unit to the last

A unit is what ranks complete together: a step, or a round of local updates. Its typical time is the median between two
units of one view. Where several views follow each other without a unit, the lost time counts for the first.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from laconic.core.event import Event
from laconic.errors import UsageError

KINDS = ("attach", "view", "unit", "fault")
"""The events that are used."""
_ENOUGH = 3
"""The fewest times between units of one view from which its typical time is computed."""


@dataclass(frozen=True, kw_only=True)
class Stay:
    """A process was a member, from one moment to another."""

    worker: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class FaultSeen:
    """A fault that the lab has carried out."""

    time_s: float
    text: str
    processes: tuple[str, ...]
    view: int | None
    """The change that followed from it; None: the same ranks went on."""
    lost_s: float
    """Where the same ranks went on: by how much the unit that it struck, or the next one, took longer than usual."""


@dataclass(frozen=True, kw_only=True)
class MembershipChange:
    """One view after the first."""

    view: int
    time_s: float
    """When its ranks went on."""
    num_before: int
    num_ranks: int
    died: tuple[str, ...]
    joined: tuple[str, ...]
    leaving: tuple[str, ...]
    why: str
    fault: str
    """The fault of the lab that it followed from; empty: none is known."""
    noticed_s: float | None
    """From the fault to the moment at which the first rank noticed that another had died."""
    lost_s: float
    redone: bool
    """Whether an exchange was repeated without the ranks that died."""
    lost_residual_norm: float | None


@dataclass(frozen=True, kw_only=True)
class ElasticRun:
    """What happened, with times in seconds since the first ranks trained together."""

    strategy: str
    seconds: float
    """Until the last unit."""
    num_units: int
    """Units that were completed."""
    unit_s: float
    """The typical time of a unit."""
    lost_s: float
    """Seconds lost by all changes and faults together."""
    goodput: float
    stays: tuple[Stay, ...]
    changes: tuple[MembershipChange, ...]
    faults: tuple[FaultSeen, ...]
    progress: tuple[float, ...]
    """When each unit was completed."""


@dataclass
class _View:
    number: int
    data: Mapping[str, object]
    began_s: float
    noticed_s: float
    redone: bool = False
    residual_norms: dict[str, float] = field(default_factory=dict)
    """The largest that a rank has estimated, by its position in its replica."""

    @property
    def residual_norm(self) -> float | None:
        """That of a whole replica."""
        return math.hypot(*self.residual_norms.values()) if self.residual_norms else None

    def names(self, key: str) -> tuple[str, ...]:
        return _names(self.data.get(key))


@dataclass
class _Seen:
    views: dict[int, _View] = field(default_factory=dict)
    units: dict[int, tuple[float, int]] = field(default_factory=dict)
    """number -> (time, view)."""
    faults: list[Event] = field(default_factory=list)
    strategy: str = ""

    def take(self, event: Event) -> None:
        if event.kind == "view":
            self._take_view(event)
        elif event.kind == "unit":
            number, view = _whole(event, "unit"), _whole(event, "view")
            known = self.units.get(number)
            time_s = event.time_s if known is None else min(known[0], event.time_s)
            self.units[number] = (time_s, view)
        elif event.kind == "fault" and not event.data.get("over"):
            self.faults.append(event)
        elif event.kind == "attach" and not self.strategy:
            self.strategy = str(event.data.get("strategy", ""))

    def _take_view(self, event: Event) -> None:
        number, noticed_s = _whole(event, "view"), event.time_s - event.duration_s
        view = self.views.setdefault(number, _View(number, event.data, event.time_s, noticed_s))
        view.began_s, view.noticed_s = min(view.began_s, event.time_s), min(view.noticed_s, noticed_s)
        view.redone |= bool(event.data.get("redone"))
        norm = event.data.get("lost_residual_norm")
        if isinstance(norm, int | float):
            position = str(event.data.get("position", 0))
            view.residual_norms[position] = max(view.residual_norms.get(position, 0.0), float(norm))


def elastic_run(events: Iterable[Event], where: str) -> ElasticRun:
    """Put the events of all ranks together; `where` names them in errors."""
    seen = _Seen()
    for event in events:
        seen.take(event)
    views = [seen.views[number] for number in sorted(seen.views)]
    units = sorted(seen.units.values())
    if not views or not units:
        missing = "events of kind view" if not views else "a step that was completed"
        raise UsageError(
            f"{where} holds no elastic run: {missing} is missing. Give the folder of laconic lab --kill ..., or one "
            "with the logs of attach(..., elastic=..., events=laconic.EventLog(...)) of every process."
        )
    began_s, end_s = views[0].began_s, units[-1][0]
    typical = _typical(units)
    # Where members changed before the first step, the time that this has cost counts from when training began.
    first = [(began_s, views[0].number)] if units[0][1] > views[0].number else []
    lost = _lost(views, [*first, *units], typical)
    followed = _attributed(seen.faults, views)
    faults = tuple(_fault(event, followed, units, typical, began_s) for event in seen.faults)
    lost_s = sum(lost.values()) + sum(fault.lost_s for fault in faults)
    trained_s = units[-1][0] - (first or units)[0][0]
    return ElasticRun(
        strategy=seen.strategy,
        seconds=end_s - began_s,
        num_units=len(units),
        unit_s=typical.get(None, 0.0),
        lost_s=lost_s,
        goodput=max(0.0, 1.0 - lost_s / trained_s) if trained_s > 0 else 1.0,
        stays=tuple(_stays(views, began_s, end_s)),
        changes=tuple(
            _change(before, view, lost.get(view.number, 0.0), followed.get(view.number), began_s)
            for before, view in pairwise(views)
        ),
        faults=faults,
        progress=tuple(time_s - began_s for time_s, _ in units),
    )


def _typical(units: Sequence[tuple[float, int]]) -> dict[int | None, float]:
    """The median time between two units of each view that has enough of them; None: of all views together."""
    between: dict[int | None, list[float]] = {None: []}
    for (one_s, one_view), (other_s, other_view) in pairwise(units):
        if one_view == other_view:
            between[None].append(other_s - one_s)
            between.setdefault(one_view, []).append(other_s - one_s)
    return {
        view: statistics.median(times)
        for view, times in between.items()
        if len(times) >= (1 if view is None else _ENOUGH)
    }


def _lost(
    views: Sequence[_View], units: Sequence[tuple[float, int]], typical: Mapping[int | None, float]
) -> dict[int, float]:
    """By view: the seconds that the change to it, and to views that follow it at once, has cost."""
    found: dict[int, float] = {}
    ends = {view: time_s for time_s, view in units}
    for (one_s, one_view), (other_s, other_view) in pairwise(units):
        later = next((view for view in views if view.number > one_view), None)
        # Ranks that have all values of a unit but miss a vote learn in the next view that the unit is complete.
        late = later is not None and other_s == ends[one_view] and other_s > later.noticed_s
        if later is not None and (other_view > one_view or late):
            usual_s = typical.get(other_view, typical.get(None, 0.0))
            found[later.number] = found.get(later.number, 0.0) + max(0.0, other_s - one_s - usual_s)
    return found


def _stays(views: Sequence[_View], began_s: float, end_s: float) -> Iterable[Stay]:
    """The stays in the order in which processes became members; no process returns under the same name."""
    begin: dict[str, float] = {}
    end: dict[str, float] = {}
    for view in views:
        members = view.names("members")
        end |= {worker: view.noticed_s for worker in begin if worker not in members and worker not in end}
        begin |= {worker: view.began_s for worker in members if worker not in begin}
    for worker, from_s in begin.items():
        yield Stay(worker=worker, begin_s=from_s - began_s, end_s=end.get(worker, end_s) - began_s)


def _attributed(faults: Sequence[Event], views: Sequence[_View]) -> dict[int, Event]:
    """By view: the fault that caused it, the last before it that started a rank that joined or struck one that died.

    A process that was only slowed down has not died of that.
    """
    found: dict[int, Event] = {}
    left = [event for event in faults if event.data.get("fault_kind") != "slow"]
    for view in views[1:]:
        fitting = [event for event in left if event.time_s <= view.began_s and _fits(event, view)]
        if fitting:
            found[view.number] = max(fitting, key=lambda event: event.time_s)
            left.remove(found[view.number])
    return found


def _fits(fault: Event, view: _View) -> bool:
    concerned = view.names("joined" if fault.data.get("fault_kind") == "join" else "lost")
    return not set(concerned).isdisjoint(_names(fault.data.get("processes")))


def _change(before: _View, view: _View, lost_s: float, fault: Event | None, began_s: float) -> MembershipChange:
    return MembershipChange(
        view=view.number,
        time_s=view.began_s - began_s,
        num_before=len(before.names("members")),
        num_ranks=len(view.names("members")),
        died=view.names("lost"),
        joined=view.names("joined"),
        leaving=view.names("leaving"),
        why=str(view.data.get("why", "")),
        fault="" if fault is None else str(fault.data.get("fault", "")),
        # How long a process takes to start says nothing about the others.
        noticed_s=max(0.0, view.noticed_s - fault.time_s) if fault is not None and view.names("lost") else None,
        lost_s=lost_s,
        redone=view.redone,
        lost_residual_norm=view.residual_norm,
    )


def _fault(
    event: Event,
    followed: Mapping[int, Event],
    units: Sequence[tuple[float, int]],
    typical: Mapping[int | None, float],
    began_s: float,
) -> FaultSeen:
    view = next((number for number, fault in followed.items() if fault is event), None)
    return FaultSeen(
        time_s=event.time_s - began_s,
        text=str(event.data.get("fault", "")),
        processes=_names(event.data.get("processes")),
        view=view,
        lost_s=_held_up_s(event.time_s, units, typical) if view is None else 0.0,
    )


def _held_up_s(time_s: float, units: Sequence[tuple[float, int]], typical: Mapping[int | None, float]) -> float:
    """By how much the unit that is made at this time, or the one after it, takes longer than is typical of its view."""
    struck = [(one, other) for one, other in pairwise(units) if other[0] > time_s][:2]
    longer = [
        other_s - one_s - typical.get(view, typical.get(None, 0.0))
        for (one_s, before), (other_s, view) in struck
        if view == before  # otherwise a change is charged for it
    ]
    return max([0.0, *longer])


def _names(text: object) -> tuple[str, ...]:
    return tuple(name for name in str(text or "").split(",") if name)


def _whole(event: Event, key: str) -> int:
    value = event.data.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f'an event of kind "{event.kind}" must have a whole number as {key}, got {value!r}.')
    return value
