"""What an event log says about a run so far: per rank and as a whole, over the last steps."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from laconic.core.event import Event, Scalar
from laconic.errors import LaconicError
from laconic.sinks.step_values import STEP_KINDS, StepSums, StepValues

_RECENT_STEPS = 20
"""Steps that times are averaged over."""


_Turn = tuple[Scalar, Scalar] | None


@dataclass
class RankState:
    """The state of one rank, from its events."""

    rank: int
    step: int = -1
    """The last step that the rank has made."""
    recent: deque[StepValues] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    loss: float | None = None
    relative_error: float | None = None
    _sums: StepSums = field(default_factory=StepSums)

    def take(self, event: Event) -> None:
        """Add one event."""
        if event.kind in STEP_KINDS:
            self.step = event.step
        self._keep(self._sums.add(event))

    def complete(self) -> None:
        """Count the last steps as complete: nothing more will come."""
        self._keep(self._sums.rest())

    def _keep(self, found: Iterable[StepValues]) -> None:
        for one in found:
            self.loss = one.values.get("loss", self.loss)
            self.relative_error = one.values.get("relative_error", self.relative_error)
            if "step_s" in one.values:
                self.recent.append(one)

    def mean(self, name: str) -> float | None:
        """Mean of a number over the recent steps; a step that does not have it counts as zero."""
        found = [one.values.get(name) for one in self.recent]
        known = [value for value in found if value is not None]
        return sum(known) / len(found) if known else None

    @property
    def compute_s(self) -> float | None:
        """Seconds of a step in which training does not wait for communication."""
        step_s = self.mean("step_s")
        return None if step_s is None else max(0.0, step_s - (self.mean("wait_s") or 0.0))


@dataclass(frozen=True)
class Summary:
    """The run as a whole; means over ranks, None where the log does not say."""

    strategy: str | None
    link: str | None
    world_size: int | None
    step: int
    steps_per_s: float | None
    step_s: float | None
    compute_s: float | None
    wait_s: float | None
    sent_bytes: float | None
    loss: float | None
    relative_error: float | None
    slowest_rank: int | None
    """The rank that computes longest, where the log has several."""
    slowest_compute_s: float | None


class WatchState:
    """Everything a log has said; in a comparison, about the strategy whose turn it is."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankState] = {}
        """The ranks of the session with the latest event."""
        self.num_events = 0
        self.num_unreadable = 0
        self.first_unreadable: str | None = None
        """What is wrong with the first line that is no event, and its number."""
        self._num_lines = 0
        self._sessions: dict[_Turn, dict[int, RankState]] = {}
        self._about: dict[str, object] = {}

    def take_line(self, line: str) -> None:
        """Add one line of the log; one that is no event is counted and left out."""
        self._num_lines += 1
        if not line.strip():
            return
        try:
            event = Event.from_json(line)
        except LaconicError as exc:
            self.num_unreadable += 1
            self.first_unreadable = self.first_unreadable or f"line {self._num_lines} is {exc}"
            return
        self.num_events += 1
        self._take(event)

    def _take(self, event: Event) -> None:
        # Only a comparison names the link; its strategies take turns and go on where they stopped.
        link = event.data.get("link")
        turn = (event.data.get("strategy"), link) if link is not None else None
        ranks = self._sessions.setdefault(turn, {})
        if event.kind == "attach":
            self._about |= event.data
            known = ranks.get(event.rank)
            if known is not None and known.step >= 0:  # another session begins, once for all of its ranks
                ranks.clear()
        elif turn is not None:
            self._about |= {"strategy": turn[0], "link": turn[1]}
        ranks.setdefault(event.rank, RankState(event.rank)).take(event)
        self.ranks = ranks

    def complete(self) -> None:
        """Count every step as complete: the log has ended."""
        for rank in self.ranks.values():
            rank.complete()

    def summary(self) -> Summary:
        """The run as a whole."""
        ranks = self.ranks.values()
        step_s = _mean(rank.mean("step_s") for rank in ranks)
        computing = {rank.rank: rank.compute_s for rank in ranks if rank.compute_s is not None}
        slowest = max(computing, key=lambda rank: computing[rank] or 0.0) if len(computing) > 1 else None
        strategy, link, world_size = (self._about.get(key) for key in ("strategy", "link", "world_size"))
        return Summary(
            strategy=strategy if isinstance(strategy, str) else None,
            link=link if isinstance(link, str) else None,
            world_size=world_size if isinstance(world_size, int) else None,
            step=max((rank.step for rank in ranks), default=-1),
            steps_per_s=1 / step_s if step_s else None,
            step_s=step_s,
            compute_s=_mean(computing.values()),
            wait_s=_mean(rank.mean("wait_s") for rank in ranks),
            sent_bytes=_mean(rank.mean("sent_bytes") for rank in ranks),
            loss=_mean(rank.loss for rank in ranks),
            relative_error=_mean(rank.relative_error for rank in ranks),
            slowest_rank=slowest,
            slowest_compute_s=None if slowest is None else computing[slowest],
        )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
