"""What can be typed after `laconic lab`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Run a script on virtual hosts: a network namespace each, behind links with the bandwidth you ask for."""

    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- COMMAND ...")]
    """What each rank runs, e.g. -- python train.py --epochs 1; it finds the variables torchrun sets."""
    hosts: int = 4
    """Number of virtual hosts."""
    bandwidth: Annotated[str, tyro.conf.arg(metavar="RATE")] = "100mbit"
    """Of each host's link, both ways: 10mbit, 1gbit."""
    delay: Annotated[str, tyro.conf.arg(metavar="TIME")] = "0ms"
    """Added one way on every link; needs netem in the kernel."""
    loss: Annotated[str, tyro.conf.arg(metavar="SHARE")] = "0%"
    """Share of packets lost on every link; needs netem in the kernel."""
    link: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="HOST=RATE")] = ()
    """Another bandwidth for one host, e.g. --link 2=10mbit; repeat for several."""
    cluster: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Hosts, links and racks from a file, instead of the options above."""
    ranks_per_host: int = 1
    """Processes on each host."""
    links: Literal["auto", "shaped", "paced"] = "auto"
    """shaped: real links of virtual hosts; paced: held back in software; auto: shaped where this machine allows it."""
    timeout: Annotated[str, tyro.conf.arg(metavar="TIME")] = "1h"
    """End the run after this long."""
    clean: bool = False
    """Run nothing, but end what a lab that was killed has left behind. A lab that runs is not touched."""
