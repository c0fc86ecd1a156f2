"""The trace as Perfetto expects it: named processes and threads, spans of one thread never cross."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest

from laconic.core.event import Event, Scalar
from laconic.report.perfetto import trace
from tests.report.run_folders import SIX, make_run

ABOUT: dict[str, Scalar] = {"strategy": "ddp", "link": "100mbit"}


def records(events: list[Event]) -> list[dict[str, Any]]:
    document = json.loads(json.dumps(trace(events), allow_nan=False))
    assert document["displayTimeUnit"] == "ms"
    return cast(list[dict[str, Any]], document["traceEvents"])


def threads(found: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    """(process, thread) -> "rank 0: training"."""
    processes = {record["pid"]: record["args"]["name"] for record in found if record["name"] == "process_name"}
    return {
        (record["pid"], record["tid"]): f"{processes[record['pid']]}: {record['args']['name']}"
        for record in found
        if record["name"] == "thread_name"
    }


def by_thread(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = threads(found)
    spans = defaultdict(list)
    for record in found:
        if record["ph"] == "X":
            spans[names[record["pid"], record["tid"]]].append(record)
    return spans


def one_step() -> list[Event]:
    return [
        Event("iteration", 7.0, 0, 4, 0.5, {**ABOUT, "loss": math.nan, "sent_bytes": 10}),
        Event("forward", 7.0, 0, 4, 0.1, {**ABOUT}),
        Event("backward", 7.1, 0, 4, 0.3, {**ABOUT}),
        Event("wait", 7.3, 0, 4, 0.1, {**ABOUT}),
        Event("optimizer", 7.4, 0, 4, 0.1, {**ABOUT}),
        Event("encode", 7.15, 0, 4, 0.01, {**ABOUT, "bucket": 3}),
        Event("exchange", 7.15, 0, 4, 0.2, {**ABOUT, "bucket": 3, "wire_bytes": 6}),
        Event("exchange", 7.25, 0, 4, 0.14, {**ABOUT, "bucket": 2, "wire_bytes": 4}),
        Event("turn", 6.5, 0, 4, 1.5, {**ABOUT, "num_steps": 1, "kernel_bytes": None}),
        Event("step", 7.0, 0, 4, 0.5, {**ABOUT}),
        Event("forward", 6.9, 1, 4, 0.1, {**ABOUT}),
    ]


def test_a_step_by_hand() -> None:
    found = records(one_step())
    spans = {where: [span["name"] for span in inside] for where, inside in by_thread(found).items()}
    assert spans == {
        "rank 0: turns": ["ddp on 100mbit"],
        "rank 0: training": ["step 4", "forward", "backward", "wait, ended by bucket 2", "optimizer"],
        "rank 0: encode and decode": ["encode bucket 3"],
        "rank 0: exchanges": ["exchange of bucket 3"],
        "rank 0: exchanges 2": ["exchange of bucket 2"],
        "rank 1: training": ["forward"],
    }
    (exchange,) = (span for span in found if span["name"] == "exchange of bucket 3")
    assert (exchange["ts"], exchange["dur"]) == (pytest.approx(650_000.0), pytest.approx(200_000.0))
    assert exchange["args"] == {"step": 4, "bucket": 3, "wire_bytes": 6, **ABOUT}
    (iteration,) = (span for span in found if span["name"] == "step 4")
    assert iteration["args"]["loss"] == "nan"


def test_halves_are_told_apart_and_a_wait_that_nothing_ended_has_no_bucket() -> None:
    events = [
        Event("exchange", 1.0, 0, 0, 0.1, {**ABOUT, "bucket": 5, "half": 1}),
        Event("exchange", 2.0, 0, 0, 0.1, {**ABOUT, "bucket": 5, "half": 2}),
        Event("wait", 1.5, 0, 0, 0.1, {**ABOUT}),
        Event("wait", 2.0, 0, 0, 0.1, {**ABOUT}),
    ]
    names = {span["name"] for span in records(events) if span["ph"] == "X"}
    exchanges = {"exchange of bucket 5, first half", "exchange of bucket 5, second half"}
    assert names == {*exchanges, "wait", "wait, ended by bucket 5"}


def test_processes_and_threads_have_names_of_their_own_and_a_place() -> None:
    found = records(one_step())
    keys = list(threads(found))
    assert len({thread for _, thread in keys}) == len(keys)
    assert 0 not in {process for process, _ in keys}
    order = {record["pid"]: record["args"]["sort_index"] for record in found if record["name"] == "process_sort_index"}
    assert order == {1: 0, 2: 1}
    places = {record["tid"]: record["args"]["sort_index"] for record in found if record["name"] == "thread_sort_index"}
    assert set(places) == {thread for _, thread in keys}


def test_no_events_make_an_empty_trace() -> None:
    assert trace([]) == {"displayTimeUnit": "ms", "traceEvents": []}


def test_spans_of_one_thread_nest_or_follow_in_a_whole_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_ranks=3, num_buckets=7)
    found = records(list(run.events()))
    spans = by_thread(found)
    assert {where.partition(":")[0] for where in spans} == {"rank 0", "rank 1", "rank 2"}
    assert len(spans["rank 0: turns"]) == len(SIX)
    assert "rank 0: exchanges 2" in spans
    for where, inside in spans.items():
        around: list[float] = []
        for span in inside:
            end = round(span["ts"] + span["dur"], 3)
            while around and around[-1] <= span["ts"]:
                around.pop()
            assert not around or end <= around[-1], (where, span)
            around.append(end)
            assert len(around) == 1 or "training" in where or "turns" in where
    waits = [span for span in spans["rank 0: training"] if span["name"].startswith("wait, ended by bucket")]
    assert waits
    assert min(span["ts"] for span in found if span["ph"] == "X") == 0


def test_rounding_never_makes_a_part_outlast_the_whole() -> None:
    events = [
        Event("backward", 1.0, 0, 0, 0.1234567891, {**ABOUT}),
        Event("wait", 1.1, 0, 0, 0.0234567899, {**ABOUT}),
    ]
    whole, part = (span for span in records(events) if span["ph"] == "X")
    assert part["ts"] + part["dur"] <= whole["ts"] + whole["dur"] + 1e-9
