"""An architecture with servers from somebody else's package: it trains, is simulated and explained like ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import laconic
from laconic.architecture import ARCHITECTURES, Architecture, ParameterServer
from laconic.cli.dispatch import main
from laconic.experiments.verification import verify_on_threads
from laconic.simulator import simulate
from laconic.strategy import Strategy
from tests.runtime.replicas import assert_equal, loop, mlp, mlp_loss, reference, train
from tests.simulator.jobs import hosts, job

PAGE = Path(__file__).resolve().parents[2] / "docs" / "writing-a-method.md"
ONE_SERVER = "parameter_server(shards=1)"
JOB = job((1e-3, 2e-3, 400_000), (1e-3, 2e-3, 800_000))


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The example of the documentation, as a package with an entry point."""
    place = tmp_path_factory.mktemp("site")
    codes = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    info = place / "central-1.0.dist-info"
    info.mkdir()
    (place / "central.py").write_text(next(code for code in codes if "class Central" in code), encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: central\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[laconic.architecture]\ncentral = central:Central\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        patch.setattr(ARCHITECTURES, "_plugins_found", False)
        patch.setattr(ARCHITECTURES, "_methods", dict(ARCHITECTURES._methods))
        yield place
    sys.modules.pop("central", None)


def test_it_is_no_parameter_server() -> None:
    method = ARCHITECTURES.lookup("central")
    assert method.__bases__ == (Architecture,)
    assert not issubclass(method, ParameterServer)
    assert method().has_servers


def test_it_trains_as_ddp_does() -> None:
    model = mlp()
    for state in train(model, "bsp / central / none"):
        assert_equal(state, reference(mlp()))


@pytest.mark.parametrize(
    "strategy",
    [
        "bsp / {} / topk(density=0.1) + error_feedback",
        "bsp / {} / powersgd + error_feedback",
        "bsp / {} / none / priority(partition_bytes=1KiB)",
        "local_sgd(period=2) / {} / none",
    ],
)
def test_it_trains_as_our_one_server_does(strategy: str) -> None:
    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))

    def body(model: nn.Module, optimizer: torch.optim.Optimizer, session: laconic.Session, rank: int) -> None:
        for step in range(4):
            mlp_loss(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()

    theirs, ours = (loop(body, model=wide, how=strategy.format(name)) for name in ("central", ONE_SERVER))
    for one, other in zip(theirs, ours, strict=True):
        assert_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["bsp / central / none", "ssp / central / none", "asp / central / int8"])
def test_it_keeps_what_strategies_promise(strategy: str) -> None:
    assert verify_on_threads(Strategy.parse(strategy), 2).failures == {}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["bsp / {} / none", "ssp / {} / none", "local_sgd(period=4) / {} / int8"])
def test_it_is_simulated_as_our_one_server_is(strategy: str) -> None:
    theirs = simulate(strategy.format("central"), JOB, hosts(4)).prediction
    ours = simulate(strategy.format(ONE_SERVER), JOB, hosts(4)).prediction
    assert theirs.step_s > 1.5 * JOB.compute_s or "local" in strategy, "one server has to get everybody's bytes"
    assert (theirs.step_s, theirs.wire_bytes, theirs.busy) == (ours.step_s, ours.wire_bytes, ours.busy)


def test_it_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "bsp / central"]) == 0
    assert "Each of 1 server(s) gets" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.dist
def test_a_server_process_knows_it(installed: Path) -> None:
    """A server is told the strategy as text, so it has to find the architecture by its entry point, too."""
    paths = os.pathsep.join([str(installed), *sys.path])
    script = (
        "import laconic, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)\n"
        "model = torch.nn.Linear(3, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "before = model.weight.detach().clone()\n"
        "with laconic.attach(model, optimizer, 'asp / central / none', timeout_s=60):\n"
        "    model(torch.ones(1, 3)).sum().backward()\n"
        "    optimizer.step()\n"
        "assert torch.allclose(model.weight, before - 0.1), model.weight - before\n"
        "dist.destroy_process_group()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
