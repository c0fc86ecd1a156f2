"""From words to a command, and from any error to one line and an exit code."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import run_processes

import laconic
from laconic.cli import main
from laconic.cli.dispatch import COMMANDS
from laconic.cli.terminal import emit_json, printable

NAMES = [command.name for command in COMMANDS]


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_alone_it_says_what_it_is_and_what_to_do_next(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("laconic: ")
    assert all(f"\n  {name} " in out for name in NAMES)
    assert out.partition("Try next:\n")[2].count("\n  laconic ") >= 2
    assert max(map(len, out.splitlines())) <= 80


def test_the_examples_it_shows_work(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    examples = capsys.readouterr().out.partition("Try next:\n")[2].splitlines()
    assert examples[0].strip() == "laconic compare"  # takes a minute; test_compare.py runs a small one
    for example in examples[1:]:
        program, *words = shlex.split(example)
        assert program == "laconic"
        assert main(words) == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"laconic {laconic.__version__}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["explian"], 'there is no command "explian". Did you mean "explain"?'),
        (
            ["zzz"],
            "Known: list, explain, verify, compare, plan, simulate, schedule, probe, profile, watch, report, replay, "
            "run, lab, serve",
        ),
        (["--jsno"], "--help and --version"),
        (["list", "--jsno"], 'Did you mean "--json"?'),
        (["doctor", "extra"], "one argument too many"),
        (["explain"], "STRATEGY"),
        (["explain", "ddp", "--workers"], "--workers"),
        (["explain", "ddp", "--worker", "3"], 'Did you mean "--workers"?'),
        (["explain", "bsp", "/", "all_reduce"], "in quotes"),
        (["replay", "bsp", "/", "gossip"], "in quotes"),
        (["watch", "a", "b"], '"b" is one argument too many.\n'),
        (["compare", "--strategy", "ddp"], 'there is no option "--strategy". Leave the option out'),
        (["replay", "--timeout", "soon"], "--timeout must be a time such as 5ms"),
        (["plan", "--hosts", "four"], 'plan: --hosts must be a whole number such as 4, got "four". See "laconic plan'),
        (["lab", "--hosts=2.5", "--", "true"], 'lab: --hosts must be a whole number such as 4, got "2.5". See'),
        (["compare", "--seconds", "10s"], 'compare: --seconds must be a number, got "10s". See'),
        (["compare", "--learning-rate", ""], 'compare: --learning-rate must be a number, got "". See'),
        (["explain", "\x1b[31m"], r"\x1b"),
    ],
)
def test_wrong_words_are_one_line_and_exit_2(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("laconic: error: ")
    assert err.count("\n") == 1
    assert told in err
    assert "│" not in err


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: laconic {name}")
    # A script's own output is not ours to format, a server says one thing after the other, a shell reads its script.
    assert ("--json" in out) == (name not in ("run", "lab", "serve", "completion"))
    assert err == ""


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_only_defaults_that_say_something(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # preparing the options a second time changes nothing
        assert main([name, "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        for noise in ("default: None", "default: False", "default: )", "default: ''", "{None}", "[STR "):
            assert noise not in shown
    assert (name != "compare") or "Number of virtual hosts. (default: 4)" in shown


def test_help_without_source_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(found: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr("inspect.getsource", missing)
    assert main(["compare", "--help"]) == 0
    assert "--bandwidth RATE" in capsys.readouterr().out


def test_help_after_an_argument_still_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "ddp", "--help"]) == 0
    assert "STRATEGY" in capsys.readouterr().out


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("laconic.cli.list"), "run", interrupted)
    assert main(["list"]) == 130
    assert capsys.readouterr() == ("", "")


def test_sigterm_ends_in_order_as_an_interrupt_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned: list[str] = []

    def ended(arguments: object) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned.append("up")
        return 0

    monkeypatch.setattr(importlib.import_module("laconic.cli.list"), "run", ended)
    assert main(["list"]) == 143
    assert cleaned == ["up"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert capsys.readouterr() == ("", "")


def test_without_tyro_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(module: object, command: object, words: object) -> object:
        raise ModuleNotFoundError("No module named 'tyro'", name="tyro")

    monkeypatch.setattr("laconic.cli.dispatch._parse", absent)
    assert main(["list"]) == 2
    assert "pip install" in capsys.readouterr().err


def test_control_characters_are_spelled_out() -> None:
    assert printable("a\x1b[31m\u202eb\udcff é") == r"a\x1b[31m\u202eb\udcff é"


def test_numbers_that_json_does_not_have_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json({"loss": float("nan"), "rows": [{"times": float("inf"), "step": 3}]})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"loss": None, "rows": [{"times": None, "step": 3}]}


def test_a_real_process_gives_one_line_and_exit_2() -> None:
    words = [sys.executable, "-m", "laconic.cli", "explain", "bsp / all_redcue"]
    finished = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr.count("\n") == 1
    assert 'Did you mean "all_reduce"?' in finished.stderr


@pytest.mark.dist
def test_output_into_a_file_is_plain_and_other_commands_are_not_imported() -> None:
    code = (
        "import sys; from laconic.cli import main; main(['list']);"
        "sys.exit(bool({'laconic.cli.doctor', 'laconic.cli.explain', 'laconic.lab', 'pyroute2'} & set(sys.modules)))"
    )
    terminal = {"COLUMNS": "80", "TERM": "xterm-256color"}
    (finished,) = run_processes(code, world_size=1, environment=terminal)
    assert finished.stderr == ""
    assert finished.stdout.startswith("synchronization: ")
    assert finished.stdout.isascii()
    assert "\x1b" not in finished.stdout
    assert max(map(len, finished.stdout.splitlines())) <= 80


@pytest.mark.parametrize("words", [[], ["list"], ["list", "--json"], ["explain", "--help"]])
def test_a_reader_that_goes_away_is_no_error(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(words) == 141
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["list"]) == 2
        monkeypatch.undo()
    assert capsys.readouterr().err == "laconic: error: cannot write the output: No space left on device.\n"
