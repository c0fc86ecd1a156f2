"""One compressor inside a host, another for the sums of hosts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from laconic.compression.contract import Compressor, Wrapper
from laconic.compression.traits import Traits


@dataclass(frozen=True, kw_only=True)
class TwoLevels(Wrapper):
    """The wrapped compressor for payloads inside a host, `sums` for payloads between hosts."""

    name: ClassVar[str] = "two_levels"
    sums: Compressor

    @property
    def between_hosts(self) -> Compressor:
        """The compressor for sums."""
        return self.sums

    def traits_around(self, inner: Traits) -> Traits:
        """Traits that must hold on both levels."""
        sums = self.sums.traits
        return replace(
            inner,
            lossless=inner.lossless and sums.lossless,
            unbiased=inner.unbiased and sums.unbiased,
            payloads_add_up=False,
            gives_factors=False,
            dtypes=tuple(dtype for dtype in inner.dtypes if dtype in sums.dtypes),
        )

    def __str__(self) -> str:
        return str(self.inner)
