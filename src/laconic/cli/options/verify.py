"""The options of `laconic verify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train a small model with threads as workers and check what a strategy promises; exit 1 if a check fails.

    A strategy for models that fully_shard() has sharded is checked with processes.
    """

    strategy: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[STRATEGY]")] = None
    """A preset, one-line text in quotes, or a file that ends in .toml."""
    workers: Annotated[str, tyro.conf.arg(metavar="N")] = "2"
    """Number of workers, or several numbers: 2,3,4."""
    processes: bool = False
    """Repeat the checks with processes that communicate over Gloo."""
    matrix: bool = False
    """Instead of one strategy, check enough of them to cover every pair of registered methods; Ctrl-C prints the
    findings so far."""
    jobs: Annotated[str, tyro.conf.arg(metavar="N")] = "1"
    """Number of strategies checked at the same time, with --matrix; the number of cores is a good value. Strategies
    that are checked with processes still run one after the other. The matrix takes about forty minutes of one core."""
    json: bool = False
    """Print JSON instead of a table."""
