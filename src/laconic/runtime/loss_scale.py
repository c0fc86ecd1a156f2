"""Rescales the state of compressors when a GradScaler changes its scale.

Gradients are multiplied by the scaler's scale, and so are the residuals that compressors keep of them. When the scale
has changed since the previous pass, residuals are multiplied by the ratio, so they are in the unit of the new
gradients. Saved states are in the unit of unscaled gradients. The scaler is found when it first calls optimizer.step(),
or is passed to attach().
"""

from __future__ import annotations

import sys
import weakref

import torch
from torch.amp.grad_scaler import GradScaler

from laconic.errors import warn_user
from laconic.strategy import Strategy

_FRAMES = 12
"""How many frames of the stack are searched for a GradScaler: a few wrappers of step() lie between it and the hook."""


class LossScale:
    """The scale of the loop's GradScaler, if there is one."""

    def __init__(self, strategy: Strategy, scaler: GradScaler | None = None) -> None:
        self._strategy = strategy
        self._remembers = strategy.exchanges_gradients() and bool(strategy.scaled_fields())
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self._unit: torch.Tensor | None = None
        """The scale that residuals are in now; None: unscaled."""
        self._passes = 0
        """Passes before the scaler was found."""
        self._forgets = False

    def follow(self, strategy: Strategy, *, carries: bool) -> None:
        """Another strategy has taken over; `carries`: it sends the residuals of the previous one."""
        self._strategy = strategy
        self._remembers = carries or (strategy.exchanges_gradients() and bool(strategy.scaled_fields()))

    def notice(self) -> None:
        """Called inside optimizer.step(): find out whether a GradScaler makes this call."""
        if self._scaler is not None:
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
                if not self._strategy.exchanges_gradients():
                    return  # what is remembered is none of gradients
                self._unit = self._scale()
                # Passes whose step was skipped had other scales, which are no longer known.
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
        # Before the first call of scale() the scale is a plain number.
        return torch.tensor(scaler.get_scale()) if scaler._scale is None else scaler._scale.detach().clone()

    def begin_pass(self) -> torch.Tensor | None:
        """The factor that brings residuals into the unit of the coming gradients; None: no change."""
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
        # On a GPU the host must not synchronize to find out that nothing has changed.
        return None if ratio.device.type == "cpu" and float(ratio) == 1.0 else ratio

    @property
    def has_scaler(self) -> bool:
        """Whether the loop has a GradScaler, as far as is known."""
        return self._scaler is not None

    @property
    def in_use(self) -> bool:
        """Whether gradients that are exchanged have been multiplied by a GradScaler's scale, as far as is known."""
        return self.has_scaler and self._strategy.exchanges_gradients()

    @property
    def unit(self) -> float:
        """The scale that residuals are in now, as a number."""
        return 1.0 if self._unit is None else float(self._unit)

    def why_not_loaded(self, *, scaled: bool) -> str:
        """Why a state that was saved with a GradScaler in use (`scaled`) cannot be loaded; empty if it can."""
        if not scaled or not self._remembers or self._scaler is not None:
            return ""
        return (
            "the checkpoint was written while a GradScaler was in use, and no scaler is known here yet: residuals "
            "and gradients would have different scales. Pass it: attach(..., grad_scaler=scaler)."
        )

    def adopt(self, unit: float) -> None:
        """A state was taken over from another rank, in the unit in which that rank remembers gradients."""
        self._unit = torch.tensor(unit)

    def loaded(self) -> None:
        """A saved state was loaded; it is in the unit of unscaled gradients."""
        self._unit = None
