"""The ranks that share a host: traffic between them does not cross the network."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from laconic.errors import LaconicError

HOST_VARIABLE = "LACONIC_HOST"
"""The environment variable by which a rank names its host; ranks that give the same name share one."""

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of each host, in ascending order; hosts in the order of their first rank."""


Pairs = tuple[tuple[float, ...], ...]
"""Bits per second between rank (row) and rank (column) while all others exchange too; 0 between a rank and itself.
Empty: not measured."""


def hosts_of(names: Sequence[str]) -> Hosts:
    """The ranks of each host, from the host name of each rank."""
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name, []).append(rank)
    return tuple(map(tuple, found.values()))


def checked_hosts(hosts: Sequence[Sequence[int]], world_size: int) -> Hosts:
    """The hosts in order; raise LaconicError unless every rank is on exactly one of them."""
    ordered = tuple(sorted(tuple(sorted(host)) for host in hosts))
    if () in ordered or sorted(rank for host in ordered for rank in host) != list(range(world_size)):
        raise LaconicError(
            f"hosts must name each of the ranks 0 to {world_size - 1} once, got {hosts}. E.g. ((0, 1), (2, 3))."
        )
    return ordered


def hosts_alone(world_size: int) -> Hosts:
    """Every rank on a host of its own."""
    return tuple((rank,) for rank in range(world_size))


def name_of_host() -> str:
    """A name that ranks share exactly if they share a machine and, on it, a network."""
    given = os.environ.get(HOST_VARIABLE)
    if given:
        return given
    parts = [platform.node()]
    # Two machines may have one name, and one machine several networks: containers, the lab's virtual hosts.
    for path, read in (
        (Path("/proc/sys/kernel/random/boot_id"), Path.read_text),
        (Path("/proc/self/ns/net"), lambda link: str(link.readlink())),
    ):
        try:
            parts.append(read(path).strip())
        except OSError:
            continue  # not Linux: the machine's name must suffice
    return "|".join(parts)
