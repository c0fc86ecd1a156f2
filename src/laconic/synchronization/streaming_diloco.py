"""DiLoCo one fragment at a time, while training continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.core.stateful import Resize
from laconic.errors import InvalidSetting
from laconic.settings import count, number, share
from laconic.synchronization.contract import LocalUpdates, nesterov

_MOMENTUM = "streaming_diloco.momentum"


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(LocalUpdates):
    """DiLoCo that exchanges one fragment of the model at a time, in the background of later steps.

        fragment p begins its round at steps p H/P, p H/P + H, ...;  tau steps later
        x_old <- Nesterov(x_old, mean_i(d_i)),   x_i <- alpha x_i + (1 - alpha) x_old

    The link carries 1/P of the model at a time and has tau steps for it, so peak bandwidth falls and training does not
    wait. Published with an outer gradient of 4 bits: "streaming_diloco / all_reduce / int4 + error_feedback".

    Reference: Douillard et al. 2025, arXiv:2501.18512.
    """

    name: ClassVar[str] = "streaming_diloco"
    elastic: ClassVar[bool] = True
    acts_alone: ClassVar[bool] = True
    fields: ClassVar[Mapping[str, Resize]] = {_MOMENTUM: "copy"}

    fragments: int = count(4, at_least=1)
    """P: the number of fragments, which are exchanged in turn."""
    overlap: int = count(2)
    """tau: steps made while a fragment is in flight; 0 waits for it."""
    alpha: float = share(0.5, above=None, at_least=0.0)
    """The weight of a replica's own parameters when the new anchor is mixed in; 0 overwrites them."""
    lr: float = number(0.7, above=0.0)
    """The outer learning rate."""
    momentum: float = number(0.9, at_least=0.0, at_most=0.999)
    """The outer momentum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        where = f"{self.axis}.{self.name}"
        if self.overlap >= self.period:
            raise InvalidSetting(
                f"{where}.overlap must be < period ({self.period}), got {self.overlap}: a fragment would be "
                "launched again while it is still in flight."
            )
        if self.fragments > self.period:
            raise InvalidSetting(
                f"{where}.fragments must be <= period ({self.period}), got {self.fragments}: some fragments would be "
                "launched at the same step."
            )

    @property
    def num_parts(self) -> int:
        return self.fragments

    @property
    def delay(self) -> int:
        return self.overlap

    @property
    def keep(self) -> float:
        return self.alpha

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        nesterov(anchor, change, memory[_MOMENTUM], self.lr, self.momentum)
