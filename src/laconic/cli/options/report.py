"""The options of `laconic report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Write one HTML page about one or more runs; the page works without a network."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Folders of runs, as compare writes them under runs/; several runs are shown in the same figures. Or one folder
    with the event logs of an elastic run, as lab --kill writes it."""
    output: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Where to write; by default report.html in the run's folder, for several runs ./report.html."""
    json: bool = False
    """Print the rows of the runs as JSON and write nothing."""
