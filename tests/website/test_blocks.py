"""Every block of code in the documentation is executed, or checked by the parser that would read it."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.cluster import Cluster
from laconic.compression import COMPRESSORS
from laconic.workload import Workload
from tests.processes import run_processes
from tests.report.run_folders import make_run
from tests.report.test_elastic_page import write_events
from tests.website.blocks import PAGES, Block, blocks
from tests.website.commands import check

LANGUAGES = {
    "python": "executed",
    "sh": "run, or parsed where it needs more than this machine",
    "toml": "read",
    "json": "read",
    "console": "a command with its output; tests/cli/test_simulate.py compares them",
    "text": "no code: output, formulas and drawings",
}
NEEDS_GPU = "cuda()"
"""Blocks with this are executed where there is a GPU, and otherwise compiled, with their imports."""
FRAMEWORKS = "docs/integrations.md"
METHODS = "docs/writing-a-method.md"
"""Its blocks are files of a package; test_docs.py and architecture/test_third_party_servers.py train with them."""


def python_blocks() -> list[Block]:
    return [block for block in blocks("python") if block.page != METHODS]


def as_arguments(found: list[Block]) -> dict[str, object]:
    return {"blocks": [{"where": block.where, "code": block.code} for block in found]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that commands of the documentation name."""
    for block in blocks("python"):
        if block.file_name:
            (tmp_path / block.file_name).write_text(block.code, encoding="utf-8")
    clusters = [block.code for block in blocks("toml") if block.page == "docs/clusters.md"]
    (tmp_path / "cluster.toml").write_text(clusters[0], encoding="utf-8")
    workloads = [block.code for block in blocks("json") if block.page == "docs/workloads.md"]
    for name in ("job.json", "mlp.json"):
        (tmp_path / name).write_text(workloads[0], encoding="utf-8")
    traces = [block.code for block in blocks("text") if block.page == "docs/schedule.md"]
    (tmp_path / "jobs.csv").write_text(traces[0], encoding="utf-8")
    for name in ("A", "B", "20261115-093000-compare"):
        make_run(tmp_path / "runs" / name)
    write_events(tmp_path / "runs" / "20261115-093000-lab")
    (tmp_path / "events.jsonl").write_bytes((tmp_path / "runs" / "A" / "events.jsonl").read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_code_is_fenced() -> None:
    """An indented block would be shown as code, and no test would see it."""
    for page in PAGES:
        found = re.search(
            r"^\n {4}(python|laconic|torchrun|make|pip|import|from) .*", page.read_text(encoding="utf-8"), re.M
        )
        assert found is None, (
            f"{page.name}: write {found[0].strip()!r} in a block that begins with ```" if found else ""
        )


def test_every_block_says_what_it_is() -> None:
    for block in blocks():
        assert block.language in LANGUAGES, (
            f"{block.where}: a block must begin with ``` and one of {', '.join(LANGUAGES)}, not {block.language!r}. "
            "What is not code is text."
        )
        if block.language == "text":
            first = block.code.lstrip().split("\n")[0]
            assert not re.match(r"(\$ |laconic \w+ --|torchrun |pip install |import |from \w+ import )", first), (
                f"{block.where} looks like code and is called text"
            )


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_command_runs_or_is_parsed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes: Counter[str] = Counter()
    for block in blocks("sh"):
        for line in re.sub(r"\\\n\s*", "", block.code).splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                try:
                    outcomes[check(line, folder)] += 1
                except AssertionError as error:
                    raise AssertionError(f"{block.where}: {line}\n{capsys.readouterr().err}") from error
    assert outcomes["run"] >= 12
    assert outcomes["parsed"] >= 10


@pytest.mark.dist
@pytest.mark.slow
def test_python_blocks_run_on_two_ranks(tmp_path: Path) -> None:
    found = [
        block
        for block in python_blocks()
        if block.page != FRAMEWORKS
        and not block.file_name
        and (NEEDS_GPU not in block.code or torch.cuda.is_available())
    ]
    assert len(found) >= 20
    arguments = {**as_arguments(found), "shared": str(tmp_path)}
    for result in run_processes("tests.website.stage:run", world_size=2, arguments=arguments, timeout_s=110):
        assert result.value == ["ok"] * len(found)


@pytest.mark.dist
@pytest.mark.slow
def test_python_blocks_about_frameworks_run_on_two_ranks() -> None:
    found = [block for block in python_blocks() if block.page == FRAMEWORKS]
    arguments = as_arguments(found)
    for result in run_processes("tests.website.stage:run_frameworks", world_size=2, arguments=arguments, timeout_s=110):
        assert result.value == ["ok"] * len(found)


@pytest.mark.dist
@pytest.mark.slow
def test_the_first_script_trains() -> None:
    (script,) = [block.code for block in python_blocks() if block.file_name == "train.py"]
    first, second = run_processes(script, world_size=2, timeout_s=60)
    assert re.fullmatch(r"sent 0\.\d\d MiB per step\n", first.stdout)
    assert second.stdout == ""


def test_blocks_for_a_gpu_compile_and_import() -> None:
    found = [block for block in python_blocks() if NEEDS_GPU in block.code]
    assert found
    for block in found:
        for node in ast.walk(ast.parse(block.code, block.where)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), block.where


def test_blocks_about_methods_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files, which other tests train with too, a method of a wrapper, and a loop that tries the first file."""
    codes = [block.code for block in blocks("python") if block.page == METHODS]
    whole, traits, server, loop = codes
    assert "class Central" in server
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "scaled_sign.py").write_text(whole, encoding="utf-8")
    (entry_points,) = [block.code for block in blocks("toml") if block.page == METHODS]
    ((name, target),) = tomllib.loads(entry_points)["project"]["entry-points"]["laconic.compression"].items()
    monkeypatch.syspath_prepend(tmp_path)
    module, _, attribute = target.partition(":")
    method = getattr(importlib.import_module(module), attribute)
    monkeypatch.setitem(COMPRESSORS._methods, name, method)
    names = {"torch": torch, "laconic": laconic, "make_model": lambda: nn.Linear(8, 8)}
    exec(loop, names)
    wrapper: dict[str, Any] = {"replace": dataclasses.replace, "Traits": laconic.Traits}
    exec(traits, wrapper)
    changed = wrapper["traits_around"](None, laconic.Traits(wants_error_feedback=True))
    assert (changed.keeps_residual, changed.wants_error_feedback) == (True, False)


def test_blocks_of_data_can_be_read() -> None:
    for block in blocks("json"):
        Workload.from_json(block.code) if "layers" in json.loads(block.code) else pytest.fail(block.where)
    for block in blocks("toml"):
        table = tomllib.loads(block.code)
        if "project" in table:
            for group in table["project"]["entry-points"]:
                assert group.removeprefix("laconic.") in laconic.strategy.AXES, block.where
        elif "hosts" in table or "rack" in table:
            Cluster.from_toml(block.code)
        else:
            laconic.Strategy.from_toml(block.code)
