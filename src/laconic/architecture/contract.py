"""What an architecture promises: a Group to compressors, and what each round costs in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.core.exchange import Group, Round
from laconic.core.transport import Transport
from laconic.settings import Method


@dataclass(frozen=True, kw_only=True)
class Architecture(Method):
    """WITH WHOM a replica averages."""

    axis: ClassVar[str] = "architecture"

    def group(self, transport: Transport, what: str) -> Group:
        """The group a compressor exchanges `what` with."""
        raise NotImplementedError

    def sent_bytes(self, round: Round, world_size: int) -> int:
        """Bytes one rank sends for `round`, without running it."""
        raise NotImplementedError
