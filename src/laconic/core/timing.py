"""The times that a schedule may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """When gradients become ready, and the cost of exchanging them.

    t(M) = startup_s + byte_s M
    """

    ready_s: tuple[float, ...]
    """For each tensor, in the order of the list it belongs to: seconds after the first gradient; never decreasing."""
    startup_s: float
    """a: the time of an exchange of zero bytes."""
    byte_s: float
    """b: the time of each further byte."""

    def exchange_s(self, nbytes: float) -> float:
        """The time of an exchange of this many bytes."""
        return self.startup_s + self.byte_s * nbytes
