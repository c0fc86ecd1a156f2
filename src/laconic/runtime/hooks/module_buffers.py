"""Module buffers (BatchNorm statistics and the like): rank 0's before each training forward pass, as DDP does it."""

from __future__ import annotations

import torch
from torch import nn

from laconic.runtime.agreement import broadcast_all
from laconic.runtime.hooks.module_hook import before_forward
from laconic.runtime.job import Job


class ModuleBuffers:
    """Keeps the buffers of a module equal on all ranks."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._due = True
        self._handle = None
        # With elastic nothing is exchanged in a forward pass, because that cannot be repeated.
        alone = job.transport.world_size == 1 or job.recovery is not None
        if not alone and any(True for _ in job.model.buffers()):
            self._handle = before_forward(job.model, self.before_forward)

    def before_forward(self, module: nn.Module) -> None:
        """Synchronize if this is a training forward pass of the attached model itself."""
        if module is self._job.model and module.training and torch.is_grad_enabled():
            if self._due:
                self.synchronize()
            # As in DDP, the forward pass after one that only accumulated keeps its own statistics.
            self._due = not self._job.accumulating

    def restart(self) -> None:
        """Synchronize before the next forward pass, whatever this rank did last."""
        self._due = True

    def synchronize(self) -> None:
        """Overwrite all buffers with rank 0's; inside session.join(), with those of a rank that still trains."""
        job = self._job
        buffers = list(job.model.buffers())
        if not buffers or job.transport.world_size == 1:
            return
        source = job.announce("module buffers").source
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
            job.engine.call(
                "module buffers",
                lambda: broadcast_all(
                    job.transport,
                    buffers,
                    purpose="buffers",
                    what=f"module buffers in step {job.step}",
                    source=source,
                ),
                step=job.step,
                device=buffers[0].device,
            )

    def detach(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
