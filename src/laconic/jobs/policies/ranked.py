"""Policies that only put jobs in an order, anew for each round."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from laconic.cluster.fabric import Floats
from laconic.jobs.policies.contract import Chooser, Policy, Turn, View


@dataclass(frozen=True, kw_only=True)
class RankedPolicy(Policy):
    """Jobs with the smallest keys first; among equals, those that came first."""

    @abstractmethod
    def keys(self, view: View) -> Floats:
        """The key of each job; small keys come first."""
        ...

    def start(self) -> Chooser:
        return _Ranked(self)


@dataclass(frozen=True)
class _Ranked:
    policy: RankedPolicy

    def choose(self, view: View) -> Turn:
        return Turn(np.lexsort((view.number, self.policy.keys(view))), view.gpus)
