"""How much of what ranks send may be missing from a mean."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LossBound:
    """How much loss is tolerated, and how long an owner waits for the rest."""

    tolerate: float
    """The share of all that ranks send to an owner that may be missing, on average over exchanges."""
    percentile: float
    """The share of recent exchanges that were complete within the waiting time."""
