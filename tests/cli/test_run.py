"""`laconic run` starts processes, replaces those that are killed, and says why a job ended."""

from __future__ import annotations

import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.processes import Command, eventually
from tests.website.blocks import blocks

from laconic.cli.dispatch import main
from laconic.cli.options.run import Arguments

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nproc", "2"], "nothing to run"),
        (["--nproc", "0", "train.py"], "--nproc must be >= 1"),
        (["--min", "3", "--max", "2", "train.py"], "--max >= --min"),
        (["--listen", "here:there", "train.py"], "--listen must be ADDRESS[:PORT]"),
        (["--join", "127.0.0.1", "train.py"], "--join must be ADDRESS:PORT"),
        (["--join", "127.0.0.1:1", "--min", "2", "train.py"], "--min has no effect together with --join"),
        (["--join", "127.0.0.1:1", "--on-error", "replace", "train.py"], "--on-error has no effect together with"),
        (["--nprocs", "2", "train.py", "--nproc", "2"], 'no option "--nprocs". Did you mean "--nproc"?'),
        (["--nproc", "3", "--ranks-per-replica", "2", "train.py"], "--ranks-per-replica must divide --nproc 3"),
        (["--ranks-per-replica", "0", "train.py"], "--ranks-per-replica must divide --nproc 1"),
        (["--wait-for", "0", "train.py"], "--wait-for must be >= 1, got 0"),
        (["--max-restarts", "-1", "train.py"], "--max-restarts must be >= 0, got -1"),
        (["--nproc", "2", "--min", "3", "train.py"], "begins with 2 and needs --min 3, so it would end at once"),
        (["--nproc", "4", "--ranks-per-replica", "2", "--min", "3", "train.py"], "Give --wait-for 3 to wait for"),
        (["--listen", "127.0.0.1:99999", "train.py"], "--listen: a port is a number up to 65535, got 99999"),
        (["--listen", "127.0.0.1:\u00b2", "train.py"], "--listen must be ADDRESS[:PORT]"),
        (["--join", "127.0.0.1:0", "train.py"], "--join: a port is a number up to 65535, got 0"),
        (["--listen", "256.1.1.1", "train.py"], '--listen: no host "256.1.1.1" is known here'),
        (["--join", "256.1.1.1:29500", "train.py"], '--join: no host "256.1.1.1" is known here'),
    ],
)
def test_what_cannot_be_done_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    assert says in capsys.readouterr().err


def test_an_address_without_a_job_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("laconic.cli.run._MEETING", timedelta(seconds=1))
    monkeypatch.setattr("laconic.cli.run._ANSWER", timedelta(seconds=1))
    with socket.socket() as nobody:  # bound, so that no other program listens there
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        assert main(["run", "--join", address, "train.py"]) == 2
        assert f"run: no job was found at {address}" in capsys.readouterr().err
    another = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{another.port}"
    assert main(["run", "--join", address, "train.py"]) == 2
    assert f"run: no job was found at {address}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["--nproc", "2", "train.py", "--epochs", "3", "--help"], ["train.py", "--epochs", "3", "--help"]),
        (["--nproc=2", "train.py", "--nproc", "5", "--", "-x"], ["train.py", "--nproc", "5", "--", "-x"]),
        (["--nproc", "2", "--", "sh", "-c", "true"], ["sh", "-c", "true"]),
        (["--nproc", "2", "a b.py"], ["a b.py"]),
    ],
)
def test_all_after_the_script_belongs_to_it(
    words: list[str], given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Arguments] = []
    monkeypatch.setattr("laconic.cli.run.run", lambda arguments: seen.append(arguments) or 0)
    assert main(["run", *words]) == 0
    assert list(seen[0].command) == given
    assert seen[0].nproc == 2


