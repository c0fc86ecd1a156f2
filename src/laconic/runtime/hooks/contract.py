"""What the session asks of the hooks that let a strategy into the training loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

import torch
from torch.optim import Optimizer

from laconic.core.plan import Plan
from laconic.core.stateful import ParameterState
from laconic.runtime.job import Job


class TrainingHooks:
    """One way to get at what is exchanged: where in the loop a strategy sends, and where it applies what arrives.

    Every answer but `plan` has a default: the one of a strategy that leaves gradients to their rank, remembers nothing
    and has nothing in flight between steps.
    """

    can_join: ClassVar[bool] = False
    """Whether a rank that has run out of data can go on taking part."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def plan(self) -> Plan:
        """The plan in force."""
        raise NotImplementedError

    def state(self) -> ParameterState:
        """All that is remembered, by parameter name."""
        return {}

    def order(self) -> list[str]:
        """Parameter names in the order in which gradients become ready; empty while it is not known."""
        return []

    def load(self, saved: ParameterState, order: list[str], step: int) -> None:
        """Continue with saved state and order after `step` steps."""

    def accumulating(self) -> AbstractContextManager[object]:
        """Backward passes inside add up gradients locally."""
        return nullcontext()

    def before_step(self, *, closure: bool) -> None:
        """Make sure that what optimizers are about to apply has been exchanged, or raise."""

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """One of several optimizers is about to apply gradients; `before_step` was called before the first of them."""

    def after_step(self) -> None:
        """Every optimizer has applied the gradients."""

    def finish_updates(self) -> None:
        """Make every update of the steps so far that still waits for gradients."""

    def wait(self) -> None:
        """Return when nothing of this rank's is in flight."""

    def settle(self) -> None:
        """Wait for what is in flight and apply it."""

    def take_part(self) -> None:
        """Do what ranks with data do in this step, with nothing of this rank's own; see session.join()."""
        raise NotImplementedError

    def adopt(self) -> None:
        """The parameters have been changed from outside: continue from there."""

    def stop_holding_up(self) -> None:
        """Let ranks go on that wait for this one to make steps: it is about to wait for them elsewhere."""

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Inside, no rank is in a step and parameters are as others see them; every rank enters and leaves."""
        yield

    def remember(self, field: str, values: Mapping[str, torch.Tensor]) -> None:
        """Overwrite a field of what is remembered of each parameter; between two steps."""
        raise NotImplementedError

    def leave(self) -> None:
        """Say goodbye to other ranks and stay as long as they need this one; not called after an error."""

    def detach(self) -> None:
        """Remove every hook and leave gradients as ordinary tensors; waits for nothing, so it may follow an error."""
