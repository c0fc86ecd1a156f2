"""The typical step, what is drawn of it, and lanes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.core.event import Event, Scalar
from laconic.report.interval_packing import first_free_lanes
from laconic.report.results import TORCH_DDP
from laconic.report.timeline import COMMUNICATION_KINDS, TRAINING_KINDS, typical_steps
from tests.report.run_folders import SIX, make_run


def step_events(durations_s: list[float], *, rank: int = 0, begin_s: float = 50.0, detailed: str = "") -> list[Event]:
    """Steps one after the other; a letter of `detailed` for each, "." without details."""
    about: dict[str, Scalar] = {"strategy": "ddp", "link": "100mbit"}
    events = []
    for step, took_s in enumerate(durations_s):
        events.append(Event("iteration", begin_s, rank, step, took_s, {**about}))
        if not detailed or detailed[step] != ".":
            events.append(Event("forward", begin_s, rank, step, took_s / 4, {**about}))
            events.append(Event("backward", begin_s + took_s / 4, rank, step, took_s / 2, {**about}))
        begin_s += took_s
    return events


def test_the_step_is_the_median_of_the_later_half() -> None:
    events = step_events([9.0, 9.0, 9.0, 9.0, 3.0, 1.0, 2.0])
    (timeline,) = typical_steps(lambda: events)
    found = timeline.ranks[0]
    assert (timeline.step, found.begin_s, found.duration_s) == (6, 0.0, 2.0)
    assert [span.kind for span in found.spans] == ["forward", "backward"]
    assert found.spans[1].start_s == pytest.approx(0.5)


@pytest.mark.parametrize(("detailed", "step"), [("......x.", 6), ("x.......", 0), ("........", None)])
def test_only_steps_with_details_count(detailed: str, step: int | None) -> None:
    events = step_events([1.0] * 8, detailed=detailed)
    assert [timeline.step for timeline in typical_steps(lambda: events)] == ([] if step is None else [step])


def test_zero_is_when_the_first_rank_begins_and_spans_belong_to_their_rank() -> None:
    events = [*step_events([1.0, 1.0], begin_s=10.3), *step_events([1.0, 1.0], rank=1, begin_s=10.0)]
    (timeline,) = typical_steps(lambda: iter(events))
    assert [timeline.ranks[rank].begin_s for rank in (0, 1)] == pytest.approx([0.3, 0.0])
    assert [timeline.ranks[rank].spans[0].start_s for rank in (0, 1)] == pytest.approx([0.3, 0.0])
    assert all(len(found.spans) == 2 for found in timeline.ranks.values())


def test_what_belongs_to_a_step_is_told_by_time_not_by_number() -> None:
    # The runtime counts steps of a session, which need not begin with the contest's first.
    events = step_events([1.0, 1.0])
    about: dict[str, Scalar] = {"strategy": "ddp", "link": "100mbit", "bucket": 3, "wire_bytes": 7}
    events.append(Event("exchange", 51.2, 0, 99, 0.1, {**about}))
    events.append(Event("exchange", 50.2, 0, 1, 0.1, {**about}))
    (timeline,) = typical_steps(lambda: events)
    (exchange,) = (span for span in timeline.ranks[0].spans if span.kind == "exchange")
    assert timeline.step == 1
    assert (exchange.start_s, exchange.bucket, exchange.wire_bytes, exchange.age) == (pytest.approx(0.2), 3, 7, 0)


def test_where_most_steps_exchange_nothing_one_that_does_is_drawn() -> None:
    about: dict[str, Scalar] = {"strategy": "local_sgd(period=4)", "link": "100mbit"}
    durations_s = [1.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 6.0]
    events = [Event(e.kind, e.time_s, e.rank, e.step, e.duration_s, {**about}) for e in step_events(durations_s)]
    for step in (3, 7, 11):
        (iteration,) = (event for event in events if event.kind == "iteration" and event.step == step)
        events.append(Event("exchange", iteration.time_s + 0.9, 0, step, 0.1, {**about, "bucket": 0}))
    (timeline,) = typical_steps(lambda: events)
    assert timeline.step == 7, "of the two in the later half"


DEFERRED = "bsp / all_reduce / none / priority"


def deferred_steps(count: int, turn: int) -> list[Event]:
    """Steps of 1 s in turns: 0.4 s forward, which waits 0.1 s for bucket 1 and then for bucket 0 of the step before.

    Bucket 0 leaves in the backward pass and arrives 0.2 s into the next step; bucket 1 leaves with that step only and
    arrives earlier.
    """
    about: dict[str, Scalar] = {"strategy": DEFERRED, "link": "1gbit"}
    events: list[Event] = []
    for step in range(count):
        begin_s = 100.0 + step + 5 * (step // turn)
        events.append(Event("iteration", begin_s, 0, step, 1.0, {**about}))
        events.append(Event("forward", begin_s, 0, step, 0.4, {**about}))
        events.append(Event("backward", begin_s + 0.4, 0, step, 0.6, {**about}))
        # The session has counted ten steps before.
        events.append(Event("exchange", begin_s + 0.6, 0, step + 10, 0.6, {**about, "bucket": 0, "wire_bytes": 80}))
        events.append(Event("encode", begin_s + 1.0, 0, step + 10, 0.02, {**about, "bucket": 1}))
        events.append(Event("exchange", begin_s + 1.0, 0, step + 10, 0.1, {**about, "bucket": 1, "wire_bytes": 20}))
        if step % turn:
            events.append(Event("wait", begin_s, 0, step + 9, 0.1, {**about}))
            events.append(Event("wait", begin_s + 0.15, 0, step + 9, 0.05, {**about}))
    return events


def test_exchanges_that_outlast_their_step_are_drawn_in_the_next() -> None:
    (timeline,) = typical_steps(lambda: deferred_steps(10, turn=5))
    found = timeline.ranks[0]
    assert timeline.step in (6, 7, 8), "neither the first nor the last of a turn"
    assert found.duration_s == pytest.approx(1.0)

    def times(kind: str) -> list[tuple[float, float, int | None, int]]:
        spans = [span for span in found.spans if span.kind == kind]
        return [(round(span.start_s, 6), round(span.end_s, 6), span.bucket, span.age) for span in spans]

    assert times("exchange") == [(-0.4, 0.2, 0, -1), (0.0, 0.1, 1, -1), (0.6, 1.2, 0, 0), (1.0, 1.1, 1, 0)]
    assert times("encode") == [(0.0, 0.02, 1, -1), (1.0, 1.02, 1, 0)]
    # The first wait is for bucket 1 alone, though bucket 0 is in flight.
    assert times("wait") == [(0.0, 0.1, 1, 0), (0.15, 0.2, 0, 0), (1.0, 1.1, 1, 1), (1.15, 1.2, 0, 1)]
    # Of the next step what computes until the last exchange has ended.
    assert times("forward") == [(0.1, 0.15, None, 0), (0.2, 0.4, None, 0), (1.1, 1.15, None, 1)]
    assert times("backward") == [(0.4, 1.0, None, 0)]
    lanes = {(span.bucket, span.age): span.lane for span in found.spans if span.kind == "exchange"}
    assert lanes == {(0, -1): 0, (1, -1): 1, (0, 0): 0, (1, 0): 1}


def test_without_a_step_amid_others_any_will_do() -> None:
    (timeline,) = typical_steps(lambda: deferred_steps(2, turn=1))
    assert {span.age for span in timeline.ranks[0].spans} == {0}


def test_no_events_no_timelines() -> None:
    assert typical_steps(lambda: ()) == ()


def test_every_row_of_a_run_has_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", links=("100mbit", "1gbit"), num_ranks=3)
    timelines = typical_steps(run.events)
    assert {(at.link, at.strategy) for at in timelines} == {(row.link, row.strategy) for row in run.results().rows}
    assert len(timelines) == 2 * len(SIX)
    for timeline in timelines:
        assert list(timeline.ranks) == [0, 1, 2]
        kinds = {span.kind for span in timeline.ranks[1].spans}
        torch_only = {"forward", "backward", "optimizer"}
        assert kinds == (torch_only if timeline.strategy == TORCH_DDP else {*TRAINING_KINDS, *COMMUNICATION_KINDS})
        found = timeline.ranks[0]
        assert max(span.end_s for span in found.spans) <= found.duration_s + 0.01
        training = [span for span in found.spans if span.kind in TRAINING_KINDS]
        assert all(earlier.end_s <= later.start_s + 1e-6 for earlier, later in pairwise(training))


spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=40).map(
    lambda pairs: [(float(begin), float(begin + took)) for begin, took in sorted(pairs)]
)


@given(spans)
def test_no_lane_holds_two_that_overlap_and_no_lane_is_wasted(given_spans: list[tuple[float, float]]) -> None:
    lanes = first_free_lanes(given_spans)
    for lane in set(lanes):
        inside = [span for span, at in zip(given_spans, lanes, strict=True) if at == lane]
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(inside))
    most = max((sum(b <= begin < e for b, e in given_spans) for begin, _ in given_spans), default=0)
    # Spans without duration take a lane where another one is in flight.
    points = sum(begin == end for begin, end in given_spans)
    assert len(set(lanes)) <= most + points
