"""Local Adam whose parameters and moments are averaged at different periods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.tensor import TensorSpec
from laconic.settings import count
from laconic.synchronization.contract import LocalUpdates

_FIRST, _SECOND = "exp_avg", "exp_avg_sq"


@dataclass(frozen=True, kw_only=True)
class DesLoc(LocalUpdates):
    """Average parameters every `period` steps, and Adam's moments at longer periods of their own.

        x_i <- mean_j(x_j)   every K steps
        m_i <- mean_j(m_j)   every K * first_every steps,    v_i <- mean_j(v_j)   every K * second_every steps

    A moment with a half-life of hundreds of steps changes little between rounds, so it need not be averaged as often as
    parameters: with 3 and 6, half the bytes of averaging all three in every round are sent. Changes of parameters go
    through the strategy's compressor; moments are sent uncompressed, because a second moment that is rounded to 0 would
    make arbitrarily large steps.

    Reference: Iacob et al. 2025, arXiv:2505.22549.
    """

    name: ClassVar[str] = "des_loc"
    needs_adam: ClassVar[bool] = True

    first_every: int = count(3, at_least=1)
    """Rounds of parameters from one average of first moments to the next."""
    second_every: int = count(6, at_least=1)
    """Rounds of parameters from one average of second moments to the next."""

    @property
    def moments(self) -> Sequence[str]:
        return _FIRST, _SECOND

    @property
    def cycle(self) -> int:
        return self.period * math.lcm(self.first_every, self.second_every)

    def rounds_per_step(self, moment: str = "") -> float:
        return 1.0 / (self.period * {_FIRST: self.first_every, _SECOND: self.second_every}.get(moment, 1))

    def due(self, num_steps: int) -> list[int]:
        every = (1, self.first_every, self.second_every)
        return [part for part, rounds in enumerate(every) if num_steps % (self.period * rounds) == 0]

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Raise if the optimizer has no moments like Adam's."""
        optimizer.check_adam("synchronization.des_loc")

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        anchor -= change
