"""What the command line knows without torch: it is up to date, it is used, and typos read as the library's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.cli import catalogue, main, method_facts
from laconic.cli.dispatch import COMMANDS
from laconic.cli.strategy_names import check_names
from laconic.errors import StrategyError, SyntaxProblem, UnknownName
from laconic.jobs import POLICIES
from laconic.strategy import AXES, PRESETS, Strategy

NAMES = {axis: registry.names() for axis, registry in AXES.items()}


def test_the_stored_catalogue_is_what_the_methods_say() -> None:
    fresh = json.loads(json.dumps(method_facts.describe()))
    assert catalogue.stored() == fresh, "a method or preset has changed: run `make catalogue` and commit the file"


def test_an_installed_method_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With plug-ins the classes are described, and names are left to the registry."""
    marker = {**catalogue.stored(), "loss": "asked"}
    monkeypatch.setattr(catalogue, "has_plugins", lambda: True)
    monkeypatch.setattr("laconic.cli.strategy_names.has_plugins", lambda: True)
    monkeypatch.setattr(method_facts, "describe", lambda: marker)
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == "asked"
    check_names("bsp / all_redcue")


def test_torch_is_not_needed_to_answer() -> None:
    """Help texts, lists and typos, one after the other in one process, which never imports torch."""
    answered = [
        *([command.name, "--help"] for command in COMMANDS),
        ["--help"],
        ["--version"],
        ["list"],
        ["list", "--json"],
        ["list", "sparse"],
        ["list", "--family", "low_rank"],
        ["lst"],
        ["compare", "--stesp", "3"],
        ["explain", "powersdg"],
        ["verify", "bsp / all_redcue"],
        ["simulate", "ddp", "bsp / all_reduce / topk(densty=1%)"],
        ["completion", "bash"],
    ]
    done = _run_without(["torch", "numpy", "laconic.strategy"], answered)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: laconic ") == len(COMMANDS)
    assert done.stderr.count("laconic: error: ") == 5


def test_torch_is_not_needed_to_schedule_jobs(tmp_path: Path) -> None:
    """Under every policy but the one that chooses strategies; with a cluster from a file, and with a page."""
    trace, hosts, page = tmp_path / "jobs.csv", tmp_path / "hosts.toml", tmp_path / "page.html"
    trace.write_text("job,arrival_s,gpus,steps,duration_s,gradient_bytes\na,0,1,600,60,1e8\nb,30,4,900,90,1e8\n")
    hosts.write_text('hosts = 4\nbandwidth = "10gbit"\n')
    policies = [words for kind in POLICIES if not kind.chooses_strategies for words in ("--policy", kind.name)]
    assert "cassini" in policies
    schedule = ["schedule", "--trace", str(trace), "--devices", "2"]
    scheduled = [
        [*schedule, "--hosts", "4", *policies],
        [*schedule, "--cluster", str(hosts), "--policy", "fifo", "--json"],
        [*schedule, "--cluster", str(hosts), "--policy", "fifo", "--output", str(page)],
    ]
    done = _run_without(["torch", "laconic.strategy"], scheduled)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 jobs on 8 GPUs") == 2
    assert page.exists()


def _run_without(modules: list[str], commands: list[list[str]]) -> subprocess.CompletedProcess[str]:
    """Run these commands one after the other in one process, which fails as soon as it has imported such a module."""
    code = """
import json, sys
from laconic.cli import main
modules, commands = json.loads(sys.argv[1])
for words in commands:
    main(words)
    found = set(modules) & set(sys.modules)
    if found:
        sys.exit(f"{words} imports {found}")
"""
    run = [sys.executable, "-c", code, json.dumps([modules, commands])]
    return subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("text", [*PRESETS, *(text for text, _ in PRESETS.values()), "diloco(8) / all_reduce / int8"])
def test_a_strategy_that_exists_passes(text: str) -> None:
    check_names(text)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("powersdg", UnknownName),
        ("bsp / all_redcue", UnknownName),
        ("bsp / all_reduce / topk(densty=1%)", UnknownName),
        ("bsp / all_reduce / topk + chain(second=int5())", UnknownName),
        ("bsp / all_reduce / fp16 + eror_feedback", UnknownName),
        ("bsp / / none", SyntaxProblem),
        ("bsp / all_reduce(", SyntaxProblem),
    ],
)
def test_a_typo_reads_as_it_does_in_the_library(text: str, kind: type[StrategyError]) -> None:
    with pytest.raises(kind) as early:
        check_names(text)
    with pytest.raises(kind) as late:
        Strategy.parse(text)
    assert str(early.value) == str(late.value)


@pytest.mark.parametrize(
    "text", ["powersgd / x", "ddp(1)", "int8", "bsp / all_reduce / topk(density=7)", "a / b / c / d / e", "a.toml"]
)
def test_other_mistakes_are_left_to_the_library(text: str) -> None:
    check_names(text)


@st.composite
def _texts(draw: st.DrawFn) -> str:
    """Strategies with known names, some of them misspelt, in any order."""
    words = st.sampled_from([name for names in NAMES.values() for name in names])
    typo = st.builds(lambda name, at: name[:at] + "x" + name[at + 1 :], words, st.integers(0, 8))
    parts = draw(st.lists(st.lists(words | typo, min_size=1, max_size=3).map(" + ".join), min_size=1, max_size=5))
    return " / ".join(parts)


@pytest.mark.slow
@given(_texts() | st.text(max_size=30))
@settings(max_examples=150, deadline=None)
def test_nothing_is_refused_that_the_library_takes(text: str) -> None:
    """Whatever is refused early would be refused anyway."""
    try:
        check_names(text)
    except StrategyError:
        with pytest.raises(StrategyError):
            Strategy.parse(text)
