"""The options of `laconic lab`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Run a script on virtual hosts: a network namespace each, behind links with the bandwidth you ask for."""

    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- COMMAND ...")]
    """The command of each rank, e.g. -- python train.py --epochs 1; it gets the variables that torchrun sets."""
    hosts: int = 4
    """Number of virtual hosts."""
    bandwidth: Annotated[str, tyro.conf.arg(metavar="RATE")] = "100mbit"
    """Bandwidth of each host's link, in each direction: 10mbit, 1gbit."""
    delay: Annotated[str, tyro.conf.arg(metavar="TIME")] = "0ms"
    """One-way delay on every link; needs netem in the kernel."""
    loss: Annotated[str, tyro.conf.arg(metavar="SHARE")] = "0%"
    """Share of packets lost on every link; needs netem or nftables in the kernel."""
    link: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="HOST=RATE")] = ()
    """Another bandwidth for one host, e.g. --link 2=10mbit; repeat for several."""
    racks: int = 1
    """Racks with equally many hosts, each behind an uplink of its own; 1: all hosts on one switch."""
    oversubscription: float = 1.0
    """The total bandwidth of a rack's hosts, divided by the bandwidth of its uplink."""
    in_turn: bool = False
    """Put host h into rack h mod the number of racks, so that neighbouring ranks are in different racks."""
    cluster: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Hosts, links and racks from a file, instead of the options above."""
    ranks_per_host: int = 1
    """Processes on each host."""
    ranks_per_replica: int = 1
    """With faults, for sharded models: so many processes of a host hold one copy of the model and die together."""
    links: Literal["auto", "shaped", "paced"] = "auto"
    """shaped: real links of virtual hosts; paced: limited in software; auto: shaped where this machine allows it."""
    kill: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="WHOM-AND-WHEN")] = ()
    """Elastic scripts: kill a process ("rank=2 at=10s"), a random one ("every=30s"), or all of a host ("host=1")."""
    join: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="WHEN")] = ()
    """Replace dead processes later, --join after=5s, instead of at once; or add a process, --join "at=20s host=1"."""
    freeze: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="WHOM-AND-WHEN")] = ()
    """Freeze a process, --freeze "rank=1 for=0.5s", or a whole host, --freeze "host=1 at=10s"."""
    cut_link: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="HOSTS-AND-WHEN")] = ()
    """Cut two hosts off from each other, --cut-link "0-1 at=10s for=5s", or one from all others, --cut-link 2."""
    slow: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="WHOM-AND-FACTOR")] = ()
    """Slow a process down, --slow rank=3,5x, or only for a while, --slow "3x at=10s for=30s"."""
    seed: int = 0
    """Seed of the random choice of a process where a fault names none."""
    output: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """With faults: where to write the events, for laconic report; by default a folder under runs/."""
    timeout: Annotated[str, tyro.conf.arg(metavar="TIME")] = "1h"
    """End the run after this long."""
    clean: bool = False
    """Run nothing, but end processes that a killed lab has left behind. A running lab is not touched."""
