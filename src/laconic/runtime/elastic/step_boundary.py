"""When the view may change: between two steps, when the loop has done everything that follows the first of them.

After optimizer.step() a loop may change objects whose state joining ranks take over: scheduler.step(), scaler.update(),
an average of the weights. It has done so when it asks session.batches() for the next batch or, in a loop that has
batches of its own, when it calls the model. All ranks run the same loop, so they all change at the same place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from laconic.runtime.hooks.module_hook import before_forward


class StepBoundary:
    """Whether a change of the view is wanted, and whether it may be made now."""

    def __init__(self, change: Callable[[], None]) -> None:
        """change: changes the view, until none is wanted."""
        self.wanted = False
        self._change = change
        self._was_wanted = False
        """Whether a change was wanted already after the last step."""
        self._between_steps = False
        self._has_batch = False
        """Whether session.batches() has handed out a batch since the last step."""
        self._model: nn.Module | None = None
        self._handle: RemovableHandle | None = None

    def watch(self, model: nn.Module) -> None:
        """Notice when the loop calls this model."""
        self._model = model
        self._handle = before_forward(model, self._before_forward, first=True)

    def close(self) -> None:
        """Remove the hook; closing twice is fine."""
        if self._handle is not None:
            self._handle.remove()

    def forget(self) -> None:
        """Drop a request for a change, as its view has ended: in the next view it is made again if it still holds."""
        self.wanted = self._was_wanted = False

    def exchange_begins(self) -> None:
        """The next step has come to its first exchange."""
        self._between_steps = False

    def step_made(self) -> None:
        """All optimizers have made their step."""
        self._between_steps, self._has_batch = True, False
        overdue, self._was_wanted = self.wanted and self._was_wanted, self.wanted
        if overdue:
            self._change()  # the loop neither asks for batches nor calls the model itself

    def batch_wanted(self) -> None:
        """The loop asks for its next batch."""
        if self._between_steps:
            self._change()

    def batch_handed_out(self) -> None:
        """The loop has its next batch."""
        self._has_batch = True

    def _before_forward(self, module: nn.Module) -> None:
        trains = module is self._model and module.training and torch.is_grad_enabled()
        if trains and self._between_steps and not self._has_batch:
            self._change()
