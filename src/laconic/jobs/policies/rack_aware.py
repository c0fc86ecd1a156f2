"""Placement by traffic: jobs that exchange gradients stay together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.jobs.policies.network_aware import NetworkAware


@dataclass(frozen=True, kw_only=True)
class RackAware(NetworkAware):
    """Shortest remaining service first, at the speed that links allow, on as few hosts and racks as possible."""

    name: ClassVar[str] = "rack_aware"
