"""First come, first served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.cluster.fabric import Floats
from laconic.jobs.policies.contract import View
from laconic.jobs.policies.ranked import RankedPolicy


@dataclass(frozen=True, kw_only=True)
class Fifo(RankedPolicy):
    """Jobs in order of arrival; a later one runs early only on GPUs that earlier ones cannot use."""

    name: ClassVar[str] = "fifo"

    def keys(self, view: View) -> Floats:
        return -view.age_s
