"""Hosts to try algorithms on."""

from __future__ import annotations

import pytest

from laconic.collectives import ALGORITHMS, Collective
from laconic.core.hosts import Hosts

every_algorithm = pytest.mark.parametrize("algorithm", list(ALGORITHMS))


def hosts_of_size(world_size: int, ranks_per_host: int) -> Hosts:
    """Full hosts, and what is left on one more."""
    return tuple(
        tuple(range(first, min(first + ranks_per_host, world_size))) for first in range(0, world_size, ranks_per_host)
    )


def collective(algorithm: str, world_size: int) -> Collective:
    """On hosts of three ranks each, of which the last may have fewer."""
    return ALGORITHMS[algorithm](hosts_of_size(world_size, 3))
