"""Servers that run the optimizer: gradients are sent at the optimizer's step, and parameters come back.

The worker's optimizer finds no gradients and does nothing; the servers' optimizer has made the step.
"""

from __future__ import annotations

import torch

from laconic.errors import CommunicationError
from laconic.runtime.hooks.server_pushes import PushingHooks
from laconic.runtime.job import Job
from laconic.runtime.servers.protocol import group_settings
from laconic.runtime.servers.server_pool import ServerPool


class AsyncServerHooks(PushingHooks):
    """Sends gradients and takes parameters, bucket by bucket."""

    def __init__(self, job: Job, pool: ServerPool) -> None:
        super().__init__(job, pool)
        self._gradients: dict[str, torch.Tensor | None] = {}

    def before_step(self, *, closure: bool) -> None:
        """Push every gradient, overwrite the parameters with the answers, and hide the gradients."""
        job, pushes = self._job, self._pushes
        if closure:
            raise CommunicationError(
                f'with "{job.strategy.synchronization}" gradients are sent when optimizer.step() is called, so '
                "step() takes no closure. Call backward() first."
            )
        scale, overflow = _amp_scaling(job.optimizer)
        self._gradients = {name: parameter.grad for name, parameter in job.parameters.items()}
        if overflow:
            return
        with torch.no_grad():
            for name, gradient in self._gradients.items():
                if gradient is None:
                    pushes.views[name].zero_()
                else:
                    pushes.views[name].copy_(gradient if scale == 1.0 else gradient / scale)
            groups = [group_settings(group) for group in job.optimizer.param_groups]
            pushes.exchange(groups, lambda name: self._gradients[name] is None)
            for name, view in pushes.views.items():
                if pushes.brings_differences:
                    job.parameters[name].add_(view)
                else:
                    job.parameters[name].copy_(view)
                job.parameters[name].grad = None

    def after_step(self) -> None:
        """Restore the hidden gradients."""
        for name, gradient in self._gradients.items():
            self._job.parameters[name].grad = gradient
        self._gradients = {}


def _amp_scaling(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """The GradScaler's factor on gradients that the optimizer has to unscale itself, and whether they overflow.

    Optimizers made with fused=True check both inside step(), which is too late for gradients that are sent before.
    """
    scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    return (1.0 if scale is None else float(scale)), overflow is not None and bool(overflow)
