"""Makes the user's own Adam step along a given momentum, with a second moment that does not change.

Adam and its variants keep m and v in their state and compute

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2,   a step along (m / c1) / (sqrt(v / c2) + eps),   c = 1 - b^t

Given m / b1 and v / b2 and a gradient of zero, the same code steps along m itself: weight decay, learning rates, fused
kernels and everything else stay the optimizer's own. v is scaled with c2, so that v / c2 does not change by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.errors import AttachError, CommunicationError, one_line
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.hooks.separability import raw_step, set_gradients, with_stand_ins
from laconic.runtime.job import Job

FIRST, SECOND = "exp_avg", "exp_avg_sq"
"""The names that torch's Adam, and others after it, give to m and v in their state."""
_CLOSE = 1e-4


class GivenMomentum:
    """Writes the mean momentum into the optimizers of a job, once the strategy averages momenta."""

    def __init__(self, job: Job, hooks: TrainingHooks) -> None:
        self._job = job
        self._hooks = hooks
        self._rule = job.strategy.synchronization
        self._given = False
        """Whether the current step adds a gradient to the momentum without an exchange."""
        self._steps: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}
        """Steps of each parameter, where the optimizer counts them on a GPU and reading them would synchronize: the
        optimizer's own count, which loading a state replaces, and its value."""
        if len({float(group["betas"][0]) for group in job.param_groups if "betas" in group}) > 1:
            raise AttachError(
                f"synchronization.{self._rule.name} changes the optimizer's momentum, and its parameter groups "
                "have different betas[0]. Give all groups the same."
            )
        if self._rule.interval > 1:
            hooks.remember(self._rule.anchor, job.parameters)
        for optimizer in job.optimizers:
            reason = why_not_given(optimizer)
            if reason is not None:
                raise AttachError(
                    f"synchronization.{self._rule.name} sets the optimizer's momentum, which works with "
                    f'torch.optim.AdamW, but not with this {type(optimizer).__name__}: {reason}. Use AdamW, or "bsp".'
                )

    def before(self, optimizer: Optimizer, *, closure: bool) -> None:
        """Called before an optimizer's step."""
        if self._job.step < self._rule.warmup:
            return
        if self._rule.returns(self._job.step):
            self._return(optimizer)
        if closure:
            raise CommunicationError(
                f"step {self._job.step} was called with a closure, in which gradients are computed: "
                f"{self._rule.name} must see them before. Call backward() first, and optimizer.step() without "
                "a closure."
            )
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None and bool(overflow):
            return  # the optimizer skips the step itself
        scale = getattr(optimizer, "grad_scale", None)
        rule, now = self._rule, self._job.step
        alone, holds_momentum = not rule.due(now + 1), not rule.begins(now) and not rule.returns(now)
        with torch.no_grad():
            for group in optimizer.param_groups:
                found = {p: self._step_along_momentum(optimizer, p) for p in group["params"] if p.grad is not None}
                for p in [p for p, step in found.items() if not step]:
                    # Without a second moment so far, it makes an ordinary step.
                    if alone:
                        p.grad = None  # in a joint step, because its second moment must be the mean of all
                    elif holds_momentum:
                        p.grad /= 1.0 - float(group["betas"][0])  # the gradient that the momentum consists of
                known = {p: step for p, step in found.items() if step}
                if known:
                    weight = self._rule.refresh(self._job.step, float(group["betas"][1]))
                    self._given |= bool(weight)
                    give(optimizer, group, list(known), list(known.values()), weight=weight, scale=scale)

    def _step_along_momentum(self, optimizer: Optimizer, parameter: nn.Parameter) -> int:
        """The number of the step that the optimizer is about to make along this parameter's momentum.

        0: the parameter has no second moment yet.
        """
        if SECOND not in optimizer.state.get(parameter, {}):
            return 0
        step = self._count(optimizer, parameter)
        if self._job.step == self._rule.warmup or step == 2:  # from now on, v is no longer that of ordinary steps
            variance = optimizer.state[parameter][SECOND]
            if variance.numel() and not bool(variance.any()):
                # All gradients so far were zero. The parameter starts anew with the first other one: without a second
                # moment, it would make arbitrarily large steps.
                del optimizer.state[parameter]
                self._steps.pop(parameter, None)
                return 0
            _raise_to_floor(variance, self._rule.variance_floor)
        return step

    def _count(self, optimizer: Optimizer, parameter: nn.Parameter) -> int:
        """The number of the step that the optimizer is about to make with this parameter."""
        made = optimizer.state[parameter]["step"]
        if not isinstance(made, torch.Tensor) or made.device.type == "cpu":
            return int(made) + 1
        counted, value = self._steps.get(parameter, (None, 0))
        value = value + 1 if counted is made else int(made) + 1
        self._steps[parameter] = made, value
        return value

    def after_step(self) -> None:
        """Called when all optimizers have made their step, before it is counted."""
        if self._given or self._job.step + 1 == self._rule.warmup:
            self._given = False
            unit = self._job.loss_scale.unit
            self._hooks.remember(
                self._rule.momentum_field, {name: momentum * unit for name, momentum in self._momenta().items()}
            )
        if self._rule.interval > 1:
            with torch.no_grad():
                self._keep_what_is_agreed()

    def _momenta(self) -> dict[str, torch.Tensor]:
        states = {p: state for optimizer in self._job.optimizers for p, state in optimizer.state.items()}
        return {
            name: states[parameter][FIRST]
            for name, parameter in self._job.parameters.items()
            if FIRST in states.get(parameter, {})
        }

    def _return(self, optimizer: Optimizer) -> None:
        """Restore the parameters that replicas last agreed on, before the step that replaces all steps since."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        with torch.no_grad():
            for name, agreed in self._hooks.recall(self._rule.anchor).items():
                if id(self._job.parameters[name]) in own:
                    self._job.parameters[name].copy_(agreed)

    def _keep_what_is_agreed(self) -> None:
        """Record the parameters that replicas agree on, where replicas make local steps."""
        step, rule, parameters = self._job.step, self._rule, self._job.parameters
        if step + 1 == rule.warmup or rule.returns(step):
            self._hooks.remember(rule.anchor, parameters)
            if rule.returns(step):
                # The optimizer was given a sum of momenta.
                unit, agreed = self._job.loss_scale.unit, self._hooks.recall(rule.momentum_field)
                for name, momentum in self._momenta().items():
                    momentum.copy_(agreed[name] / unit)
        elif step >= rule.warmup:
            decays = {
                id(p): 1.0 - float(group["lr"]) * float(group.get("weight_decay", 0.0))
                for group in self._job.param_groups
                for p in group["params"]
                if p.grad is not None  # the optimizer leaves others as they are
            }
            for name, anchor in self._hooks.recall(rule.anchor).items():
                anchor *= decays.get(id(parameters[name]), 1.0)


def give(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameters: Sequence[nn.Parameter],
    steps: Sequence[int],
    *,
    weight: float = 0.0,
    scale: torch.Tensor | None = None,
) -> None:
    """Make step number `steps` of each parameter along the momentum in .grad, which becomes zero.

    weight: if not 0, .grad is a gradient that is added to the momentum, and its square enters v with this weight.
    scale: a GradScaler's factor on it, where the optimizer would unscale it itself.
    """
    beta1, beta2 = (float(beta) for beta in group["betas"])
    gradients = [p.grad for p in parameters if p.grad is not None]
    momenta = [optimizer.state[p][FIRST] for p in parameters]
    variances = [optimizer.state[p][SECOND] for p in parameters]
    if scale is not None:
        torch._foreach_div_(gradients, scale.to(gradients[0].device))
    if weight:
        corrections = [1.0 - beta2 ** (step - 1) for step in steps]
        for gradient, momentum, variance, correction in zip(gradients, momenta, variances, corrections, strict=True):
            momentum.add_(gradient, alpha=(1.0 - beta1) / beta1)
            variance.mul_(1.0 - weight).addcmul_(gradient, gradient, value=weight * correction)
    else:
        torch._foreach_copy_(momenta, gradients)
        torch._foreach_mul_(momenta, 1.0 / beta1)
    torch._foreach_mul_(variances, [_grown(step, beta2) / beta2 for step in steps])
    torch._foreach_zero_(gradients)


def _grown(step: int, beta: float) -> float:
    """The growth of the bias correction 1 - beta^t since the previous step."""
    return (1.0 - beta**step) / (1.0 - beta ** (step - 1))


def _raise_to_floor(variance: torch.Tensor, floor: float) -> None:
    """Raise tiny second moments: an element with hardly any gradient so far would make arbitrarily large steps."""
    variance.clamp_(min=floor * variance.mean())


def why_not_given(optimizer: Optimizer) -> str | None:
    """None if the optimizer's momentum can be set; otherwise the problem found when trying it on small copies."""
    devices = sorted({p.device.index or 0 for group in optimizer.param_groups for p in group["params"] if p.is_cuda})
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            return _problem(optimizer)
    except Exception as exc:  # noqa: BLE001 - whatever a third-party optimizer raises, it cannot be used so
        return f"a step on copies raised {type(exc).__name__}: {one_line(exc, 100)}"


