"""The vote that ends a unit, without processes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import pytest

from laconic.core.clock import WallClock
from laconic.core.event import DiscardEvents
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.transport import Work
from laconic.errors import CommunicationError
from laconic.runtime.elastic.vote import Ballot, Result, Vote
from laconic.runtime.engine import Engine, Task
from laconic.runtime.job import Job
from laconic.runtime.stopwatch import Stopwatch

MEMBERS = ("0.0", "0.1", "0.2")
FLAGS = 70
"""More than fit into one number of 64 bits."""


class _WhenSet:
    """An operation that ends when the test says so."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def wait(self) -> None:
        assert self._event.wait(10)

    def done(self) -> bool:
        return self._event.is_set()


def _job(transport: InProcessTransport, rates: tuple[float, ...] = (0.1,), step: int = 3) -> Job:
    job = SimpleNamespace(
        engine=Engine(transport, Stopwatch(WallClock(), DiscardEvents(), transport.rank)),
        step=step,
        strategy=SimpleNamespace(exchanges_gradients=lambda: True, synchronization=SimpleNamespace(deadline_s=None)),
        param_groups=[{"lr": rate} for rate in rates],
    )
    return cast(Job, job)


def _vote(job: Job, transport: InProcessTransport, mine: Ballot, *, raises: int = 0) -> Vote:
    flags = [number == raises for number in range(FLAGS)]
    return Vote(job, transport, MEMBERS, mine, flags=flags, what="the gradients", prepared=lambda: None)


def test_every_rank_hears_the_ballots_and_flags_of_all() -> None:
    ballots = [Ballot(5, False, 10, 7), Ballot(5, True, 0, 7), Ballot(5, False, 30, 7)]

    def rank(transport: InProcessTransport) -> Result:
        job = _job(transport)
        try:
            return _vote(job, transport, ballots[transport.rank], raises=34 * transport.rank).result()
        finally:
            job.engine.stop()

    for said in InProcessCluster(3).run(rank):
        assert said.ballots == dict(zip(MEMBERS, ballots, strict=True))
        assert [number for number, raised in enumerate(said.raised) if raised] == [0, 34, 68]
        assert len(said.raised) == FLAGS


@pytest.mark.parametrize(
    ("odd", "rate", "step", "message"),
    [
        (Ballot(6, False, 0, 7), 0.1, 3, "worker 0.2 in 6"),
        (Ballot(5, False, 0, 7), 0.2, 3, "have different learning rates"),
        (Ballot(5, False, 0, 8), 0.1, 3, "divides other samples"),
        (Ballot(5, False, 0, 7), 0.1, 8, "worker 0.2 is in step 8, and worker 0.0 in step 3"),
    ],
)
def test_ranks_that_disagree_are_named(odd: Ballot, rate: float, step: int, message: str) -> None:
    def rank(transport: InProcessTransport) -> str:
        is_odd = transport.rank == 2
        job = _job(transport, (rate if is_odd else 0.1,), step if is_odd else 3)
        try:
            with pytest.raises(CommunicationError) as raised:
                _vote(job, transport, odd if is_odd else Ballot(5, False, 0, 7)).result()
            return str(raised.value)
        finally:
            job.engine.stop()

    assert message in InProcessCluster(3).run(rank)[0]


def test_a_ballot_leaves_after_the_exchanges_before_it() -> None:
    """As soon as others have all ballots they go on, so a ballot says that everything has arrived here."""
    transport, arrived = InProcessCluster(1).transport(0), threading.Event()
    job, noted = _job(transport), []

    def exchange():
        work: Work = _WhenSet(arrived)
        yield work
        noted.append("arrived")

    try:
        job.engine.submit(Task("a bucket", exchange))
        said = [number == 1 for number in range(FLAGS)]
        mine = Ballot(5, False, 0, 7)
        prepared = lambda: noted.append("the ballot leaves")  # noqa: E731
        vote = Vote(job, transport, MEMBERS[:1], mine, flags=said, what="the gradients", prepared=prepared)
        assert not arrived.wait(0.2), "the test has not said so yet"
        assert noted == []
        arrived.set()
        assert vote.result() == Result({"0.0": mine}, tuple(said))
        assert noted == ["arrived", "the ballot leaves"]
    finally:
        job.engine.stop()
