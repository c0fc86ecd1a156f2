"""What the workers of a job have written, put together: who did what in which step, and whether they agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from laconic.core.event import Event
from laconic.errors import LaconicError


@dataclass
class Unit:
    """One unit of work as those that completed it saw it."""

    number: int
    what: str
    view: int
    members: tuple[str, ...]
    step: int


@dataclass
class JobLog:
    """The events of all workers of one job."""

    units: list[Unit] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    """By number of steps made: what stands for the replicas then."""
    differing: set[int] = field(default_factory=set)
    """Steps after which replicas differ."""
    commits: list[tuple[float, int, int]] = field(default_factory=list)
    """(time, view, step) of each digest."""
    batches: dict[str, dict[int, tuple[int, int, int]]] = field(default_factory=dict)
    """worker -> step -> the epoch, the place in it where the worker's samples begin, and their number."""
    joined: dict[int, tuple[tuple[str, ...], str, int]] = field(default_factory=dict)
    """view -> (workers that joined, the one whose state they took over, steps made by then)."""
    leaving: dict[int, tuple[str, ...]] = field(default_factory=dict)
    views: dict[int, tuple[str, ...]] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)
    """Units of which two workers say different things."""
    num_redone: int = 0


def read_job(folder: Path) -> JobLog:
    """Put the logs of all workers together."""
    log = JobLog()
    units: dict[int, Unit] = {}
    for path in sorted(folder.glob("*.jsonl")):
        worker = path.stem
        for event in events_of(path):
            data = event.data
            if event.kind == "unit":
                members = _names(data["members"])
                unit = Unit(_whole(data["unit"]), str(data["what"]), _whole(data["view"]), members, event.step)
                known = units.setdefault(unit.number, unit)
                if known != unit:
                    log.conflicts.append(f"unit {unit.number}: {known} and, on worker {worker}, {unit}")
            elif event.kind == "digest":
                digest = str(data["digest"])
                if log.digests.setdefault(event.step, digest) != digest:
                    log.differing.add(event.step)
                log.commits.append((float(str(data["wall_s"])), _whole(data["view"]), event.step))
            elif event.kind == "batch":
                mine = (_whole(data["epoch"]), _whole(data["first"]), _whole(data["samples"]))
                log.batches.setdefault(worker, {})[event.step] = mine
            elif event.kind == "view":
                number, members = _whole(data["view"]), _names(data["members"])
                log.views[number] = members
                joined = _names(data["joined"])
                source = next((name for name in members if name not in joined), members[0])
                if joined:
                    log.joined[number] = (joined, source, event.step)
                if data["leaving"]:
                    log.leaving[number] = _names(data["leaving"])
                log.num_redone += bool(data["redone"]) and event.rank == 0
    log.units = [units[number] for number in sorted(units)]
    log.commits.sort()
    return log


def events_of(path: Path) -> Iterator[Event]:
    """What one worker has written."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield Event.from_json(line)
        except LaconicError:
            continue  # the last line of a process that was killed


def _names(text: object) -> tuple[str, ...]:
    return tuple(name for name in str(text).split(",") if name)


def _whole(value: object) -> int:
    return int(str(value))
