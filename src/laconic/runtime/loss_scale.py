"""What a compressor remembers of gradients stays right when a GradScaler changes its scale.

Gradients arrive multiplied by the scaler's scale, and so does what compressors remember of them. When the scale has
changed since the pass before, what is remembered is multiplied by the ratio: it is then in the unit of the new
gradients. The scaler is found when it first calls optimizer.step().
"""

from __future__ import annotations

import sys
import weakref

import torch
from torch.amp.grad_scaler import GradScaler

_FRAMES = 12
"""How far up the stack a GradScaler is looked for: a few wrappers of step() lie between it and the hook."""


class LossScale:
    """The scale of the loop's GradScaler, if there is one."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._scaler: weakref.ref[GradScaler] | None = None
        self._known: torch.Tensor | None = None

    def notice(self) -> None:
        """Called inside optimizer.step(): find out whether a GradScaler makes this call."""
        if not self._wanted or self._scaler is not None:
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
                self._known = self._scale()
                return

    def _scale(self) -> torch.Tensor | None:
        scaler = self._scaler() if self._scaler is not None else None
        scale = scaler._scale if scaler is not None else None
        return None if scale is None else scale.detach().clone()

    def ratio(self) -> torch.Tensor | None:
        """At the beginning of a pass: by how much the scale has grown since the pass before; None if it has not."""
        now = self._scale()
        before, self._known = self._known, now
        if now is None or before is None:
            return None
        ratio = now / before
        # On a GPU the host does not wait to learn that nothing has changed.
        return None if ratio.device.type == "cpu" and float(ratio) == 1.0 else ratio
