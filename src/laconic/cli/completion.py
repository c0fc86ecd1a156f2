"""`laconic completion SHELL`: a script that completes commands and options with the Tab key."""

from __future__ import annotations

import contextlib
import importlib
import io
from typing import Annotated, Any, Union

import tyro

from laconic.cli.dispatch import COMMANDS, Command
from laconic.cli.options.completion import Arguments
from laconic.cli.terminal import emit


def run(arguments: Arguments) -> int:
    """Print the script."""
    # One tyro program with every command in it; without this script each command is a program of its own.
    commands: tuple[Any, ...] = tuple(map(_as_subcommand, COMMANDS))
    script = io.StringIO()
    with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
        tyro.cli(
            Union[commands],  # noqa: UP007 - made at run time  # pyrefly: ignore[not-a-type]
            args=["--tyro-write-completion", arguments.shell, "-"],
            prog="laconic",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    emit(script.getvalue())
    return 0


def _as_subcommand(command: Command) -> Any:
    arguments: Any = importlib.import_module(command.options_module).Arguments
    about = tyro.conf.subcommand(name=command.name, description=command.help)
    return Annotated[arguments, about]  # pyrefly: ignore[invalid-annotation]
