"""Where one step ends and the next begins: hooks on the optimizers.

A step of the job is complete when every optimizer has made exactly one step. Where gradients are not exchanged, a step
that a GradScaler skips because of an overflow counts as well: other ranks do not know of the overflow, and rounds are
due by the number of steps. The step by which torch.distributed.checkpoint gives an optimizer its state does not count.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from laconic.core.event import Event, Scalar
from laconic.errors import AttachError, CommunicationError
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.hooks.given_momentum import GivenMomentum
from laconic.runtime.job import Job

_AMP = "_step_supports_amp_scaling"
"""The attribute by which a GradScaler knows that an optimizer's step() handles `grad_scale` and `found_inf` itself."""


class OptimizerSteps:
    """The hooks on all optimizers of a job."""

    def __init__(self, job: Job, hooks: TrainingHooks | None) -> None:
        self._job = job
        self._hooks = hooks
        steers = hooks is not None and job.strategy.synchronization.quantity == "momentum"
        self.given = GivenMomentum(job, hooks) if hooks is not None and steers else None
        self._known = {id(parameter) for parameter in job.parameters.values()}
        self._stepped: list[Optimizer] = []
        self._began_s = job.clock.now()
        self._skipping: _SkippedStep | None = None
        self._only_makes_state = False
        self._calls: dict[int, _Call] = {}
        self._handles: list[Any] = []
        self._told: list[Optimizer] = []
        for optimizer in job.optimizers:
            self._handles += [
                # Where FSDP's own traffic is compressed, steps are only counted: another session may be attached as
                # well.
                optimizer.register_step_pre_hook(BeforeStep(self, alone=not job.strategy.architecture.holds_shards)),
                optimizer.register_step_post_hook(lambda optimizer, *_: self.after(optimizer)),
            ]
        self._tell_scalers()

    def _tell_scalers(self) -> None:
        """Make a GradScaler leave overflows to `before` where gradients are not exchanged."""
        if not self._job.strategy.exchanges_gradients():
            for optimizer in self._job.optimizers:
                if not getattr(optimizer, _AMP, False):
                    setattr(optimizer, _AMP, True)
                    self._told.append(optimizer)

    def _untell_scalers(self) -> None:
        while self._told:
            delattr(self._told.pop(), _AMP)

    def before(self, optimizer: Optimizer, caller: FrameType, *, closure: bool) -> None:
        """Raise if the step would apply gradients that have not been exchanged."""
        job, hooks = self._job, self._hooks
        call = self._calls.get(id(optimizer))
        if call is not None and call.is_around(caller):
            call.depth += 1
            return
        self._calls[id(optimizer)] = _Call(caller)
        self._only_makes_state = _only_makes_state(optimizer, caller)
        if self._only_makes_state:
            return
        job.engine.check()
        check_parameters(optimizer, self._known)
        if optimizer in self._stepped:
            others = [type(other).__name__ for other in job.optimizers if other not in self._stepped]
            raise CommunicationError(
                f"{type(optimizer).__name__} is called twice in step {job.step}, and {', '.join(others)} not yet. "
                "A session with several optimizers counts a step when each has made its own; call each once a step."
            )
        job.loss_scale.notice()
        if hooks is not None:
            if not self._stepped:
                hooks.before_step(closure=closure)
            if not closure:
                hooks.before_optimizer(optimizer)
        if self.given is not None:
            self.given.before(optimizer, closure=closure)
        if optimizer in self._told:
            self._unscale_or_skip(optimizer)

    def _unscale_or_skip(self, optimizer: Optimizer) -> None:
        """Unscale gradients, or skip the step on overflow: with `_AMP`, a GradScaler leaves both to step()."""
        scale, overflows = getattr(optimizer, "grad_scale", None), skips_step(optimizer)
        for name in ("grad_scale", "found_inf"):
            if getattr(optimizer, name, None) is not None:
                setattr(optimizer, name, None)  # handled here: torch's own optimizers refuse them unless fused
        if overflows:
            self._skipping = _SkippedStep(optimizer)
        elif scale is not None:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            with torch.no_grad():
                for gradient in gradients:
                    gradient.div_(scale.to(gradient.device))

    def after(self, optimizer: Optimizer) -> None:
        """Count the step once all optimizers have made theirs, and record how long it took."""
        job = self._job
        call = self._calls.get(id(optimizer))
        if call is not None and call.depth:
            call.depth -= 1
            return
        self._calls.pop(id(optimizer), None)
        if self._only_makes_state:
            return
        if self._skipping is not None:
            self._skipping.undo()
            self._skipping = None
        self._stepped.append(optimizer)
        if len(self._stepped) < len(job.optimizers):
            return
        self._stepped = []
        if self.given is not None:
            self.given.after_step()
        if self._hooks is not None:
            self._hooks.after_step()
        now_s = job.clock.now()
        data: dict[str, Scalar] = {"sent_bytes": job.transport.traffic.sent_bytes()}
        job.events.write(Event("step", self._began_s, job.transport.rank, job.step, now_s - self._began_s, data))
        self._began_s = now_s
        job.step += 1
        job.compare_steps()
        if job.recovery is not None:
            job.recovery.step_made()
        for action in job.after_step:
            action(job)

    def follow(self, hooks: TrainingHooks | None) -> None:
        """Another strategy has taken over that also leaves the optimizer's step unchanged."""
        self._hooks = hooks
        self._untell_scalers()
        self._tell_scalers()

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._untell_scalers()


