"""Scripts that end without having detached: the process ends in order, and other ranks hear why."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(240)]

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


def test_another_rank_hears_which_error_ended_this_one(tmp_path: Path) -> None:
    (waiting, told), (failed, said) = _run("bsp", "error", tmp_path)
    assert waiting == failed == 1
    assert "rank 1 raised ValueError: no such sample" in told
    assert said.count("ValueError: no such sample") == 1
    assert "PeerLost" not in said


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
