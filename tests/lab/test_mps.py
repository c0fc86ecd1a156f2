"""The Multi-Process Service: a stand-in for its daemon shows how it is started, waited for and ended."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from laconic.errors import UsageError
from laconic.lab import mps
from laconic.lab.mps import CONTROL, shared_gpu

_DAEMON = """#!{python} -S
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if sys.argv[1:] == ["-f"]:
    if {fails}:
        pathlib.Path(os.environ["CUDA_MPS_LOG_DIRECTORY"], "control.log").write_text("no such device")
        sys.exit(3)
    child = subprocess.Popen(["sleep", "100"])  # as the daemon starts its server
    (folder / "pids").write_text(f"{{os.getpid()}} {{child.pid}}")
    (folder / "control").touch()
    while not (folder / "quit").exists():
        time.sleep(0.02)
else:
    (folder / "quit").write_text(sys.stdin.read())
"""


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def install(*, fails: bool = False, probe: str = "pass") -> None:
        program = tmp_path / CONTROL
        program.write_text(_DAEMON.format(python=sys.executable, fails=fails))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(mps, "_PROBE", probe)

    return install


def _running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_off() -> None:
    with shared_gpu("off") as sharing:
        assert not sharing.mps
        assert not sharing.environment
        assert str(sharing) == "taking turns on a GPU"


def test_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with shared_gpu("auto") as sharing:
        assert not sharing.mps
        assert sharing.reason == f"{CONTROL} is not installed"
    with (
        pytest.raises(
            UsageError, match=f"MPS cannot be used here: {CONTROL} is not installed. With --mps off, ranks take turns"
        ),
        shared_gpu("on"),
    ):
        pass


def test_a_daemon_of_its_own_that_ends_with_the_block(daemon) -> None:
    daemon()
    folders = set()
    for _ in range(2):
        with shared_gpu("on") as sharing:
            assert sharing.mps
            assert str(sharing) == "sharing a GPU through MPS"
            folder = Path(sharing.environment["CUDA_MPS_PIPE_DIRECTORY"])
            folders.add(folder)
            pids = [int(word) for word in (folder / "pids").read_text().split()]
            assert all(map(_running, pids))
        assert not any(map(_running, pids))
        assert not folder.exists()
    assert len(folders) == 2


def test_it_ends_with_an_error_too(daemon) -> None:
    daemon()
    pids: list[int] = []

    def fail_inside() -> None:
        with shared_gpu("auto") as sharing:
            words = Path(sharing.environment["CUDA_MPS_PIPE_DIRECTORY"], "pids").read_text().split()
            pids.extend(map(int, words))
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail_inside()
    assert pids
    assert not any(map(_running, pids))


def test_a_daemon_that_does_not_start(daemon) -> None:
    daemon(fails=True)
    with shared_gpu("auto") as sharing:
        assert not sharing.mps
        assert sharing.reason == f"{CONTROL} ended with 3: no such device"


def test_a_gpu_that_cannot_be_used_through_it(daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "_START_S", 1.5)
    daemon(probe="import sys; sys.exit('CUDA error 805')")
    began_s = time.monotonic()
    with shared_gpu("auto") as sharing:
        assert not sharing.mps
        assert "CUDA error 805" in sharing.reason
    assert time.monotonic() - began_s < 10
