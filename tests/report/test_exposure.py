"""Which exchange a wait was for: by hand, for any times, and in what the runtime records."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

import laconic
from laconic.core.event import Event
from laconic.report.exposure import Exchanges, end_of
from tests.runtime.replicas import mlp, train


def exchange(bucket: int, begin_s: float, end_s: float) -> Event:
    return Event("exchange", begin_s, 0, 0, end_s - begin_s, {"bucket": bucket})


def wait(begin_s: float, end_s: float) -> Event:
    return Event("wait", begin_s, 0, 0, end_s - begin_s)


def parts(found: Exchanges, waited: Event, shortest_s: float = 1e-6) -> list[tuple[float, float, object]]:
    return [
        (part.begin_s, part.end_s, None if part.exchange is None else part.exchange.data["bucket"])
        for part in found.waited_for(waited, shortest_s)
    ]


def test_who_waits_for_all_waits_for_one_after_the_other() -> None:
    found = Exchanges([exchange(2, 3.0, 6.0), exchange(0, 1.0, 2.5), exchange(1, 2.0, 5.0), exchange(9, 0.0, 1.5)])
    assert parts(found, wait(2.0, 6.25)) == [(2.0, 2.5, 0), (2.5, 5.0, 1), (5.0, 6.25, 2)]
    assert found.ended_by(wait(2.0, 6.25)) == exchange(2, 3.0, 6.0)


def test_while_others_are_under_way_it_was_the_last_that_ended() -> None:
    found = Exchanges([exchange(0, 1.0, 2.5), exchange(1, 1.0, 3.0), exchange(2, 1.0, 8.0)])
    assert parts(found, wait(2.0, 3.0)) == [(2.0, 3.0, 1)]
    # What begins later is not in flight.
    found = Exchanges([exchange(0, 1.0, 2.5), exchange(1, 1.0, 3.0), exchange(2, 3.0, 8.0)])
    assert parts(found, wait(2.0, 3.0)) == [(2.0, 2.5, 0), (2.5, 3.0, 1)]


def test_a_wait_in_which_nothing_ends_is_for_nothing_known() -> None:
    assert parts(Exchanges([exchange(0, 1.0, 2.0)]), wait(3.0, 4.0)) == [(3.0, 4.0, None)]
    assert Exchanges([]).ended_by(wait(3.0, 4.0)) is None


def test_short_parts_belong_to_the_next() -> None:
    found = Exchanges([exchange(0, 0.0, 1.25), exchange(1, 0.0, 3.0), exchange(2, 0.0, 4.0)])
    assert parts(found, wait(1.0, 4.0), shortest_s=0.5) == [(1.0, 3.0, 1), (3.0, 4.0, 2)]


times = st.tuples(st.integers(0, 40), st.integers(1, 20)).map(lambda pair: (float(pair[0]), float(sum(pair))))


@given(st.lists(times, max_size=12), times, st.sampled_from([1e-6, 2.0]))
def test_the_parts_are_the_whole(spans: list[tuple[float, float]], waited: tuple[float, float], least: float) -> None:
    found = Exchanges(exchange(number, *span) for number, span in enumerate(spans))
    waiting = found.waited_for(wait(*waited), least)
    assert (waiting[0].begin_s, waiting[-1].end_s) == waited
    assert all(earlier.end_s == later.begin_s for earlier, later in pairwise(waiting))
    assert all(part.seconds >= least for part in waiting[:-1])
    for part in waiting:
        ended = [end for _, end in spans if waited[0] <= end <= waited[1]]
        assert (part.exchange is None) == (not ended)
        # Nothing is waited for longer than until it has ended, save by who wakes up late.
        assert part.exchange is None or part is waiting[-1] or end_of(part.exchange) == part.end_s
    assert waiting[-1].exchange is None or end_of(waiting[-1].exchange) == max(ended)


def test_an_exchange_in_two_halves_is_recorded_as_two() -> None:
    events = laconic.EventList()
    train(mlp(), "bsp / all_reduce / none / dear(bytes=64)", steps=4, events=events)
    exchanges = [event for event in events.events if event.kind == "exchange" and event.rank == 0 and event.step > 1]
    halves = Counter((event.step, event.data["bucket"], event.data["half"]) for event in exchanges)
    assert set(halves.values()) == {1}
    assert len(halves) == 2 * 2 * len({bucket for _, bucket, _ in halves}) > 4
    for one in exchanges:
        if one.data["half"] == 1:
            (two,) = (
                event
                for event in exchanges
                if (event.step, event.data["bucket"], event.data["half"]) == (one.step, one.data["bucket"], 2)
            )
            assert end_of(one) <= two.time_s
            assert one.data["wire_bytes"] == two.data["wire_bytes"] > 0