def test_killed_processes_are_replaced_until_all_have_ended(tmp_path: Path) -> None:
    count = tmp_path / "count"
    script = (
        "import os, pathlib, signal\n"
        f"path = pathlib.Path({str(count)!r})\n"
        "assert os.environ['LOCAL_RANK'] == '0' and 'RANK' not in os.environ\n"
        "started = int(path.read_text()) + 1 if path.exists() else 1\n"
        "path.write_text(str(started))\n"
        "if started < 3: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with Command(["run", "--", sys.executable, "-c", script], tmp_path / "run") as job:
        assert job.wait(60) == 0
        assert "worker 0.0 was ended by SIGKILL" in job.stderr
        assert "worker 0.2 takes its place" in job.stderr
    assert count.read_text() == "3"


@pytest.mark.slow
def test_the_script_of_the_documentation(tmp_path: Path) -> None:
    (block,) = [block for block in blocks("python") if block.page == "docs/elastic.md" and block.file_name]
    script = tmp_path / block.file_name
    script.write_text(block.code + "assert session.views and session.world_size == 2\n")
    with Command(["run", "--nproc", "2", "--min", "2", str(script)], tmp_path / "run") as job:
        assert job.wait(90) == 0, job.stderr


@pytest.mark.slow
def test_the_example_of_sharded_models(tmp_path: Path) -> None:
    words = ["--nproc", "4", "--ranks-per-replica", "2", "examples/elastic_sharded.py", "--steps", "32"]
    with Command(["run", *words], tmp_path) as job:
        assert job.wait(120) == 0, job.stderr
        assert "view 0: 4 ranks in 2 replicas" in job.stderr
        assert any("step 32: loss" in path.read_text() for path in tmp_path.glob("*out*"))


_ONE_RAISES = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset
import laconic

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(480, 8), torch.randn(480, 1))
with laconic.attach(model, optimizer, "bsp", elastic=laconic.Elastic(max_ranks=4), timeout_s=60) as session:
    for inputs, targets in session.batches(DataLoader(data, batch_size=48), epochs=10**6):
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if os.environ["LACONIC_WORKER"] == "0.1" and session.step == 3:
            raise ValueError("a mistake on one rank")
        last = session.views[-1]
        if session.world_size == 2 and last.view.number and session.step >= last.step + 3:
            break  # it has been replaced
"""


@pytest.mark.slow
def test_a_rank_whose_script_raises_is_replaced_if_that_is_wanted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_ONE_RAISES)
    with Command(["run", "--nproc", "2", "--on-error", "replace", str(script)], tmp_path / "run") as job:
        assert job.wait(120) == 0, job.stderr
        assert "view 1: 1 ranks: 0.0 (worker 0.1 raised ValueError: a mistake on one rank)" in job.stderr
        assert "worker 0.2 takes its place" in job.stderr


_NEVER_DETACHES = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import laconic

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(480, 8), torch.randn(480, 1))
session = laconic.attach(model, optimizer, "bsp", elastic=laconic.Elastic(max_ranks=2), timeout_s=60)
for inputs, targets in session.batches(DataLoader(data, batch_size=48)):
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
"""
_EXITS_INSIDE = (
    _NEVER_DETACHES
    + """
with session:
    sys.exit(0)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("script", [_NEVER_DETACHES, _EXITS_INSIDE], ids=["never detaches", "sys.exit(0)"])
def test_a_script_that_ends_without_an_error_has_ended_in_order(script: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(script)
    with Command(["run", "--nproc", "2", "--min", "2", str(path)], tmp_path / "run") as job:
        assert job.wait(120) == 0, job.stderr
        assert "takes its place" not in job.stderr


@pytest.mark.slow
def test_an_error_of_the_script_ends_the_job(tmp_path: Path) -> None:
    script = "import os, sys, time\nif os.environ['LOCAL_RANK'] == '1': sys.exit(3)\ntime.sleep(60)"
    with Command(["run", "--nproc", "2", "--", sys.executable, "-c", script], tmp_path) as job:
        assert job.wait(60) == 2
        assert "worker 0.1 ended with exit code 3, so the job has ended" in job.stderr


def test_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"import os, pathlib, time\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
    with Command(["run", "--", sys.executable, "-c", script], tmp_path / "run") as job:
        assert eventually(lambda: pid.exists() and bool(pid.read_text()))
        job.send_signal(signal.SIGINT)
        assert job.wait(60) == 130
    assert not Path(f"/proc/{pid.read_text()}").exists()


@pytest.mark.slow
def test_a_host_that_has_joined_says_when_the_first_host_is_gone(tmp_path: Path) -> None:
    started, stop = tmp_path / "started", tmp_path / "stop"
    script = (
        "import pathlib, sys, time\n"
        f"pathlib.Path({str(started)!r}).touch()\n"
        f"while not pathlib.Path({str(stop)!r}).exists(): time.sleep(0.05)\n"
        "sys.exit(1)\n"
    )
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with Command(["run", "--on-error", "replace", "--", *sleep], tmp_path / "first") as first:
        assert eventually(lambda: "laconic run --join" in first.stderr)
        address = first.stderr.split("laconic run --join ")[1].split()[0]
        words = ["run", "--join", address, "--", sys.executable, "-c", script]
        with Command(words, tmp_path / "second") as second:
            assert eventually(started.exists)
            first.kill()
            stop.touch()
            assert second.wait(60) == 2
            assert "the host that started the job is gone" in second.stderr
            assert "takes its place" not in second.stderr
