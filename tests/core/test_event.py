"""Events: one JSON object per line, read back as written."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import laconic
from laconic.core.event import DiscardEvents, Event, EventList, EventLog, EventTee, read_events
from laconic.errors import LaconicError

FIXED = {"kind", "time_s", "rank", "step", "duration_s"}
NUMBERS = st.floats(allow_nan=False)
TIMES = st.floats(allow_nan=False, allow_infinity=False)
EVENTS = st.builds(
    Event,
    kind=st.text(),
    time_s=TIMES,
    rank=st.integers(0, 10**6),
    step=st.integers(0, 10**12),
    duration_s=TIMES,
    data=st.dictionaries(
        st.text().filter(lambda key: key not in FIXED),
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | NUMBERS | st.text(),
        max_size=4,
    ),
)


@given(EVENTS)
def test_json_round_trip_on_one_line(event: Event) -> None:
    line = event.to_json()
    assert len(line.splitlines()) == 1
    assert Event.from_json(line) == event
    assert Event.from_json(line + "\n") == event
    assert set(json.loads(line)) == FIXED | set(event.data)


@pytest.mark.parametrize("value", [torch.tensor(1.0), [1], {"a": 1}, object()])
def test_data_that_no_reader_takes_is_refused_when_written(value: Any) -> None:
    with pytest.raises(LaconicError, match=f"loss must be a text, a number.*got {type(value).__name__}.*float"):
        Event("iteration", 1.0, 2, 3, data={"loss": value}).to_json()


@pytest.mark.parametrize("key", sorted(FIXED))
def test_data_cannot_replace_a_fixed_key(key: str) -> None:
    with pytest.raises(LaconicError, match=key) as caught:
        Event("exchange", 1.0, 2, 3, data={key: 9}).to_json()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "",
        "{",
        "[]",
        "3",
        "null",
        '"text"',
        "{}",
        '{"kind":"a","time_s":0,"rank":0,"step":0}',
        '{"kind":"a","time_s":0,"rank":0,"duration_s":0}',
        '{"kind":"a","time_s":0,"rank":0,"step":0,"duration_s":0',
        '{"kind":3,"time_s":0,"rank":0,"step":0,"duration_s":0}',
        '{"kind":"a","time_s":"0","rank":0,"step":0,"duration_s":0}',
        '{"kind":"a","time_s":1e999,"rank":0,"step":0,"duration_s":0}',
        '{"kind":"a","time_s":0,"rank":0.5,"step":0,"duration_s":0}',
        '{"kind":"a","time_s":0,"rank":0,"step":true,"duration_s":0}',
        '{"kind":"a","time_s":0,"rank":0,"step":0,"duration_s":null}',
        '{"kind":"a","time_s":0,"rank":0,"step":0,"duration_s":0,"bucket":[1]}',
        '{"kind":"a","time_s":0,"rank":0,"step":0,"duration_s":0,"strategy":"\\ud800"}',
        f'{{"kind":"a","time_s":0,"rank":0,"step":{10**30},"duration_s":0}}',
        '{"kind":"a","time_s":0,"rank":0,"step":0,"duration_s":0}{}',
        "[" * 100_000,
        '{"a":' * 100_000,
    ],
)
def test_bad_lines(line: str) -> None:
    with pytest.raises(LaconicError, match="not an event record") as caught:
        Event.from_json(line)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@given(st.text())
def test_any_line_is_an_event_or_a_laconic_error(line: str) -> None:
    with pytest.raises(LaconicError):
        Event.from_json(line)


def test_log_appends_and_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    events = [
        Event("step", float(index), 0, index, 0.5, {"loss": index / 3, "note": "a\nb\u2028c"}) for index in range(5)
    ]
    with EventLog(file) as log:
        for event in events[:3]:
            log.write(event)
    with EventLog(str(file)) as log:
        for event in events[3:]:
            log.write(event)
    with file.open() as lines:
        assert list(read_events(lines)) == events
    assert list(read_events(["\n", events[0].to_json(), "  \n"])) == events[:1]


def test_a_written_event_is_in_the_file_at_once(tmp_path: Path) -> None:
    # A rank that is killed must leave what it wrote.
    log = EventLog(tmp_path / "events.jsonl")
    log.write(Event("step", 0.0, 0, 1))
    assert (tmp_path / "events.jsonl").read_text() == Event("step", 0.0, 0, 1).to_json() + "\n"
    log.close()


def test_reading_is_lazy_and_names_the_bad_line() -> None:
    good = Event("step", 0.0, 0, 1)
    events = read_events([good.to_json(), "broken"])
    assert next(events) == good
    with pytest.raises(LaconicError, match="broken"):
        next(events)


def test_closed_log(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.close()
    log.close()
    with pytest.raises(LaconicError, match=r"events\.jsonl is closed"):
        log.write(Event("step", 0.0, 0, 0))


def test_log_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(LaconicError, match=r"cannot write events to .*missing.*No such file"):
        EventLog(tmp_path / "missing" / "events.jsonl")
    with pytest.raises(LaconicError, match="directory"):
        EventLog(tmp_path)


@pytest.mark.parametrize("logs", [1, 2])
def test_whole_lines_from_several_threads(tmp_path: Path, logs: int) -> None:
    """Several threads on one log, and several logs on one file, as ranks of one machine may have it."""
    file = tmp_path / "events.jsonl"
    opened = [EventLog(file) for _ in range(logs)]
    start = threading.Barrier(4)

    def write(rank: int) -> None:
        start.wait()
        for step in range(300):
            opened[rank % logs].write(Event("step", step / 7, rank, step, data={"filler": "x" * (step % 97)}))

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in opened:
        log.close()
    with file.open() as lines:
        found = list(read_events(lines))
    assert len(found) == 4 * 300
    for rank in range(4):
        assert [event.step for event in found if event.rank == rank] == list(range(300))


def test_one_line_at_a_time_even_if_a_write_is_interrupted(tmp_path: Path) -> None:
    """On a file that gives way to other threads in the middle of a line."""
    pieces: list[str] = []

    class Slow:
        closed = False

        def write(self, text: str) -> None:
            for character in text:
                pieces.append(character)
                time.sleep(0)

    log = EventLog(tmp_path / "events.jsonl")
    log.close()
    log._file = Slow()  # type: ignore[assignment]
    start = threading.Barrier(4)

    def write(rank: int) -> None:
        start.wait()
        for step in range(20):
            log.write(Event("step", 0.0, rank, step))

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(read_events("".join(pieces).splitlines()))) == 80


def test_what_is_no_sink_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "events.jsonl"

    def refused(transport: laconic.Transport, sink: Any) -> None:
        laconic.attach(model, optimizer, "ddp", events=sink, transport=transport)

    with path.open("w") as file:
        for sink, words in [(str(path), "EventLog"), (path, "EventLog"), (file, "EventLog"), (EventList, "the class")]:
            with pytest.raises(LaconicError, match=f"events must be a sink.*{words}"):
                laconic.InProcessCluster(1).run(lambda transport, sink=sink: refused(transport, sink))
            with pytest.raises(LaconicError, match=f"events must be a sink.*{words}"):
                EventTee(EventList(), sink)


def test_list_and_discard() -> None:
    kept = EventList()
    event = Event("step", 0.0, 0, 0)
    kept.write(event)
    DiscardEvents().write(event)
    assert kept.events == [event]
