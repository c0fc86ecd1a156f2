"""Scripts that end without having detached: the process ends in order, and other ranks hear why."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import CommunicationError
from laconic.runtime import session as session_module
from tests.core.sockets import nothing_left
from tests.processes import ROOT
from tests.runtime.replicas import mlp, sgd
from tests.runtime.servers.one_worker import steps

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

_SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist, torch.nn as nn
import laconic
strategy, end = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
session = laconic.attach(model, optimizer, strategy, timeout_s=60)
for step in range(30 if end == "uneven" and rank == 0 else 20):
    optimizer.zero_grad()
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    if end == "error" and step == 10 and rank == 1:
        raise ValueError("no such sample")
if end == "forks" and os.fork() == 0:
    sys.exit(0)
if end == "later" and rank == 0:
    time.sleep(3)
if end == "destroys":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("strategy", ["asp / parameter_server", "asp / gossip", "bsp / bounded_loss"])
def test_at_the_end_of_a_script_ranks_that_continue_are_served_for_a_while_only(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_AT_EXIT_S", 0.3)
    trained, left = threading.Barrier(2), threading.Event()

    def one(transport: InProcessTransport) -> float:
        model = mlp()
        optimizer = sgd(model)
        session = laconic.attach(model, optimizer, strategy, transport=transport)
        steps(model, optimizer, 2, rank=transport.rank)
        trained.wait(20)
        began_s = time.monotonic()
        if transport.rank == 1:
            assert left.wait(20), "rank 0 waited for this one"
            session.__exit__(CommunicationError, CommunicationError("rank 0 is gone"), None)
        else:
            session._leave(at_exit=True)
            left.set()
        return time.monotonic() - began_s

    with nothing_left():
        took_s = laconic.InProcessCluster(2, timeout_s=10).run(one)[0]
    assert 0.3 <= took_s < 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "end"),
    [
        ("bsp / gossip", "at once"),
        ("bsp / gossip", "destroys"),
        ("bsp / all_reduce / none / dear", "later"),
        ("ssp", "forks"),
    ],
)
def test_the_process_ends_in_order(strategy: str, end: str, tmp_path: Path) -> None:
    for code, text in _run(strategy, end, tmp_path):
        assert code == 0, text
        assert "terminate called" not in text
        assert "Traceback" not in text


@pytest.mark.slow
def test_another_rank_hears_which_error_ended_this_one(tmp_path: Path) -> None:
    (waiting, told), (failed, said) = _run("bsp", "error", tmp_path)
    assert waiting == failed == 1
    assert "rank 1 raised ValueError: no such sample" in told
    assert said.count("ValueError: no such sample") == 1
    assert "PeerLost" not in said


@pytest.mark.slow
def test_another_rank_hears_that_this_one_has_made_all_its_steps(tmp_path: Path) -> None:
    (failed, said), (ended, _) = _run("bsp", "uneven", tmp_path)
    assert ended == 0
    assert failed == 1
    assert "rank 1 has detached: ranks must make the same number of steps" in said


def _run(strategy: str, end: str, folder: Path) -> list[tuple[int, str]]:
    """Exit code and output of two processes that an interpreter ends, unlike those of multiprocessing."""
    path = folder / "train.py"
    path.write_text(_SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **place, "PYTHONPATH": str(ROOT / "src")}
    processes = [
        subprocess.Popen(
            [sys.executable, str(path), strategy, end],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, text) for process, text in zip(processes, texts, strict=True)]
