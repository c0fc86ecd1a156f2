"""The options of `laconic explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Say what a strategy does, how many bytes each worker sends per step, and what it cannot be combined with."""

    strategy: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STRATEGY")]
    """A preset, one-line text in quotes, or a file that ends in .toml."""
    workers: Annotated[str, tyro.conf.arg(metavar="N")] = "4"
    """Number of workers."""
    params: Annotated[str, tyro.conf.arg(metavar="N")] = "25M"
    """Number of fp32 parameters: 25000000, 25_000_000, 25M, 1.5B."""
    shards: Annotated[str, tyro.conf.arg(metavar="S")] = "1"
    """Ranks that each worker's model is sharded over (FSDP2); bytes and memory are those of the largest shard."""
    ranks_per_host: Annotated[str, tyro.conf.arg(metavar="R")] = ""
    """Workers that share a host, for strategies that distinguish hosts."""
    json: bool = False
    """Print JSON instead of text."""
