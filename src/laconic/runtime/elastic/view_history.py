"""The history of views, for session.views and the event log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from laconic.core.event import Event
from laconic.core.stateful import BucketState
from laconic.membership.view import View
from laconic.runtime.job import Job


@dataclass(frozen=True)
class ViewChange:
    """One entry of session.views."""

    view: View
    rank: int
    """The number of this rank's replica in the view, which is session.rank."""
    step: int
    """Optimizer steps completed before the view."""
    seconds: float
    """From the moment this rank noticed the change until it could continue; 0 for the first view."""
    redone: bool
    """Whether an exchange that was in flight is repeated without the lost ranks' contributions."""


def tell_view(
    job: Job, change: ViewChange, unit: int, states: Iterable[BucketState], *, position: int, num_lost: int
) -> None:
    """Write a new view into the event log.

    states: those of this rank's gradients. position: that of this rank in its replica. num_lost: the number of dead
    ranks with the same shards.
    """
    view = change.view
    data = {
        "view": view.number,
        "members": ",".join(view.members),
        "lost": ",".join(view.lost),
        "joined": ",".join(view.fresh),
        "leaving": ",".join(view.leaving),
        "why": view.why,
        "redone": change.redone,
        "unit": unit,
        "position": position,
    }
    if num_lost:
        # The residual of a dead rank is lost. Its norm is unknown, but about that of every other rank with its shards.
        data["lost_residual_norm"] = _owed_norm(job, states) * num_lost**0.5
    job.events.write(Event("view", job.clock.now(), change.rank, job.step, change.seconds, {**data}))


def _owed_norm(job: Job, states: Iterable[BucketState]) -> float:
    kinds = job.strategy.resize()
    squares = [
        float(value.float().square().sum())
        for state in states
        for fields in state.by_parameter().values()
        for name, value in fields.items()
        if kinds.get(name.partition("|")[0]) == "sum"
    ]
    return sum(squares) ** 0.5
