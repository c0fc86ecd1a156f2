"""`laconic watch`: the present state, a log that grows, files that are no logs, and the ways to end."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.processes import getting_ctrl_c

from laconic.cli import main
from laconic.cli.watch import GrowingLog
from laconic.cli.watch_state import WatchState
from laconic.core.event import Event, EventLog

STRATEGY = "bsp / all_reduce / powersgd + error_feedback"


def session(step: int, rank: int = 0, wait_s: float = 0.25) -> list[Event]:
    """What a rank of a session writes in one step, half of which is communication on rank 0."""
    return [
        Event("exchange", 0.0, rank, step, 0.4, {"bucket": 0, "wire_bytes": 1024, "relative_error": 0.125}),
        Event("wait", 0.0, rank, step, wait_s),
        Event("step", 0.5 * step, rank, step, 0.5, {"sent_bytes": 1024 * (step + 1)}),
    ]


def attach(rank: int = 0) -> Event:
    return Event("attach", 0.0, rank, 0, 0.1, {"strategy": STRATEGY, "world_size": 2, "transport": "threads"})


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two ranks, ten steps; rank 1 waits less, because the other waits for it."""
    path = tmp_path / "events.jsonl"
    with EventLog(path) as file:
        for rank in (0, 1):
            file.write(attach(rank))
        for step in range(10):
            for event in (*session(step), *session(step, rank=1, wait_s=0.125)):
                file.write(event)
        file.write(Event("iteration", 0.0, 0, 9, 0.5, {"sent_bytes": 1024, "loss": 2.5}))
    return path


