"""A few numbers per step, whatever the order in which events come."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.core.event import Event
from laconic.sinks.step_values import StepSums, StepValues


def step(number: int, sent_bytes: int, duration_s: float = 1.0) -> Event:
    return Event("step", float(number), 0, number, duration_s, {"sent_bytes": sent_bytes})


def sums(*events: Event) -> list[StepValues]:
    made = StepSums()
    return [values for event in events for values in made.add(event)] + list(made.rest())


def test_times_are_added_and_bytes_are_those_of_the_step() -> None:
    first, second = sums(
        Event("attach", 0.0, 3, 0),
        Event("encode", 0.0, 3, 0, 0.25, {"bucket": 0}),
        Event("exchange", 0.0, 3, 0, 0.5, {"bucket": 0, "residual_norm": 3.0, "relative_error": 0.5}),
        Event("exchange", 0.0, 3, 0, 0.25, {"bucket": 1, "residual_norm": 4.0, "relative_error": None}),
        Event("wait", 0.0, 3, 0, 0.125),
        Event("step", 0.0, 3, 0, 1.0, {"sent_bytes": 100}),
        Event("iteration", 0.0, 3, 0, 1.0, {"loss": 2.5}),
        Event("step", 1.0, 3, 1, 2.0, {"sent_bytes": 150}),
    )
    assert first == StepValues(
        3,
        0,
        {
            "encode_s": 0.25,
            "exchange_s": 0.75,
            "wait_s": 0.125,
            "step_s": 1.0,
            "sent_bytes": 100,
            "residual_norm": 5.0,
            "relative_error": 0.5,
            "loss": 2.5,
        },
    )
    assert second == StepValues(3, 1, {"step_s": 2.0, "sent_bytes": 50})


def test_late_events_count_and_what_comes_too_late_is_not_lost() -> None:
    made = StepSums()
    assert not list(made.add(step(0, 1)))
    assert not list(made.add(Event("exchange", 0.0, 0, 0, 0.5)))
    assert not list(made.add(step(1, 2)))
    assert [values.values["exchange_s"] for values in made.add(step(2, 3))] == [0.5]
    assert not list(made.add(Event("exchange", 0.0, 0, 0, 0.25)))
    assert next(iter(made.add(step(3, 4)))).values["exchange_s"] == 0.25


def test_another_session_and_an_earlier_state_count_anew() -> None:
    attach = Event("attach", 0.0, 0, 0)
    found = sums(attach, step(0, 10), step(1, 20), attach, step(0, 7), step(1, 9))
    assert [(one.step, one.values["sent_bytes"]) for one in found] == [(0, 10), (1, 10), (0, 7), (1, 2)]
    found = sums(*(step(number, 0) for number in (5, 6, 7, 8, 5, 6, 7, 8)))
    assert [one.step for one in found] == [5, 6, 7, 8, 5, 6, 7, 8]


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0, 10)), max_size=30), st.randoms(use_true_random=False))
def test_no_time_is_lost(waits: list[tuple[int, float]], order: object) -> None:
    """Waits come in any order between the steps of a run; all of them are handed out once."""
    events: list[Event] = [step(number, 0) for number in range(7)]
    for number, duration_s in waits:
        events.insert(order.randrange(len(events) + 1), Event("wait", 0.0, 0, number, duration_s))  # type: ignore[attr-defined]
    found = sums(*events)
    assert math.fsum(one.values.get("wait_s", 0.0) for one in found) == pytest.approx(math.fsum(t for _, t in waits))
    numbers = [one.step for one in found]
    assert numbers == sorted(set(numbers))
