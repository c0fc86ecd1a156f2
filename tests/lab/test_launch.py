"""Starting ranks on this machine: environment, output, failure, time limit; nothing is left running."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest
from tests.processes import Command, eventually, is_running

from laconic.errors import LaconicError
from laconic.lab import launch
from laconic.lab.launch import last_words, places_here, run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(60)]


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def test_every_rank_gets_torchruns_environment() -> None:
    lines: dict[int, str] = {}
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "EXTRA"]
    run_ranks(
        python(f"import os; print(*(os.environ[name] for name in {names}))"),
        places_here(3),
        timeout_s=20,
        environment={"EXTRA": "more"},
        on_line=lines.__setitem__,
    )
    assert lines == {rank: f"{rank} {rank} 3 3 0 127.0.0.1 more" for rank in range(3)}


def test_the_first_rank_that_fails_is_named_and_the_others_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 2.0)
    script = f"""
import os, sys, time
open(f"{tmp_path}/" + os.environ["RANK"], "w").write(str(os.getpid()))
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    print("no such file: data.bin")
    sys.exit(3)
time.sleep(60)
"""
    began_s = time.monotonic()
    with pytest.raises(
        LaconicError, match=r"rank 1 of 3 ended with exit code 3; it last said: no such file: data\.bin"
    ):
        run_ranks(python(script), places_here(3), timeout_s=50)
    assert time.monotonic() - began_s < 20
    assert not [rank for rank in range(3) if is_running(int((tmp_path / str(rank)).read_text()))]


def test_a_signal_is_named() -> None:
    with pytest.raises(LaconicError, match="signal SIGKILL"):
        run_ranks(python("import os; os.kill(os.getpid(), 9)"), places_here(1), timeout_s=20)


@pytest.mark.slow
def test_the_time_limit_ends_ranks_that_ignore_requests() -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(60)"
    with pytest.raises(LaconicError, match=r"rank 0, 1 did not end within 1\.5 s"):
        run_ranks(python(script), places_here(2), timeout_s=1.5)


def test_what_cannot_be_started() -> None:
    with pytest.raises(LaconicError, match="cannot start no-such-program"):
        run_ranks(["no-such-program"], places_here(1), timeout_s=5)
    with pytest.raises(LaconicError, match="number of ranks must be >= 1, got 0"):
        run_ranks(["true"], places_here(0), timeout_s=5)


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    body = f"import os, time; open('{tmp_path}/' + os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(60)"
    words = ["lab", "--links", "paced", "--hosts", "2", "--", *python(body)]
    with Command(words, tmp_path / "output") as launcher:
        ranks = [tmp_path / str(rank) for rank in range(2)]
        assert eventually(lambda: all(path.exists() and path.read_text() for path in ranks)), "the ranks never started"
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(20) == 130
    assert not [path for path in ranks if is_running(int(path.read_text()))]


def test_a_pace_in_the_callers_shell_does_not_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACONIC_PACE", "1mbit")
    lines: dict[int, str] = {}
    script = "import os; print(os.environ.get('LACONIC_PACE'))"
    run_ranks(python(script), places_here(1), timeout_s=20, on_line=lines.__setitem__)
    assert lines == {0: "None"}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "nothing"),
        (["one", "two", " "], "two"),
        (
            [
                "[rank0]: Traceback (most recent call last):",
                '[rank0]:   File "train.py", line 3, in <module>',
                "[rank0]: KeyError: 'lr'",
                "server 0 of rank 0: server 0 of rank 0 ends, because that rank has ended",
            ],
            "KeyError: 'lr'",
        ),
        (["Traceback (most recent call last):", '  File "x.py", line 1'], '  File "x.py", line 1'),
    ],
)
def test_the_last_words_are_the_exception_not_what_others_said_after_it(lines: list[str], words: str) -> None:
    assert last_words(lines) == words
