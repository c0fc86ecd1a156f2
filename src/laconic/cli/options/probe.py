"""The options of `laconic probe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure the links and collectives between the ranks of a job; run it on every rank, e.g. with torchrun."""

    output: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Cluster file that rank 0 writes; if omitted: only the table is printed."""
    bandwidth: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None
    """The nominal bandwidth of hosts' links, e.g. 10gbit: compared with the measured one, and written to the file."""
    pairs: bool = False
    """Also measure the bandwidth between every two ranks while all others send too, which tells racks apart."""
    algorithms: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
    """All-reduce algorithms to measure in addition to the backend's own: ring, tree, ..."""
    sizes: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SIZE ...")] = ()
    """Sizes to measure, e.g. 1KiB 1MiB; if omitted: 1 KiB to 64 MiB by factors of 4."""
    limit: Annotated[str, tyro.conf.arg(metavar="TIME")] = "10s"
    """How long to measure, roughly: a larger size that would take longer is not begun."""
    timeout: Annotated[str, tyro.conf.arg(metavar="TIME")] = "60s"
    """How long any one wait for other ranks may take."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """The backend; auto: NCCL where there are GPUs, otherwise Gloo."""
    json: bool = False
    """Print JSON instead of a table."""
