"""The options of `laconic run`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Start a script whose ranks may die, join and leave; it calls attach(..., elastic=laconic.Elastic(...))."""

    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT ...")]
    """The script and its arguments: train.py --epochs 3; or any command after --."""
    nproc: int = 1
    """Processes on this host."""
    ranks_per_replica: int = 1
    """For sharded models: so many processes of a host hold one copy of the model. They are replaced together, and
    --min, --max, --wait-for and --max-restarts count copies."""
    min: int = 1
    """The job ends if fewer ranks than this are left."""
    max: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """The job takes no more ranks than this; if omitted: any number."""
    wait_for: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """The number of ranks, on all hosts, with which training begins; if omitted: those of this host."""
    listen: Annotated[str, tyro.conf.arg(metavar="ADDRESS[:PORT]")] = "127.0.0.1"
    """Where the job's store listens for workers of this host and of others."""
    join: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS:PORT")] = None
    """Add the processes of this host to the job whose store listens at this address, instead of starting a job."""
    max_restarts: int = 100
    """How many killed processes are replaced, in total."""
    on_error: Literal["end", "replace"] = "end"
    """When the script raises an error in one process: end the job, or replace that process."""
    silent: Annotated[str, tyro.conf.arg(metavar="TIME")] = "1.5s"
    """A host that sends no heartbeat for this long counts as dead."""
