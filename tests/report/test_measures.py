"""Rows and curves from events: every number against one worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from laconic.core.event import Event
from laconic.report import measures
from laconic.report.results import TORCH_DDP, Refused


def contest(strategy: str, step_s: list[float], losses: list[float | None], *, link: str = "1gbit") -> list[Event]:
    """One turn of a strategy: 0.1 s alone, 0.02 s optimizer, and encoding that reaches 0.01 s into the wait."""
    tag = {"strategy": strategy, "link": link}
    events = [Event("alone", 0.0, 0, 0, 0.1, {**tag})]
    now_s = 10.0
    for step, (took_s, loss) in enumerate(zip(step_s, losses, strict=True)):
        wait_s = now_s + 0.1
        events.append(Event("wait", wait_s, 0, step, took_s - 0.12, {**tag}))
        if strategy != TORCH_DDP:
            events.append(Event("encode", wait_s - 0.03, 0, step, 0.04, {**tag, "bucket": 0}))
        events.append(Event("optimizer", now_s + took_s - 0.02, 0, step, 0.02, {**tag}))
        events.append(Event("iteration", now_s, 0, step, took_s, {**tag, "loss": loss, "sent_bytes": 500}))
        events.append(Event("iteration", now_s, 1, step, 99.0, {**tag, "loss": loss, "sent_bytes": 500}))
        now_s += took_s
    about = {"num_steps": len(step_s), "kernel_bytes": 1010 * len(step_s), "counted_bytes": 1000 * len(step_s)}
    return [*events, Event("turn", 10.0, 0, len(step_s), now_s - 10.0, {**tag, **about, "predicted_bytes": 1000})]


def test_a_row_says_where_the_time_went() -> None:
    found = measures.recordings(
        contest(TORCH_DDP, [9.0, 9.0, 0.5, 0.4, 0.6], [5.0, 4.0, 3.0, 2.0, 1.0])
        + contest("bsp", [9.0, 9.0, 0.22, 0.2, 0.3], [5.0, 4.0, 3.0, 2.0, 1.5])
    )
    ddp, other = measures.rows(found, links="shaped", target_loss=2.5, names={"bsp": "short"})
    assert (ddp.strategy, other.strategy, other.name) == (TORCH_DDP, "bsp", "short")
    assert ddp.step_ms == pytest.approx(500), "the first two steps are warm-up; rank 1's times are not used"
    assert (ddp.step_ms_low, ddp.step_ms_high) == (pytest.approx(400), pytest.approx(600))
    assert ddp.exposed_ms == pytest.approx(500 - 100 - 20)
    assert ddp.encode_ms == 0
    assert other.step_ms == pytest.approx(220)
    assert other.encode_ms == pytest.approx(10), "only encoding inside the wait counts"
    assert other.exposed_ms == pytest.approx(220 - 100 - 20 - 10)
    for row in (ddp, other):
        assert row.compute_ms + row.encode_ms + row.exposed_ms == pytest.approx(row.step_ms)
        assert (row.wire_bytes_per_step, row.wire_bytes_source) == (1010, "kernel")
        assert (row.counted_bytes_per_step, row.predicted_bytes_per_step) == (1000, 1000)
    assert other.speedup_over_ddp == pytest.approx(500 / 220)
    assert (ddp.final_loss, other.final_loss) == (1.0, 1.5)
    assert ddp.seconds_to_target == pytest.approx(9 + 9 + 0.5 + 0.4), "the first step at or below 2.5 is the fourth"


def test_on_a_gpu_the_wall_clock_of_whole_turns_decides() -> None:
    *events, turn = contest("bsp", [9.0, 9.0, 0.22, 0.2, 0.3], [5.0, 4.0, 3.0, 2.0, 1.5])
    # The device needed 0.5 s more for what was in flight after the last of the five steps.
    wall_s = sum((9.0, 9.0, 0.22, 0.2, 0.3)) + 0.5
    turn = replace(turn, data={**turn.data, "wall_s": wall_s})
    (row,) = measures.rows(measures.recordings([*events, turn]), links="shaped", target_loss=None)
    assert row.step_ms == pytest.approx((0.22 + 0.2 + 0.3) / 3 * 1e3 + 100)
    assert row.compute_ms + row.encode_ms + row.exposed_ms == pytest.approx(row.step_ms)
    assert (row.step_ms_low, row.step_ms_high) == (pytest.approx(200), pytest.approx(300))


def test_what_was_refused() -> None:
    data = {"strategy": "powersgd", "link": "1gbit", "reason": "no matrix"}
    events = [*contest("bsp", [1.0], [1.0]), Event("refused", 0.0, 0, 0, data={**data})]
    assert [row.strategy for row in measures.rows(measures.recordings(events), links="shaped", target_loss=None)] == [
        "bsp"
    ]
    assert measures.refusals(events) == [
        Refused(strategy="powersgd", name="powersgd", link="1gbit", reason="no matrix")
    ]


def test_every_wait_of_a_step_counts_where_layers_wait_one_by_one() -> None:
    tag = {"strategy": "bsp / all_reduce / none / dear", "link": "1gbit"}
    events = [Event("alone", 0.0, 0, 0, 0.1, {**tag})]
    for step in range(4):
        begin_s = 10.0 + step
        events.append(Event("iteration", begin_s, 0, step, 0.5, {**tag, "loss": 1.0}))
        for number, wait_s in enumerate((0.1, 0.2)):
            at_s = begin_s + 0.2 * number
            events.append(Event("wait", at_s, 0, step, wait_s, {**tag}))
            events.append(Event("decode", at_s + 0.05, 0, step, 0.03, {**tag, "bucket": number}))
    (row,) = measures.rows(measures.recordings(events), links="shaped", target_loss=None)
    assert row.encode_ms == pytest.approx(2 * 30)
    assert row.exposed_ms == pytest.approx(500 - 100 - 2 * 30)


def test_curves_hold_training_time_and_bytes() -> None:
    (recording,) = measures.recordings(contest("bsp", [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]))
    curve = measures.curve(recording)
    assert curve.step == [1, 2, 3]
    assert curve.seconds == pytest.approx([1.0, 3.0, 6.0])
    assert curve.loss == [3.0, 2.0, 1.0]
    assert curve.wire_bytes == [1010, 2020, 3030]


def test_long_curves_are_thinned_and_end_at_the_end() -> None:
    (recording,) = measures.recordings(contest("bsp", [1.0] * 2500, [1.0] * 2500))
    curve = measures.curve(recording)
    assert len(curve.step) <= 1000
    assert curve.step[0] == 3
    assert all(len(series) == len(curve.step) for series in (curve.loss, curve.seconds, curve.wire_bytes))


def test_a_contest_that_was_cut_short_still_gives_rows() -> None:
    events = [event for event in contest("bsp", [0.3, 0.3], [2.0, None]) if event.kind != "turn"]
    (row,) = measures.rows(measures.recordings(events), links="paced", target_loss=None)
    assert row.steps == 2
    assert row.wire_bytes_per_step is None
    assert row.speedup_over_ddp is None, "nothing to compare with"
    assert row.final_loss is None, "a loss that is not a number is no loss"


def test_nothing_learnt_means_no_loss() -> None:
    (recording,) = measures.recordings(contest("bsp", [0.3] * 4, [None] * 4))
    (row,) = measures.rows([recording], links="shaped", target_loss=None)
    assert row.final_loss is None
    assert measures.curve(recording).loss == []


def test_loss_at_equal_steps_is_taken_where_the_slowest_stopped() -> None:
    found = measures.recordings(
        contest(TORCH_DDP, [0.5] * 3, [3.0, 2.0, 1.0]) + contest("bsp", [0.3] * 5, [3.0, 2.0, 1.1, 0.9, 0.8])
    )
    ddp, other = measures.rows(found, links="shaped", target_loss=None)
    assert (other.final_loss, other.loss_at_equal_steps) == (0.8, 1.1)
    assert ddp.loss_at_equal_steps == 1.0


def test_the_default_target_is_within_reach() -> None:
    losses: list[float | None] = [10.0 - step for step in range(10)]
    found = measures.recordings(contest(TORCH_DDP, [0.5] * 10, losses))
    assert measures.default_target(found) == 3.0, "after eight of ten steps"
    assert measures.default_target([]) is None
    assert not math.isnan(measures.default_target(found) or math.nan)
