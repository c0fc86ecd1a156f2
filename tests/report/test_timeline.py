"""The typical step, and lanes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.core.event import Event, Scalar
from laconic.report.lanes import first_free_lanes
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
    assert (timeline.step, timeline.duration_s) == (6, 2.0)
    assert [span.kind for span in timeline.ranks[0]] == ["forward", "backward"]
    assert timeline.ranks[0][1].start_s == pytest.approx(0.5)


@pytest.mark.parametrize(("detailed", "step"), [("......x.", 6), ("x.......", 0), ("........", None)])
def test_only_steps_with_details_count(detailed: str, step: int | None) -> None:
    events = step_events([1.0] * 8, detailed=detailed)
    assert [timeline.step for timeline in typical_steps(lambda: events)] == ([] if step is None else [step])


def test_zero_is_when_the_first_rank_begins_and_spans_belong_to_their_rank() -> None:
    events = [*step_events([1.0, 1.0], begin_s=10.3), *step_events([1.0, 1.0], rank=1, begin_s=10.0)]
    (timeline,) = typical_steps(lambda: iter(events))
    assert [timeline.ranks[rank][0].start_s for rank in (0, 1)] == pytest.approx([0.3, 0.0])
    assert all(len(spans) == 2 for spans in timeline.ranks.values())


def test_what_belongs_to_a_step_is_told_by_time_not_by_number() -> None:
    # The runtime counts steps of a session, which need not begin with the contest's first.
    events = step_events([1.0, 1.0])
    about: dict[str, Scalar] = {"strategy": "ddp", "link": "100mbit", "bucket": 3, "wire_bytes": 7}
    events.append(Event("exchange", 51.2, 0, 99, 0.1, {**about}))
    events.append(Event("exchange", 50.2, 0, 1, 0.1, {**about}))
    (timeline,) = typical_steps(lambda: events)
    (exchange,) = (span for span in timeline.ranks[0] if span.kind == "exchange")
    assert timeline.step == 1
    assert (exchange.start_s, exchange.bucket, exchange.wire_bytes) == (pytest.approx(0.2), 3, 7)


def test_no_events_no_timelines() -> None:
    assert typical_steps(lambda: ()) == ()


def test_every_row_of_a_run_has_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", links=("100mbit", "1gbit"), num_ranks=3)
    timelines = typical_steps(run.events)
    assert {(at.link, at.strategy) for at in timelines} == {(row.link, row.strategy) for row in run.results().rows}
    assert len(timelines) == 2 * len(SIX)
    for timeline in timelines:
        assert list(timeline.ranks) == [0, 1, 2]
        kinds = {span.kind for span in timeline.ranks[1]}
        torch_only = {"forward", "backward", "optimizer"}
        assert kinds == (torch_only if timeline.strategy == TORCH_DDP else {*TRAINING_KINDS, *COMMUNICATION_KINDS})
        assert max(span.start_s + span.duration_s for span in timeline.ranks[0]) <= timeline.duration_s + 0.01


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
    # Spans without duration take a lane where another one is under way.
    points = sum(begin == end for begin, end in given_spans)
    assert len(set(lanes)) <= most + points
