"""The parallel plan and the strategy together: one box, an Ethernet cluster, InfiniBand, several sites."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from laconic.cli import main
from laconic.cluster import Cluster, Link, cluster
from laconic.errors import ConfigurationError
from laconic.planner.parallel import ParallelQuestion, plan_in_parallel
from laconic.planner.question import Limits
from laconic.simulator.parallel.accelerator import H100
from laconic.simulator.parallel.memory import fits
from laconic.simulator.parallel.search import search
from laconic.simulator.parallel.system import Job
from laconic.workload.transformer_presets import MODELS

JOB = Job(model=MODELS["llama3-8b"], sequence=4096, global_batch=32)
NVLINK = Link(bandwidth_bps=3600e9, delay_s=1e-6)


def _question(where: Cluster, **changes: object) -> ParallelQuestion:
    return ParallelQuestion(job=JOB, cluster=where, accelerator=H100, steps=10_000, **changes)  # pyrefly: ignore


def _ethernet(hosts: int) -> Cluster:
    return Cluster(links=(Link(bandwidth_bps=10e9, delay_s=25e-6),) * hosts, devices_per_host=8, inside=NVLINK)


def test_on_infiniband_the_frameworks_own_exchange_is_best() -> None:
    question = _question(cluster("dgx-h100", hosts=2))
    found = plan_in_parallel(question)
    assert (found.best.islands, found.best.strategy) == (1, None)
    assert found.best.plan == search(JOB, 16, question.system).best[0].plan
    assert found.best.seconds == pytest.approx(10_000 * found.best.time.total_s)


@pytest.mark.slow
def test_on_ethernet_islands_exchange_less_often() -> None:
    found = plan_in_parallel(_question(_ethernet(2)))
    best = found.best
    assert best.strategy is not None
    assert best.islands > 1
    assert best.loss is not None
    assert found.own is not None
    assert best.seconds == pytest.approx(10_000 * best.time.total_s * best.loss.ratio)
    assert best.seconds < found.own.seconds
    assert len(found.runners_up) == 5
    assert list(found.choices[1:]) == sorted(found.choices[1:], key=lambda choice: choice.seconds)
    for choice in found.choices:
        assert choice.islands * choice.plan.gpus == 16
        assert fits(choice.memory, found.question.system)


def test_without_loss_nothing_else_is_chosen() -> None:
    found = plan_in_parallel(_question(_ethernet(2), limits=Limits(lossless=True)))
    assert all(choice.loses_nothing for choice in found.choices)


def test_a_slower_uplink_never_helps() -> None:
    site = cluster("dgx-h100", hosts=1)
    times = []
    for rate in (1e11, 1e8):
        question = _question(site, sites=4, uplink=Link(bandwidth_bps=rate, delay_s=0.01))
        found = plan_in_parallel(question)
        assert found.best.islands == 4
        times.append(found.best.seconds)
    assert times == sorted(times)


def test_a_model_that_does_not_fit_is_said() -> None:
    job = Job(model=MODELS["llama3-405b"], sequence=8192, global_batch=8)
    question = replace(_question(cluster("pcie-box")), job=job)
    with pytest.raises(ConfigurationError, match="llama3-405b does not fit under any of"):
        plan_in_parallel(question)


def test_one_box_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--parallel", "--model", "llama3-8b", "--cluster", "pcie-box", "--device", "h100"]
    assert main([*words, "--batch", "8", "--sequence", "2048", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"] == 8
    assert found["verdict"].startswith(f'Use "{found["best"]["plan"]}"')
    assert found["best"]["gpu_hours"] == pytest.approx(8 * found["best"]["seconds"] / 3600)
    assert sum(found["best"]["time_s"].values()) == pytest.approx(found["best"]["step_s"])
    assert main([*words, "--batch", "8", "--sequence", "2048", "--lossless"]) == 0
    assert "GPU-hours" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--parallel", "--model", "llama3-8b", "--cluster", "pcie-box", "--batch", "0"],
            "global_batch must be at least 1, got 0",
        ),
        (
            ["--parallel", "--model", "llama3-8b", "--cluster", "pcie-box", "--sequence", "0"],
            "sequence must be at least 1, got 0",
        ),
        (
            ["--parallel", "--model", "llama3-8b", "--cluster", "pcie-box", "--steps", "0"],
            "--steps must be at least 1, got 0",
        ),
        (["--model", "llama3-8b", "--hosts", "2", "--sites", "2"], "--sites has an effect only with --parallel"),
        (["--parallel", "--hosts", "2"], "--parallel needs a large model"),
        (["--parallel", "--model", "llama3-8b"], "say where to train"),
        (["--parallel", "--model", "llama3-9b", "--hosts", "2", "--bandwidth", "1gbit"], 'Did you mean "llama3-8b"'),
        (["--parallel", "--model", "llama3-8b", "--hosts", "2"], "several hosts need --bandwidth"),
        (["--parallel", "--model", "llama3-8b", "--cluster", "dgx-h100", "--params", "1B"], "--params has no effect"),
        (["--parallel", "--model", "llama3-8b", "--cluster", "dgx-h100", "--sites", "2"], "--sites and --uplink go"),
        (["--parallel", "--model", "llama3-8b", "--cluster", "dgx-h100", "--device", "t4"], 'on "t4" is not known'),
        (
            ["--parallel", "--model", "llama3-8b", "--cluster", "dgx-h100", "--sites", "3", "--uplink", "1gbit"],
            "The nearest batch that is divisible has 1023",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert expected in capsys.readouterr().err
