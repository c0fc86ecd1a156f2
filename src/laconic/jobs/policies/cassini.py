"""Interleaving: jobs that share a link communicate in turns.

Reference: Rajasekaran et al. 2024 (CASSINI), NSDI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.jobs.policies.network_aware import NetworkAware


@dataclass(frozen=True, kw_only=True)
class Cassini(NetworkAware):
    """Like rack_aware, and the communication of jobs on one link is shifted so that they take turns."""

    name: ClassVar[str] = "cassini"
    interleaves: ClassVar[bool] = True
