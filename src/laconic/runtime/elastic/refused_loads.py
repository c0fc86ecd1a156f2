"""A rank that has joined must not load a checkpoint: it has the state of the others, and would leave them.

Scripts load their last checkpoint when they start, and `laconic run` starts the same script for a rank that joins.
"""

from __future__ import annotations

from torch.utils.hooks import RemovableHandle

from laconic.errors import AttachError
from laconic.runtime.hooks.module_hook import ModuleHook
from laconic.runtime.job import Job


class RefusedLoads:
    """Raises if this rank loads a state between joining and the end of its first joint work with the others."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._step: int | None = None

    def begin(self, job: Job) -> None:
        """This rank has just taken over the state of the others."""
        self._step = job.step
        hook = ModuleHook(lambda _: self.refuse())
        self._handles = [
            *(module.register_load_state_dict_pre_hook(hook) for module in job.model.modules()),
            *(optimizer.register_load_state_dict_pre_hook(lambda *_: self.refuse()) for optimizer in job.optimizers),
        ]

    def refuse(self) -> None:
        """Raise if this rank must not load a state now."""
        if self._step is not None:
            raise AttachError(
                f"this worker has joined other ranks after step {self._step} and has taken over their state, so it "
                "must not load a checkpoint: replicas would differ. Load model and optimizer before attach(), or load "
                "only where training begins: if session.step == 0."
            )

    def end(self) -> None:
        """From now on a state is loaded by all ranks or by none; ending twice is fine."""
        self._step = None
        for handle in self._handles:
            handle.remove()
        self._handles = []
