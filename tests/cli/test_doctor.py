"""`laconic doctor`: it says what is there, survives what is not, and names a cure for each problem."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform

import pytest
import torch

import laconic
from laconic.cli import doctor, main
from laconic.errors import StrategyError
from laconic.lab import machine
from laconic.lab.capabilities import Capabilities

EVERYTHING = Capabilities(privilege="root", veth=True, bridge=True, tbf=True, htb=True, netem=True, nftables=True)


@pytest.fixture(autouse=True)
def _no_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "detect_capabilities", lambda: EVERYTHING)


def problems_with(monkeypatch: pytest.MonkeyPatch, found: Capabilities) -> list[doctor.Problem]:
    monkeypatch.setattr(doctor, "detect_capabilities", lambda: found)
    return list(doctor.examine().problems)


def test_json_tells_the_truth_about_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert list(found) == ["versions", "backends", "cuda", "machine", "virtual_hosts", "problems", "issue_block"]
    assert found["versions"]["laconic"] == laconic.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert found["backends"]["gloo"] is torch.distributed.is_gloo_available()
    assert set(found["backends"]) == {"gloo", "nccl", "mpi", "ucc"}
    assert len(found["cuda"]["devices"]) == torch.cuda.device_count()
    assert found["machine"]["cores"] == os.cpu_count()
    assert found["machine"]["memory_bytes"] > 2**28
    assert found["virtual_hosts"]["privilege"] == "root"
    assert all(set(problem) == {"what", "do"} for problem in found["problems"])


def test_text_ends_with_a_block_to_paste(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    above, block, rest = out.split("```")
    assert rest == "\n"
    assert f"torch {torch.__version__}" in block
    assert block.strip().splitlines()[0].startswith("versions: laconic ")
    assert platform.node() not in block.split()
    assert max(map(len, above.splitlines())) <= 80
    for title in ("Versions", "Machine", "Virtual hosts", "Problems"):
        assert f"{title}\n" in above


def test_absent_packages_are_named_with_what_that_means(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.importlib.metadata, "version", absent)
    monkeypatch.setattr(machine.importlib.util, "find_spec", {"tyro": object()}.get)
    monkeypatch.setattr(
        doctor, "detect_capabilities", lambda: Capabilities(privilege="root", reason="pyroute2 cannot be imported")
    )
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "pyroute2 is not installed: no virtual hosts on this machine" in out
    assert "pip install pyroute2" in out
    assert "absent: numpy, rich, pyroute2, numba, jinja2, triton" in out
    assert "tyro (version unknown)" in out


def test_a_refused_namespace_comes_with_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = problems_with(monkeypatch, Capabilities(privilege="none", reason="refused (Operation not permitted)"))
    assert any("refused (Operation not permitted)" in problem.what and "root" in problem.do for problem in problems)


def test_missing_kernel_parts_come_with_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = problems_with(monkeypatch, Capabilities(privilege="user_namespace", bridge=True, reason="no module"))
    cures = " | ".join(problem.do for problem in problems)
    assert "modprobe veth sch_tbf sch_htb" in cures
    assert "sch_netem" in cures
    assert not any("netem" in problem.what for problem in problems_with(monkeypatch, EVERYTHING))


def test_a_broken_plugin_is_a_problem_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise StrategyError('laconic.compression: the entry point "x" failed to load')

    monkeypatch.setattr(doctor.AXES["compression"], "names", broken)
    assert any('"x" failed to load' in problem.what for problem in doctor.examine().problems)


def test_a_broken_gpu_driver_is_a_problem_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert any("driver too old" in problem.what for problem in doctor.examine().problems)


def test_a_torch_without_distributed_is_a_problem_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_gloo_available")
    found = doctor.examine()
    assert found.backends["gloo"] is False
    assert any("no torch.distributed" in problem.what for problem in found.problems)
