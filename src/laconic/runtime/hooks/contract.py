"""The interface between a session and the hooks that connect a strategy to the training loop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.optim import Optimizer

from laconic.core.plan import Plan
from laconic.core.stateful import BucketState, ParameterState
from laconic.runtime.job import Job


class TrainingHooks:
    """One way to hook into the training loop: where a strategy sends, and where it applies the results.

    Every method but `plan` has a default, for a strategy that does not exchange gradients, keeps no state and has
    nothing in flight between steps.
    """

    can_join: bool = False
    """Whether a rank that has run out of data can continue to take part."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def plan(self) -> Plan:
        """The plan in force."""
        raise NotImplementedError

    def state(self) -> ParameterState:
        """All state, by parameter name."""
        return {}

    def bucket_states(self) -> list[BucketState]:
        """All state in its memory layout, by bucket."""
        return []

    def order(self) -> list[str]:
        """Parameter names in the order in which gradients become ready; empty while it is not known."""
        return []

    def load(self, saved: ParameterState, order: list[str], step: int) -> None:
        """Continue with saved state and order after `step` steps."""

    def accumulating(self) -> AbstractContextManager[object]:
        """Backward passes inside add up gradients locally."""
        return nullcontext()

    def before_step(self, *, closure: bool) -> None:
        """Raise unless all gradients that the optimizers are about to apply have been exchanged."""

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """One of several optimizers is about to apply gradients; `before_step` was called before the first of them."""

    def after_step(self) -> None:
        """Every optimizer has applied the gradients."""

    def finish_updates(self) -> None:
        """Make every deferred update now."""

    def wait(self) -> None:
        """Return when this rank has nothing in flight."""

    def settle(self) -> None:
        """Wait for the exchanges in flight and apply them."""

    def take_part(self) -> None:
        """Take part in the exchanges of a step with zeros; for ranks without data (session.join())."""
        raise NotImplementedError

    def adopt(self) -> None:
        """The parameters have been changed from outside: continue from there."""

    def stop_holding_up(self) -> None:
        """Release ranks that wait for steps of this one, because it is about to wait for them elsewhere."""

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Inside, no rank is in a step and parameters are as others see them; every rank enters and leaves."""
        yield

    def remember(self, field: str, values: Mapping[str, torch.Tensor]) -> None:
        """Overwrite a field of the state of each parameter; between two steps."""
        raise NotImplementedError

    def recall(self, field: str) -> Mapping[str, torch.Tensor]:
        """A writable view of a field of each parameter's state; between two exchanges."""
        raise NotImplementedError

    def leave(self, at_most_s: float = math.inf) -> None:
        """Say goodbye to other ranks and serve them as long as they need this one; not called after an error.

        at_most_s: then leave nevertheless.
        """

    def detach(self) -> None:
        """Remove every hook and leave gradients as ordinary tensors; waits for nothing, so it may follow an error."""
