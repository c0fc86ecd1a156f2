"""`laconic completion SHELL`: a script that completes commands and options with the Tab key."""

from __future__ import annotations

import contextlib
import importlib
import io
from typing import Annotated, Union

import tyro

from laconic.cli.dispatch import COMMANDS
from laconic.cli.options.completion import Arguments
from laconic.cli.terminal import emit


def run(arguments: Arguments) -> int:
    """Print the script."""
    # One tyro program with every command in it; without this script each command is a program of its own.
    commands = tuple(
        Annotated[
            importlib.import_module(command.options_module).Arguments,
            tyro.conf.subcommand(name=command.name, description=command.help),
        ]
        for command in COMMANDS
    )
    script = io.StringIO()
    with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
        tyro.cli(
            Union[commands],  # noqa: UP007 - made at run time
            args=["--tyro-write-completion", arguments.shell, "-"],
            prog="laconic",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    emit(script.getvalue())
    return 0
