"""Checks one command line of the documentation: runs it where that is quick and needs one machine, else parses it."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.run import get_args_parser

from laconic.cli.dispatch import main
from tests.website.blocks import ROOT

PARSED_ONLY = {
    "compare": "trains for minutes on virtual hosts; tests/cli/test_compare.py runs it",
    "lab": "makes virtual hosts; tests/lab runs it",
    "plan": "takes up to a minute; tests/cli/test_plan.py runs a smaller question",
    "probe": "is one rank of a job; tests/cli/test_probe.py runs it",
    "replay": "takes minutes on virtual hosts; tests/experiments runs it",
    "run": "starts workers and waits for them; tests/cli/test_run.py runs it",
    "serve": "waits for the workers of a job; tests/cli/test_serve.py runs it",
}
"""Commands of laconic that no page may run, and why."""
TOO_LONG = {
    "watch": "follows the log for ever, except with --once",
    "verify": "takes an hour with --matrix, and starts processes with --processes; tests/cli/test_verify.py runs both",
    "schedule": "--tables are published tables that the reader brings; tests/jobs/test_shockwave.py runs it",
    "simulate": "takes a minute for a sweep, and --rows reads a published table that the reader brings; "
    "tests/cli/test_simulate.py runs both",
}
"""Commands that are parsed only, with these options, and why."""


def check(line: str, folder: Path) -> str:
    """Fail if the line would fail for a reader; return "run" or "parsed". `folder` holds the files that pages name."""
    words = shlex.split(line, comments=True)
    if "|" in words:
        words = words[: words.index("|")]
    if words[0] == "laconic":
        return _laconic(words[1:], folder)
    if words[0] == "torchrun":
        arguments = get_args_parser().parse_args(words[1:])
        if arguments.module:
            assert arguments.training_script == "laconic.cli", line
            return _laconic(arguments.training_script_args, folder)
        assert (folder / arguments.training_script).exists(), line
        return "parsed"
    if words[0] == "python":
        if words[1:3] == ["-m", "laconic.cli"]:
            return _laconic(words[3:], folder)
        assert (folder / words[1]).exists(), line
        return "parsed"
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(words[1:]) <= set(targets), line
        return "parsed"
    assert words == [".", ".venv/bin/activate"], f"{line!r} is no command that this test knows: teach it {__name__}"
    return "parsed"


def _laconic(words: list[str], folder: Path) -> str:
    command = words[0] if words else ""
    if command == "lab" and "--" in words:
        check(shlex.join(words[words.index("--") + 1 :]), folder)
    if command not in PARSED_ONLY and not _takes_long(command, words):
        assert main(words) == 0, words
        return "run"
    with pytest.MonkeyPatch.context() as patch:
        ran: list[object] = []
        module = importlib.import_module(f"laconic.cli.{command}")
        patch.setattr(module, "run", lambda arguments: ran.append(arguments) or 0)
        assert main(words) == 0, words
        assert [type(arguments).__name__ for arguments in ran] == ["Arguments"], SimpleNamespace(words=words)
    return "parsed"


def _takes_long(command: str, words: list[str]) -> bool:
    """Whether the options are those for which TOO_LONG gives a reason."""
    return {
        "watch": "--once" not in words,
        "verify": not {"--matrix", "--processes"}.isdisjoint(words),
        "schedule": "--tables" in words,
        "simulate": "--rows" in words or any(".." in word for word in words),
    }.get(command, False)
