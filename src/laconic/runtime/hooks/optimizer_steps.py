"""Where one step ends and the next begins: hooks on the optimizer."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from laconic.core.event import Event, Scalar
from laconic.errors import AttachError
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.job import Job


class BeforeStep:
    """Runs before optimizer.step(): nothing may be applied that has not been exchanged."""

    def __init__(self, job: Job, hooks: TrainingHooks | None) -> None:
        self._job = job
        self._hooks = hooks
        self._known = {id(parameter) for parameter in job.parameters.values()}

    def __call__(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Raise if the step must not be taken."""
        if self._job.updating:
            return
        self._job.engine.check()
        check_optimizer(optimizer, self._known)
        if self._hooks is not None:
            # torch hands its hooks the optimizer as the first argument.
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            self._hooks.before_step(closure=closure is not None)


class AfterStep:
    """Runs after optimizer.step(): counts the step and says how long it took."""

    def __init__(self, job: Job, hooks: TrainingHooks | None) -> None:
        self._job = job
        self._hooks = hooks
        self._began_s = job.clock.now()

    def __call__(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Count the step."""
        if self._job.updating:
            return
        if self._hooks is not None:
            self._hooks.after_step()
        job, now_s = self._job, self._job.clock.now()
        data: dict[str, Scalar] = {"sent_bytes": job.transport.traffic.sent_bytes()}
        job.events.write(Event("step", self._began_s, job.transport.rank, job.step, now_s - self._began_s, data))
        self._began_s = now_s
        job.step += 1


class OptimizerSteps:
    """Both hooks on one optimizer."""

    def __init__(self, job: Job, hooks: TrainingHooks | None) -> None:
        self._handles = [
            job.optimizer.register_step_pre_hook(BeforeStep(job, hooks)),
            job.optimizer.register_step_post_hook(AfterStep(job, hooks)),
        ]

    def detach(self) -> None:
        """Take both hooks off."""
        for handle in self._handles:
            handle.remove()


def check_optimizer(optimizer: Optimizer, known: set[int]) -> None:
    """Raise if the optimizer trains something that is not synchronized: its replicas would drift apart."""
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in known:
                raise AttachError(
                    f"optimizer group {index} trains a parameter of shape {tuple(parameter.shape)} that was not a "
                    "trainable parameter of the model when it was attached, so nothing would synchronize it. Attach a "
                    "module that holds all of them, e.g. torch.nn.ModuleList([a, b]), after adding or unfreezing them."
                )


def is_attached(optimizer: Optimizer) -> bool:
    """Whether a session has its hooks on this optimizer."""
    hooks: dict[int, Any] = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    return any(isinstance(hook, BeforeStep) for hook in hooks.values())
