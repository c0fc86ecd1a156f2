"""The options of `laconic serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Run a server for workers elsewhere; one job after the other, until Ctrl-C."""

    host: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """Address of the interface to listen on; left out: that of the interface in GLOO_SOCKET_IFNAME, or the one that
    leads to MASTER_ADDR, or 127.0.0.1."""
    port: int = 29600
    """Port to listen on; 0: any that is free."""
    token_file: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """File with the token, 32 hex digits; left out: the environment variable LACONIC_TOKEN."""
    slots: int = 16384
    """Slots for sums on the path (in_network), 2880 bytes each; 0: none, so such sums are formed of whole tensors."""
    once: bool = False
    """End with the first job."""
    new_token: bool = False
    """Print a new token and do nothing else."""
