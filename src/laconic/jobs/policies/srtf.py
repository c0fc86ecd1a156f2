"""Shortest remaining time first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.cluster.fabric import Floats
from laconic.jobs.policies.contract import View
from laconic.jobs.policies.ranked import RankedPolicy


@dataclass(frozen=True, kw_only=True)
class Srtf(RankedPolicy):
    """The job with the least remaining time first."""

    name: ClassVar[str] = "srtf"

    def keys(self, view: View) -> Floats:
        return view.left_s
