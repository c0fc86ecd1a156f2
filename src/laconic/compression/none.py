"""Send gradients uncompressed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.compression.contract import Uncompressed


@dataclass(frozen=True, kw_only=True)
class NoCompression(Uncompressed):
    """Send every value in its own precision.

    decoded = g
    """

    name: ClassVar[str] = "none"
    family: ClassVar[str] = "uncompressed"
    good_for: ClassVar[str] = "fast links, and as the baseline for all others"
