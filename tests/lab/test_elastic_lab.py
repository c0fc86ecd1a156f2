"""Faults on virtual hosts: real processes are killed, frozen and cut off, training goes on, and the report says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laconic.cli import main

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

SCRIPT = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
import laconic

torch.manual_seed(0)
data = TensorDataset(torch.randn(480, 8), torch.randn(480, 1))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
elastic = laconic.Elastic(min_ranks=1, max_ranks=6)
with laconic.attach(model, optimizer, "bsp", elastic=elastic, timeout_s=60) as session:
    for inputs, targets in session.batches(DataLoader(data, batch_size=48, shuffle=True), epochs=10**6):
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        last = session.views[-1]
        if session.world_size == 2 and last.view.number and session.step >= last.step + 20:
            break  # the host that was cut off is back
"""


def lab(tmp_path: Path, *words: str, script: str = SCRIPT, hosts: int = 2) -> int:
    path = tmp_path / "train.py"
    path.write_text(script, encoding="utf-8")
    folder = str(tmp_path / "run")
    options = ["--hosts", str(hosts), "--bandwidth", "1gbit", "--timeout", "200s", "--output", folder]
    return main(["lab", *options, *words, "--", str(path)])


@pytest.mark.slow
def test_training_goes_on_without_a_host_whose_cable_is_pulled(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = ["--slow", "rank=0,3x at=0.1s for=0.5s", "--cut-link", "1 at=1s for=3s"]
    code = lab(tmp_path, *faults)
    said = capfd.readouterr().out
    assert code == 0, said
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0
    (run,) = json.loads(capfd.readouterr().out)["runs"]
    cut, back = run["changes"]
    assert (cut["died"], cut["num_ranks"]) == (["host1.0"], 1)
    assert "said nothing for 1.5 s" in cut["why"]
    assert cut["fault"] == '--cut-link "1 at=1s for=3s"'
    # Its own process was fenced and replaced when the link was mended; 1.5 s is what a silent host is given.
    assert (back["joined"], back["num_ranks"]) == (["host1.1"], 2)
    assert 1.0 < cut["lost_s"] < 20
    assert 0 < run["goodput"] < 1
    slow, pulled = run["faults"]
    assert (slow["view"], pulled["view"]) == (None, 1)


@pytest.mark.slow
def test_the_processes_of_a_replica_die_and_are_replaced_together(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sharded = SCRIPT.replace("model = torch.nn.Linear(8, 1)", "model = torch.nn.Linear(8, 2)").replace(
        "optimizer =", "torch.distributed.init_process_group('gloo')\nfully_shard(model)\noptimizer ="
    )
    script = "from torch.distributed.fsdp import fully_shard\n" + sharded
    words = ["--ranks-per-host", "2", "--ranks-per-replica", "2", "--kill", "rank=1 at=1s"]
    assert lab(tmp_path, *words, script=script) == 0, capfd.readouterr().out
    capfd.readouterr()
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0
    (run,) = json.loads(capfd.readouterr().out)["runs"]
    killed, back = run["changes"]
    host = killed["died"][0].partition(".")[0]
    assert (sorted(killed["died"]), killed["num_ranks"]) == ([f"{host}.0", f"{host}.1"], 2)
    assert (sorted(back["joined"]), back["num_ranks"]) == ([f"{host}.2", f"{host}.3"], 4)


@pytest.mark.slow
def test_faults_without_effect_are_reported_when_the_job_has_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert lab(tmp_path, "--kill", "rank=0 at=0.5s", script="print('not elastic')", hosts=1) == 2
    said = capfd.readouterr().out
    assert "[host0.0] not elastic" in said
    assert '--kill "rank=0 at=500ms" had no effect: no process became a rank of elastic training' in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--kill", "rank=9"], "there is no rank 9; ranks are numbered 0 to 1"),
        (["--kill", "rank=1", "--links", "paced"], "needs shaped links"),
        (["--seed", "3"], "has no effect without a fault"),
        (["--ranks-per-replica", "2"], "has no effect without a fault"),
        (["--kill", "rank=1", "--ranks-per-replica", "2"], "--ranks-per-replica must divide --ranks-per-host 1"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    words: list[str], told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert lab(tmp_path, *words) == 2
    assert told in capfd.readouterr().err
