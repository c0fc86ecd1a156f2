"""Send entries that reach the largest magnitude of their bin once this step's gradient is counted twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.counted import CountedEntries
from laconic.compression.kernels.bins import take_reaching
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.chunks import chunks_of
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize
from laconic.settings import count

_RESIDUAL = "adacomp.residual"


@dataclass(frozen=True, kw_only=True)
class AdaComp(CountedEntries):
    """Send the entries of each bin that, with this step's gradient added once more, reach the bin's largest magnitude.

        G = e + g,   m = |G + g| >= max |G| over the bin,   decoded = m * G,   e = G - m * G

    The largest entry of each bin is sent if it still grows, with others of about the same size; so the number of
    entries adapts to the gradient, and no density has to be chosen. The method keeps its own residual, so
    error_feedback is refused. The paper sends signs and one scale per layer; here values are sent as float32. A bin of
    zeros sends nothing, and a bin with a NaN is sent whole. An infinity is sent, not kept in the residual.

    Reference: Chen et al. 2017, arXiv:1712.02679.
    """

    name: ClassVar[str] = "adacomp"
    good_for: ClassVar[str] = "a number of entries that adapts to the gradient: no density to choose"
    first_setting: ClassVar[str] = "bin"
    # Residuals of any workers can be added up.
    on_resize: ClassVar[Mapping[str, Resize]] = {_RESIDUAL: "sum"}
    scaled_fields: ClassVar[frozenset[str]] = frozenset({_RESIDUAL})
    owed_fields: ClassVar[frozenset[str]] = frozenset({_RESIDUAL})

    bin: int = count(500, at_least=2, at_most=65536)
    """Adjacent entries that are compared with their largest; the paper uses 50 for convolutions, 500 for the rest."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Unsent entries are sent later."""
        return replace(super().traits, keeps_residual=True, loss_gap=0.099, loss_deviation=0.046)

    def init(self, bucket: Bucket) -> BucketState:
        """A residual of zero per element."""
        residual = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        return BucketState(bucket, flat={_RESIDUAL: residual})

    def choose(self, flat: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        """The selected entries; the rest becomes the residual."""
        bins = chunks_of(state, block=self.bin, bits=8, num_scales=0)
        return take_reaching(flat, state.flat[_RESIDUAL], bins)
