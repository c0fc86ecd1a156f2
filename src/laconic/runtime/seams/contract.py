"""What a seam promises to the session."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from laconic.core.plan import Plan
from laconic.core.stateful import ParameterState


class Seam(Protocol):
    """One way to get at what is exchanged."""

    def state(self) -> ParameterState:
        """All that is remembered, by parameter name."""
        ...

    def order(self) -> list[str]:
        """Parameter names in the order in which gradients become ready; empty while it is not known."""
        ...

    def load(self, saved: ParameterState, order: list[str], step: int) -> None:
        """Continue with saved state and order after `step` steps."""
        ...

    def plan(self) -> Plan:
        """The plan in force."""
        ...

    def accumulating(self) -> AbstractContextManager[object]:
        """Backward passes inside add up gradients locally."""
        ...

    def before_step(self, *, closure: bool) -> None:
        """Make sure that what the optimizer is about to apply has been exchanged, or raise."""
        ...

    def after_step(self) -> None:
        """The optimizer has applied the gradients."""
        ...

    def wait(self) -> None:
        """Return when nothing of this rank's is on its way."""
        ...

    def settle(self) -> None:
        """Wait for what is on its way and apply it."""
        ...

    def adopt(self) -> None:
        """The parameters have been changed from outside: go on from there."""
        ...

    def detach(self) -> None:
        """Take every hook off and leave gradients as ordinary tensors."""
        ...


@runtime_checkable
class WithoutBarrier(Protocol):
    """What a seam promises beside that if no step brings all ranks together."""

    def at_rest(self) -> AbstractContextManager[object]:
        """Inside, no rank is in a step and parameters are as others see them; every rank comes and goes."""
        ...

    def leave(self) -> None:
        """Say goodbye to other ranks and stay as long as they need this one; not called after an error."""
        ...
