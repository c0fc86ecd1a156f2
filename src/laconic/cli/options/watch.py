"""The options of `laconic watch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show the progress of a run, from its event log, while the log grows; ends with Ctrl-C."""

    log: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EVENTS.jsonl|FOLDER")]
    """The log of a laconic.EventLog, or the folder of a run that holds one."""
    once: bool = False
    """Print the current state and end."""
    every: Annotated[str, tyro.conf.arg(metavar="TIME")] = "5s"
    """How often a line is printed where the output is not a terminal."""
    json: bool = False
    """Print JSON, one object per line, instead of tables and lines."""
