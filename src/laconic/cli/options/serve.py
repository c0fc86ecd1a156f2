"""The options of `laconic serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Run a parameter server for workers on other hosts; it serves one job after the other, until Ctrl-C."""

    host: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """Address of the interface to listen on; if omitted: that of the interface in GLOO_SOCKET_IFNAME, or the one that
    leads to MASTER_ADDR, or 127.0.0.1."""
    port: int = 29600
    """Port to listen on; 0: any that is free."""
    token_file: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """File with the token, 32 hex digits; if omitted: the environment variable LACONIC_TOKEN."""
    slots: int = 16384
    """Slots of 2880 bytes for sums on the network path (in_network); 0: none, so whole tensors are added up instead."""
    once: bool = False
    """End after the first job."""
    new_token: bool = False
    """Print a new token and do nothing else."""
