"""What a killed lab leaves behind is found and ended; what a running lab has is not touched."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.processes import Command, eventually, is_running

from laconic.cli import main
from laconic.lab import leftovers
from laconic.lab.leftovers import VARIABLE, end_leftovers, end_run, new_mark

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(90),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc"),
]

# A rank that starts a process in a session of its own, which ignores a polite request to end.
DETACHES = """
import os, subprocess, sys, time
child = subprocess.Popen(["sh", "-c", "trap '' TERM; exec sleep 70"], start_new_session=True)
name = f"{sys.argv[1]}/rank{os.environ['RANK']}"
open(name + ".part", "w").write(f"{os.getpid()} {child.pid}")
os.rename(name + ".part", name)
time.sleep(60)
"""


class Lab:
    """A lab in a process of its own, whose one rank has detached a child."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir()
        words = ["lab", "--hosts", "1", *options, "--", sys.executable, "-c", DETACHES, str(folder)]
        self.process = Command(words, folder / "output")
        assert eventually((folder / "rank0").exists, 40), "the rank never started"
        self.rank, self.detached = map(int, (folder / "rank0").read_text().split())
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.children = [int(child) for child in children]
        assert self.rank in self.children

    def end(self) -> None:
        self.process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.detached, signal.SIGKILL)


@pytest.fixture
def start_lab(tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    labs: list[Lab] = []

    def start(*options: str) -> Lab:
        labs.append(Lab(tmp_path / str(len(labs)), *options))
        return labs[-1]

    yield start
    for lab in labs:
        lab.end()


@pytest.mark.lab
def test_what_a_killed_lab_leaves_is_ended_and_a_running_lab_is_not(
    start_lab: Callable[..., Lab], capsys: pytest.CaptureFixture[str]
) -> None:
    killed, running = start_lab(), start_lab()
    host = Path(f"/proc/{killed.detached}/ns/net").readlink()
    killed.process.kill()
    # The rank and the keeper of the namespaces go by themselves; what was detached stays, and its host with it.
    assert eventually(lambda: not any(map(is_running, killed.children)))
    assert is_running(killed.detached)
    assert Path(f"/proc/{killed.detached}/ns/net").readlink() == host != Path("/proc/self/ns/net").readlink()

    assert main(["lab", "--clean"]) == 0
    told = capsys.readouterr().out
    assert f"{killed.detached}  {killed.process.pid}  sleep 70" in told
    assert not is_running(killed.detached)
    assert str(running.detached) not in told
    assert all(map(is_running, [running.process.pid, *running.children, running.detached]))
    assert len(running.children) == 2  # the rank and the keeper

    assert main(["lab", "--clean"]) == 0
    assert str(killed.detached) not in capsys.readouterr().out


@pytest.mark.lab
def test_ctrl_c_and_the_time_limit_leave_nothing(start_lab: Callable[..., Lab]) -> None:
    interrupted, late = start_lab(), start_lab("--timeout", "3s")
    interrupted.process.send_signal(signal.SIGINT)
    for lab, code in ((interrupted, 130), (late, 124)):
        assert lab.process.wait(30) == code
        assert not any(map(is_running, [*lab.children, lab.detached]))


@pytest.mark.dist
def test_ranks_without_virtual_hosts_die_with_their_lab_too(start_lab: Callable[..., Lab]) -> None:
    lab = start_lab("--links", "paced")
    lab.process.kill()
    assert eventually(lambda: not any(map(is_running, lab.children)))
    assert lab.detached in [leftover.pid for leftover in end_leftovers()]
    assert not is_running(lab.detached)


@contextlib.contextmanager
def sleeper(mark: str, user: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], env={VARIABLE: mark, "PATH": os.environ["PATH"]}, user=user)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.dist
def test_whose_lab_is_gone() -> None:
    own = new_mark()
    pid, ticks, _ = own.split("-")
    with (
        sleeper(f"{pid}-{int(ticks) + 1}-aaaa") as restarted,  # the number of the lab belongs to another process now
        sleeper(f"{2**22 + 1}-1-aaaa") as gone,  # larger than any process number
        sleeper(own) as mine,
        sleeper("something else") as foreign,
    ):
        ended = {leftover.pid: leftover for leftover in end_leftovers()}
        assert {restarted.pid, gone.pid} <= set(ended)
        assert ended[gone.pid].command == "sleep 60"
        assert ended[gone.pid].lab_pid == 2**22 + 1
        assert (restarted.wait(5), gone.wait(5)) == (-signal.SIGTERM, -signal.SIGTERM)
        assert mine.poll() is None
        assert foreign.poll() is None
        assert not {mine.pid, foreign.pid} & set(ended)


@pytest.mark.dist
def test_a_process_that_is_still_being_started_is_found() -> None:
    """Popen returns before the kernel shows the new program's environment: about one time in thirty."""
    mark = new_mark()
    for _ in range(300):
        with sleeper(mark) as process:
            assert leftovers._mark_of(Path(f"/proc/{process.pid}")) == mark


@pytest.mark.dist
def test_the_end_of_one_run_leaves_other_runs_of_the_same_process_alone() -> None:
    one, other = new_mark(), new_mark()
    with sleeper(one) as ended, sleeper(other) as left:
        assert [leftover.pid for leftover in end_run(one)] == [ended.pid]
        assert left.poll() is None


@pytest.mark.dist
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_processes_of_other_users_are_left_alone() -> None:
    with sleeper(f"{2**22 + 1}-1-aaaa", user=65534) as process:
        assert process.pid not in [leftover.pid for leftover in end_leftovers()]
        assert process.poll() is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--clean", "--", "true"], "--clean runs no command. Leave out the command"),
        (["--clean", "--hosts", "3"], "--hosts has no effect together with --clean"),
        (["--clean", "--ranks-per-host", "3"], "--ranks-per-host has no effect together with --clean"),
    ],
)
def test_clean_stands_alone(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", *words]) == 2
    assert told in capsys.readouterr().err


def test_nothing_left_behind_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.lab.leftovers.end_leftovers", list)
    assert main(["lab", "--clean"]) == 0
    assert capsys.readouterr().out == "nothing was left behind\n"
