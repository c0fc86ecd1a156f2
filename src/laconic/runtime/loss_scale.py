"""What a compressor remembers of gradients stays right when a GradScaler changes its scale.

Gradients arrive multiplied by the scaler's scale, and so does what compressors remember of them. When the scale has
changed since the pass before, what is remembered is multiplied by the ratio: it is then in the unit of the new
gradients. Saved states are in the unit of gradients without a scale. The scaler is found when it first calls
optimizer.step(), or given to attach().
"""

from __future__ import annotations

import sys
import weakref

import torch
from torch.amp.grad_scaler import GradScaler

from laconic.errors import warn_user
from laconic.strategy import Strategy

_FRAMES = 12
"""How far up the stack a GradScaler is looked for: a few wrappers of step() lie between it and the hook."""


class LossScale:
    """The scale of the loop's GradScaler, if there is one."""

    def __init__(self, strategy: Strategy, scaler: GradScaler | None = None) -> None:
        self._strategy = strategy
        self._remembers = strategy.exchanges_gradients() and bool(strategy.scaled_fields())
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self._unit: torch.Tensor | None = None
        """The scale in whose unit gradients are remembered now; None: without a scale."""
        self._passes = 0
        """Before the scaler was found."""
        self._forgets = False

    def notice(self) -> None:
        """Called inside optimizer.step(): find out whether a GradScaler makes this call."""
        if self._scaler is not None or not self._strategy.exchanges_gradients():
            return
        frame = sys._getframe(1)
        for _ in range(_FRAMES):
            caller = frame.f_back
            if caller is None:
                return
            frame = caller
            found = frame.f_locals.get("self")
            if isinstance(found, GradScaler) and found.is_enabled():
                self._scaler = weakref.ref(found)
                self._unit = self._scale()
                # Passes whose step was skipped had other scales, which nobody knows now.
                self._forgets = self._passes > 1
                self._warn()
                return

    def _warn(self) -> None:
        if not self._strategy.scale_equivariant():
            warn_user(
                f'"{self._strategy}" treats gradients by their absolute size, and a GradScaler multiplies them by a '
                "scale that changes. Train in bfloat16 without a GradScaler, or use another compression."
            )

    def _scale(self) -> torch.Tensor | None:
        scaler = self._scaler() if self._scaler is not None else None
        if scaler is None or not scaler.is_enabled():
            return None
        # Before its first call of scale() a scaler has only a number.
        return torch.tensor(scaler.get_scale()) if scaler._scale is None else scaler._scale.detach().clone()

    def begin_pass(self) -> torch.Tensor | None:
        """By how much what is remembered must be multiplied for the gradients that come now; None: by nothing."""
        if not self._remembers:
            return None
        now = self._scale()
        before, self._unit = self._unit, now
        self._passes += self._scaler is None
        if self._forgets:
            self._forgets = False
            return torch.zeros(())
        if now is None:
            return None
        ratio = now if before is None else now / before
        # On a GPU the host does not wait to learn that nothing has changed.
        return None if ratio.device.type == "cpu" and float(ratio) == 1.0 else ratio

    @property
    def unit(self) -> float:
        """The scale in whose unit gradients are remembered now."""
        return 1.0 if self._unit is None else float(self._unit)

    def why_not_loaded(self, *, scaled: bool) -> str:
        """Why a state cannot be loaded that was saved while a GradScaler was in use (`scaled`); empty if it can."""
        if not scaled or not self._remembers or self._scaler is not None:
            return ""
        return (
            "the checkpoint was written while a GradScaler was in use, and no scaler is known here yet: remembered "
            "gradients would meet scaled ones. Pass it: attach(..., grad_scaler=scaler)."
        )

    def loaded(self) -> None:
        """A saved state was loaded, which is in the unit of gradients without a scale."""
        self._unit = None
