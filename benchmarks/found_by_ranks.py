"""Runs a benchmark's ranks on virtual hosts and collects what they have found."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from laconic.cluster import Cluster
from laconic.lab.launch import run_ranks
from laconic.lab.virtual_hosts import VirtualHosts, places_on

_MARK = "found "


def tell(found: object) -> None:
    """Print what this rank has found, for `found_by_ranks` in the process that started it."""
    print(_MARK + json.dumps(found), flush=True)


def found_by_ranks(
    module: str, arguments: Sequence[str], cluster: Cluster, *, timeout_s: float = 1800.0
) -> dict[int, Any]:
    """Run a module on every host of a cluster; for each rank that told something, the last thing it told."""
    found: dict[int, Any] = {}

    def on_line(rank: int, line: str) -> None:
        if line.startswith(_MARK):
            found[rank] = json.loads(line.removeprefix(_MARK))

    with VirtualHosts(cluster) as hosts:
        run_ranks([sys.executable, "-m", module, *arguments], places_on(hosts), timeout_s=timeout_s, on_line=on_line)
    return found
