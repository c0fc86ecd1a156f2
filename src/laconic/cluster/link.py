"""One cable: bandwidth, delay and loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from laconic.errors import UsageError
from laconic.units import format_rate, format_time, parse_quantity


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of one cable; both directions are equal."""

    bandwidth_bps: float
    delay_s: float = 0.0
    loss_ratio: float = 0.0

    def __post_init__(self) -> None:
        # Below a kilobit per second nothing useful happens; above 10 Tbit/s it is a typing error.
        if not 1e3 <= self.bandwidth_bps <= 1e13:
            raise UsageError(
                f"bandwidth must be between 1kbit and 10tbit per second, got {format_rate(self.bandwidth_bps)}."
            )
        if not 0 <= self.delay_s <= 10:
            raise UsageError(f"delay must be between 0 and 10 s, got {format_time(self.delay_s)}.")
        if not 0 <= self.loss_ratio < 1:
            raise UsageError(f"loss must be at least 0 and below 1, got {self.loss_ratio:g}.")

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth in bytes."""
        return self.bandwidth_bps / 8

    def __str__(self) -> str:
        extra = f", delay {format_time(self.delay_s)}" if self.delay_s else ""
        extra += f", loss {self.loss_ratio:.3g}" if self.loss_ratio else ""
        return f"{format_rate(self.bandwidth_bps)}{extra}"


def usual_link(links: Sequence[Link]) -> Link:
    """The link that most hosts have; of several, the first."""
    return Counter(links).most_common(1)[0][0]


def parse_bandwidth(text: str, where: str) -> float:
    """Bits per second from text such as 100mbit."""
    return parse_quantity(text, "rate", where)
