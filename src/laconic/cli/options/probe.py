"""What can be typed after `laconic probe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure the links and collectives between the ranks of a job; run it on every rank, e.g. with torchrun."""

    output: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Cluster file that rank 0 writes; left out: only the table is printed."""
    bandwidth: str | None = None
    """What the hosts' links are said to have, e.g. 10gbit: compared with what was measured, and written instead."""
    pairs: bool = False
    """Also measure the bandwidth from every rank to every other, one pair at a time."""
    algorithms: tuple[str, ...] = ()
    """All-reduce algorithms to measure beside the backend's own: ring, tree, ..."""
    sizes: tuple[str, ...] = ()
    """Sizes to measure, e.g. 1KiB 1MiB; left out: 1 KiB to 64 MiB by factors of 4."""
    limit: str = "10s"
    """How long to measure, roughly: no larger size is begun that would take longer."""
    timeout: str = "60s"
    """How long any one wait for other ranks may take."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """What carries the bytes; auto: NCCL where there are GPUs, else Gloo."""
    json: bool = False
    """Print JSON instead of a table."""
