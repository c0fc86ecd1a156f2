"""The `laconic` command: one file per command, one line per command in `dispatch.COMMANDS`."""

# Kept empty of code: importing the submodule laconic.cli.list hides the builtin `list` in this namespace.
from laconic.cli.dispatch import main

__all__ = ["main"]
