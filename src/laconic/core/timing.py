"""How long things take, as far as a schedule wants to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """When gradients become ready, and what it costs to exchange them.

    t(M) = startup_s + byte_s M
    """

    ready_s: tuple[float, ...]
    """For each tensor, in the order of the list it belongs to: seconds after the first gradient; never decreasing."""
    startup_s: float
    """a: what an exchange of nothing takes."""
    byte_s: float
    """b: what each further byte takes."""

    def exchange_s(self, nbytes: float) -> float:
        """How long an exchange of so many bytes takes."""
        return self.startup_s + self.byte_s * nbytes
