"""Send entries above a threshold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.counted import CountedEntries
from laconic.compression.traits import Traits, computed_once
from laconic.core.stateful import BucketState
from laconic.settings import number


@dataclass(frozen=True, kw_only=True)
class Threshold(CountedEntries):
    """Send every entry whose magnitude is above tau.

        m = |g| > tau,   decoded = m * g

    The number of entries depends on the gradient: a first round exchanges the counts, a second gathers payloads padded
    to the longest. g is already divided by the number of workers, so tau must be chosen for that. Strom's own variant
    sends only signs and adds +-tau; here the values are sent as float32. Values that are not finite are always sent.

    Reference: Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing".
    """

    name: ClassVar[str] = "threshold"
    good_for: ClassVar[str] = "gradients that come in bursts, if tau is known"
    first_setting: ClassVar[str] = "tau"

    tau: float = number(1e-3, above=0.0)
    """Magnitudes above this are sent."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Unsent entries are lost; tau is an absolute magnitude."""
        return replace(
            super().traits, wants_error_feedback=True, scale_equivariant=False, loss_gap=0.043, loss_deviation=0.033
        )

    def choose(self, flat: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything above the threshold."""
        # Not "above", so that NaN is among them.
        indices = (~(flat.abs() <= self.tau)).nonzero().view(-1)
        return indices, flat[indices]