def test_once_prints_the_state_of_a_run(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (log, log.parent):
        assert main(["watch", str(place), "--once"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert f"{STRATEGY}, 2 ranks" in out
        words = " ".join(out.split())
        assert "step 9 2 steps/s compute 312.5 ms wait 187.5 ms (38%) 1.0 KiB/step loss 2.5 residual 12.5%" in words
        assert "slowest rank 1 (compute 375.0 ms)" in words
        assert "\x1b" not in out
        rows = [line.split() for line in out.splitlines()]
        assert ["1", "9", "500.0", "ms", "375.0", "ms", "125.0", "ms", "-", "-", "1.0", "KiB", "-", "12.5%"] in rows


def test_json_says_the_same(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(log), "--once", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert told | {"quiet_s": 0} == {
        "strategy": STRATEGY,
        "link": None,
        "world_size": 2,
        "step": 9,
        "steps_per_s": 2.0,
        "step_s": 0.5,
        "compute_s": 0.3125,
        "wait_s": 0.1875,
        "sent_bytes": 1024.0,
        "loss": 2.5,
        "relative_error": 0.125,
        "slowest_rank": 1,
        "slowest_compute_s": 0.375,
        "events": 63,
        "unreadable_lines": 0,
        "quiet_s": 0,
    }


def test_a_loss_that_diverged_is_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as file:
        file.write(Event("iteration", 0.0, 0, 0, 0.5, {"loss": float("nan")}))
    assert main(["watch", str(path), "--once", "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (told["step"], told["loss"]) == (0, None)


def test_the_turns_of_a_comparison_are_told_apart(tmp_path: Path) -> None:
    state = WatchState()
    for turn in range(2):
        for name, seconds in (("torch DDP", 2.0), (STRATEGY, 1.0)):
            for step in range(6 * turn, 6 * turn + 6):
                data = {"strategy": name, "link": "1gbit", "sent_bytes": 10, "loss": 3.0}
                state.take_line(Event("iteration", 0.0, 0, step, seconds, data).to_json())
    state.complete()
    summary = state.summary()
    assert (summary.strategy, summary.link, summary.step) == (STRATEGY, "1gbit", 11)
    assert (summary.step_s, summary.sent_bytes, summary.loss) == (1.0, 10, 3.0)
    assert summary.slowest_rank is None, "one rank is slower than no other"


def test_another_session_in_the_same_log_starts_anew() -> None:
    state = WatchState()
    for event in (attach(), *session(0), *session(1), attach(), *session(0)):
        state.take_line(event.to_json())
    state.complete()
    assert state.summary().step == 0
    assert len(state.ranks[0].recent) == 1


def test_a_log_is_followed_while_it_grows_and_when_it_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [event.to_json() for step in range(4) for event in session(step)]
    path.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])
    log = GrowingLog(path)
    assert log.read()
    assert log.state.num_events == 3
    assert not log.read()
    with path.open("a") as file:
        file.write(lines[3][20:] + "\n" + "\n".join(lines[4:]) + "\n")
    assert log.read()
    assert (log.state.num_events, log.state.num_unreadable, log.state.summary().step) == (12, 0, 3)
    path.write_text(lines[0] + "\n")
    assert log.read()
    assert log.state.num_events == 1


def test_many_ranks_are_cut_to_the_slowest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as file:
        for rank in range(40):
            for step in range(3):
                for event in session(step, rank, wait_s=0.01 * rank):
                    file.write(event)
    assert main(["watch", str(path), "--once"]) == 0
    out = capsys.readouterr().out
    assert "slowest rank 0 (compute 500.0 ms)" in " ".join(out.split())
    assert "and 24 ranks that compute faster" in out
    assert [line.split()[0] for line in out.splitlines() if line.endswith("12.5%")] == [str(n) for n in range(16)]


@pytest.mark.parametrize(
    ("content", "words", "told"),
    [
        (None, [], "there is no file"),
        (None, [], "events=laconic.EventLog"),
        ("# a title\nsome text\n", [], "is no event log: line 1 is not an event record: # a title"),
        ("{}\n", [], "Give a file that a laconic.EventLog has written."),
        ("", ["--every", "0s"], "--every must be longer than 0 s"),
        ("", ["--every", "soon"], "--every must be a time"),
    ],
)
def test_what_is_no_log_is_one_line_and_exit_2(
    content: str | None, words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    if content is not None:
        path.write_text(content)
    assert main(["watch", str(path), "--once", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err


def test_a_log_without_steps_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in ("", attach().to_json() + "\n"):
        (tmp_path / "log.jsonl").write_text(content)
        assert main(["watch", str(tmp_path / "log.jsonl"), "--once"]) == 0
        assert "no step yet" in capsys.readouterr().out


_GARBAGE = st.one_of(
    st.binary(max_size=60).map(lambda raw: raw.replace(b"\n", b" ")),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
    st.sampled_from([event.to_json() for event in session(3)]).map(lambda line: line[: len(line) // 2].encode()),
)
_ODD_EVENT = st.builds(
    Event,
    kind=st.sampled_from(["step", "iteration", "attach", "wait", "exchange", "other"]),
    time_s=st.floats(allow_nan=False, allow_infinity=False),
    rank=st.integers(-3, 3),
    step=st.integers(-5, 10**9),
    duration_s=st.floats(allow_nan=False, allow_infinity=False),
    data=st.dictionaries(
        st.sampled_from(["sent_bytes", "loss", "relative_error", "strategy", "link", "world_size"]),
        st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=5),
    ),
)


@given(st.lists(st.tuples(st.integers(0, 30), _GARBAGE), max_size=12))
@settings(max_examples=60, deadline=None)
def test_garbled_lines_are_counted_and_change_nothing(garbage: list[tuple[int, bytes]]) -> None:
    """Whatever stands between the events of a run, they are all understood."""
    lines = [event.to_json().encode() for step in range(8) for event in session(step)]
    garbled = list(lines)
    for place, line in garbage:
        garbled.insert(place, line)
    clean, dirty = WatchState(), WatchState()
    for state, text in ((clean, lines), (dirty, garbled)):
        for line in text:
            state.take_line(line.decode("utf-8", "replace"))
        state.complete()
    assert dirty.summary() == clean.summary()
    blank = sum(not line.decode("utf-8", "replace").strip() for _, line in garbage)
    assert dirty.num_unreadable == len(garbage) - blank


@given(st.lists(_ODD_EVENT, max_size=25))
@settings(max_examples=60, deadline=None)
def test_odd_events_never_end_the_view(events: list[Event]) -> None:
    state = WatchState()
    for event in events:
        state.take_line(event.to_json())
        state.summary()
    state.complete()
    assert state.summary().step >= -5


def _start(words: list[str], **options: Any) -> subprocess.Popen[str]:
    with getting_ctrl_c():
        return subprocess.Popen([sys.executable, "-m", "laconic", "watch", *words], **options)


@pytest.fixture(params=["as it is", "ignored"])
def _sigint(request: pytest.FixtureRequest) -> Iterator[None]:
    """SIGINT as it is here, and ignored, as in tests that a shell runs in the background."""
    before = signal.getsignal(signal.SIGINT)
    if request.param == "ignored":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_sigint")
def test_into_a_pipe_it_prints_lines_and_ends_with_ctrl_c(log: Path) -> None:
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1"}
    words, pipe = [str(log), "--every", "100ms"], subprocess.PIPE
    with _start(words, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        with EventLog(log) as file:
            for event in session(10):
                file.write(event)
        second = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert first.startswith("step 9  2 steps/s  ")
    assert second.startswith("step 10  ")
    assert "\x1b" not in first + second + rest
    assert err == ""


def test_on_a_terminal_it_draws_and_gives_the_cursor_back(log: Path) -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    process = _start([str(log)], stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    shown, until_s = b"", time.monotonic() + 20
    while b"slowest rank 1" not in shown and time.monotonic() < until_s:
        shown += os.read(leader, 65536)
    process.send_signal(signal.SIGINT)
    try:
        while chunk := os.read(leader, 65536):
            shown += chunk
    except OSError:  # Linux says so when the other end of a terminal is closed
        assert shown
    os.close(leader)
    assert process.wait(timeout=20) == 130
    assert b"Traceback" not in shown
    assert shown.count(b"\x1b[?25h") == shown.count(b"\x1b[?25l") == 1, "the cursor is hidden and shown again"
