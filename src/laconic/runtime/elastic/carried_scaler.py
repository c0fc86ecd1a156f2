"""A GradScaler as ranks that join take it over: in the state that it will have after the step in which they join."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler


class CarriedScaler:
    """Where ranks join inside optimizer.step(), the others call scaler.update() afterwards; a joining rank does not.

    So it receives the state of a scaler that has updated already, by the overflows that are known by then. Usually
    ranks join later, and nothing is due.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """The state after the update that is due, or the current state if none is due."""
        scaler, state = self._scaler, self._scaler.state_dict()
        if not scaler.is_enabled():
            return state
        scale, tracker = scaler._scale, scaler._growth_tracker
        overflows = [
            found
            for of_optimizer in scaler._per_optimizer_states.values()
            for found in of_optimizer["found_inf_per_device"].values()
        ]
        if scale is None or tracker is None or not overflows:
            return state
        scale, tracker = scale.clone(), tracker.clone()
        overflow = torch.stack([found.to(scale.device) for found in overflows]).sum()
        growth, backoff, interval = (state[key] for key in ("growth_factor", "backoff_factor", "growth_interval"))
        torch._amp_update_scale_(scale, tracker, overflow, growth, backoff, interval)
        return {**state, "scale": float(scale), "_growth_tracker": int(tracker)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state."""
        if state_dict:
            self._scaler.load_state_dict(state_dict)