class BeforeStep:
    """The hook before optimizer.step(); a class, so that an attached optimizer can be recognised.

    alone: no other session may be attached to the optimizer.
    """

    def __init__(self, steps: OptimizerSteps, *, alone: bool) -> None:
        self._steps = steps
        self.alone = alone

    def __call__(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Raise if the step must not be made."""
        # torch hands its hooks the optimizer as the first argument.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._steps.before(optimizer, sys._getframe(1), closure=closure is not None)


class _Call:
    """One call of an optimizer's step(); a subclass that calls its parent's step() makes torch run all hooks again."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self.depth = 0

    def is_around(self, frame: FrameType) -> bool:
        """Whether this call has not returned or raised yet, as seen from a frame inside it."""
        outer = frame.f_back
        while outer is not None and outer is not self._frame:
            outer = outer.f_back
        return outer is not None


class _SkippedStep:
    """Makes one step() of an optimizer do nothing: gradients are hidden, and its settings are restored afterwards."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._plain = {k: v for k, v in vars(optimizer).items() if isinstance(v, bool | int | float)}
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._gradients = [(p, p.grad) for p in params]
        for p in params:
            p.grad = None

    def undo(self) -> None:
        """Restore everything from before the step."""
        for p, gradient in self._gradients:
            p.grad = gradient
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(before)
        vars(self._optimizer).update(self._plain)


def _only_makes_state(optimizer: Optimizer, caller: FrameType) -> bool:
    """Whether get_state_dict() or set_state_dict() of torch.distributed.checkpoint has called this step().

    For an optimizer without state, they make a step with gradients and learning rates of zero, which changes nothing.
    """
    # PyTorch has no public sign of it, and a training step may have such values too.
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(module, "_init_optim_state", None), "__code__", None)
    if code is None or optimizer.state:
        return False
    frame: FrameType | None = caller
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def skips_step(optimizer: Optimizer) -> bool:
    """Whether the coming step() must change nothing, because a GradScaler has found an overflow."""
    overflow = getattr(optimizer, "found_inf", None)
    return overflow is not None and bool(overflow)


def check_parameters(optimizer: Optimizer, known: set[int]) -> None:
    """Raise if the optimizer trains a parameter that is not synchronized: replicas would drift apart."""
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in known:
                raise AttachError(
                    f"optimizer group {index} trains a parameter of shape {tuple(parameter.shape)} that was not a "
                    "trainable parameter of the model when it was attached, so nothing would synchronize it. Attach a "
                    "module that holds all of them, e.g. torch.nn.ModuleList([a, b]), after adding or unfreezing them."
                )


def unwrapped(optimizer: object) -> Optimizer:
    """The torch optimizer inside wrappers such as accelerate's, which are instances of Optimizer but run no hooks."""
    inner, seen = optimizer, 0
    while not hasattr(inner, "_optimizer_step_pre_hooks") and hasattr(inner, "optimizer") and seen < 8:
        inner, seen = inner.optimizer, seen + 1
    if not isinstance(inner, Optimizer):
        raise AttachError(f"optimizer must be a torch.optim.Optimizer or several, got {type(optimizer).__name__}.")
    if not hasattr(inner, "_optimizer_step_pre_hooks"):
        raise AttachError(
            f"{type(inner).__name__} is a torch.optim.Optimizer without its hooks (it does not call "
            "Optimizer.__init__), so laconic would not see its steps. Pass the optimizer it wraps."
        )
    return inner


def is_attached(optimizer: Optimizer) -> bool:
    """Whether a session has its hooks on this optimizer."""
    hooks: dict[int, Any] = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    return any(isinstance(hook, BeforeStep) and hook.alone for hook in hooks.values())


def others_watch(optimizer: Optimizer) -> bool:
    """Whether another hook runs between laconic's hook before this optimizer's step and the end of the step.

    Such a hook expects gradients before the step and updated parameters after it.
    """
    before = list(optimizer._optimizer_step_pre_hooks.values())
    ours = next(number for number, hook in enumerate(before) if isinstance(hook, BeforeStep))
    after = len(optimizer._optimizer_step_post_hooks) + len(_global_optimizer_post_hooks)
    return ours < len(before) - 1 or after > 1
