"""How much may be lost: every exchange adds `tolerate` of its rows to a credit, and lost rows are taken from it.

    lost in any K exchanges <= tolerate x rows of (K + 32) exchanges of the largest size

So a rank that is late once, whose rows are 1/n of an exchange, may be left out if little was lost before; a rank
that is always late may not.
"""

from __future__ import annotations

_EXCHANGES = 32
"""Exchanges whose credit can be saved up."""


class LossLedger:
    """How much an owner has lost, and may still lose. Amounts are in values, or any unit that all calls share."""

    def __init__(self, tolerate: float) -> None:
        self._tolerate = tolerate
        self._credit = 0.0
        self._largest = 0
        self.lost = 0
        """The amount lost in all exchanges so far."""
        self.expected = 0

    def allows(self, lost: int, expected: int) -> bool:
        """Whether an exchange may end with `lost` missing out of `expected`."""
        return lost <= self._credit + self._tolerate * expected

    def settle(self, lost: int, expected: int) -> None:
        """An exchange has ended."""
        self._largest = max(self._largest, expected)
        saved = self._credit + self._tolerate * expected - lost
        self._credit = min(saved, _EXCHANGES * self._tolerate * self._largest)
        self.lost += lost
        self.expected += expected

    @property
    def lost_ratio(self) -> float:
        """The share that was lost so far."""
        return self.lost / self.expected if self.expected else 0.0