def _problem(optimizer: Optimizer) -> str | None:
    moved: list[list[torch.Tensor]] = []
    for size in (0.0, 1.0, 2.0):
        copy = with_stand_ins(optimizer, with_state=False)
        for group in copy.param_groups:
            group["lr"] = torch.full_like(group["lr"], 1e-2) if isinstance(group["lr"], torch.Tensor) else 1e-2
            if not all(0.0 < float(beta) < 1.0 for beta in group.get("betas", (0.0,))):
                return "it has no betas, or one that is 0"
        for seed in range(3):
            set_gradients(copy, 1.0, seed=seed)
            raw_step(copy)
        parameters = [p for group in copy.param_groups for p in group["params"]]
        if any(name not in copy.state[p] for p in parameters for name in (FIRST, SECOND, "step")):
            return f'its state has no "{FIRST}", "{SECOND}" and "step"'
        set_gradients(copy, size, seed=4)
        given = [p.grad.clone() for p in parameters if p.grad is not None]
        before = [p.detach().clone() for p in parameters]
        due = [copy.state[p][SECOND] * _grown(4, float(g["betas"][1])) for g in copy.param_groups for p in g["params"]]
        with torch.no_grad():
            for group in copy.param_groups:
                give(copy, group, group["params"], [4] * len(group["params"]))
        raw_step(copy)
        for p, momentum, variance in zip(parameters, given, due, strict=True):
            if not torch.allclose(copy.state[p][FIRST], momentum, rtol=_CLOSE, atol=_CLOSE):
                return "its momentum changes where there is no gradient, e.g. by weight_decay as Adam has it"
            if not torch.allclose(copy.state[p][SECOND], variance, rtol=_CLOSE, atol=0.0):
                return f"its second moment, in {variance.dtype}, changes where there is no gradient"
        moved.append([p.detach() - old for p, old in zip(parameters, before, strict=True)])
    for still, once, twice in zip(*moved, strict=True):
        one, two = once - still, twice - still
        if not bool(one.any()) or not torch.allclose(two, 2 * one, rtol=0.05, atol=0.02 * float(one.abs().max())):
            return "its step is not in proportion to its momentum"
    if _negates(optimizer):
        return "its momentum is that of negative gradients, as with maximize=True. Minimize the negative loss instead"
    return None


def _negates(optimizer: Optimizer) -> bool:
    """Whether it adds gradients to its momentum with the opposite sign."""
    copy = with_stand_ins(optimizer, with_state=False)
    set_gradients(copy, 1.0, seed=0)
    given = {p: p.grad.clone() for group in copy.param_groups for p in group["params"] if p.grad is not None}
    raw_step(copy)
    return any(bool((copy.state[p][FIRST] * gradient.conj()).sum().real < 0) for p, gradient in given.items())
