"""What can be typed after `laconic verify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Make real steps under a strategy and check what it promises, with threads as workers; exit 1 if a check fails.

    A strategy for models that fully_shard() has cut up is checked with processes.
    """

    strategy: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="STRATEGY")] = None
    """A preset, one-line text in quotes, or a file that ends in .toml."""
    workers: Annotated[str | None, tyro.conf.arg(metavar="N")] = None
    """Number of workers, or several: 2,3,4. Left out: 2, with --matrix 2,3,4."""
    processes: bool = False
    """Make the checks a second time with processes that talk over Gloo."""
    matrix: bool = False
    """Check all nine cells of synchronization x architecture with four compressors, instead of one strategy."""
    json: bool = False
    """Print JSON instead of a table."""
