"""What can be typed after `laconic report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Write one HTML page about one or more runs; it needs no network to be read."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Folders of runs, as compare leaves them under runs/; several share their figures."""
    output: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Where to write; by default report.html in the run's folder, for several runs ./report.html."""
    json: bool = False
    """Print the rows of the runs as JSON and write nothing."""
