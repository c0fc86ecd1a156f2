"""Average while training continues: a round is in flight for a whole period."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.core.stateful import Resize
from laconic.settings import count
from laconic.synchronization.contract import LocalUpdates

_DEPARTURE = "delayed.departure"


@dataclass(frozen=True, kw_only=True)
class Delayed(LocalUpdates):
    """Make `period` steps, and average their changes during the next `period` steps.

        d_i = the change of replica i in its last H steps
        H steps later   x_old <- x_old - mean_i(d_i),   x_i <- x_old - (its change in the H steps since)

    Changes of other replicas arrive one round late, a replica's own count at once, and each counts once. The exchange
    overlaps with H whole steps of computation; replicas are never equal, only x_old is. This is a synchronization and
    not a schedule: a schedule never changes a result, and this computes gradients at other parameters.

    Reference: Zhou et al. 2020 (DaSGD), arXiv:2006.00441; Coquelin et al. 2021 (DASO), arXiv:2104.05588; Sun et al.
    2024 (CO2), arXiv:2401.16265.
    """

    name: ClassVar[str] = "delayed"
    fields: ClassVar[Mapping[str, Resize]] = {_DEPARTURE: "reset"}

    period: int = count(1, at_least=1)
    """Optimizer steps between two rounds, and between the start of a round and its effect."""

    @property
    def delay(self) -> int:
        return self.period

    @property
    def departure(self) -> str:
        return _DEPARTURE

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        anchor -= change
