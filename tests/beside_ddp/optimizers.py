"""Optimizers for the matrix: torch's own, and hand-written ones whose step is not separable by parameter.

A step is separable if updating some parameters first and the others later gives the same as updating all at once. A
norm over all parameters, an estimate over all parameters, a counter on the optimizer or a step of two passes make it
inseparable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Make = Callable[[nn.Module], torch.optim.Optimizer]
Closure = Callable[[], torch.Tensor]


class GlobalNormClippingSgd(torch.optim.Optimizer):
    """SGD that clips by the norm over all gradients inside its step.

    p <- p - lr * min(1, max_norm / |g|) * g
    """

    def __init__(self, parameters: Any, lr: float = 0.1, max_norm: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "max_norm": max_norm})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        """See Optimizer."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm() if gradients else torch.ones(())
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * torch.clamp(group["max_norm"] / norm, max=1.0)))


class GlobalNormLamb(torch.optim.Optimizer):
    """LAMB whose gradients are first divided by the norm over all of them (You et al. 2020, arXiv:1904.00962)."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        """See Optimizer."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm() if gradients else torch.ones(())
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"first": torch.zeros_like(p), "second": torch.zeros_like(p)}
                gradient = p.grad / norm.clamp(min=1e-6)
                state["first"].lerp_(gradient, 1 - group["betas"][0])
                state["second"].mul_(group["betas"][1]).addcmul_(gradient, gradient, value=1 - group["betas"][1])
                update = state["first"] / (state["second"].sqrt() + 1e-6) + 0.01 * p
                p.sub_(update * (group["lr"] * p.norm() / update.norm().clamp(min=1e-6)))


class ProdigyLike(torch.optim.Optimizer):
    """SGD that estimates its own step size from all parameters, as Prodigy does (arXiv:2306.06101).

    r <- r + lr d <g, x0 - x>,   s <- s + lr d |g|,   d <- max(d, r / s),   x <- x - lr d g
    """

    def __init__(self, parameters: Any, lr: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr})
        self.d = 1e-4
        self.numerator = 0.0
        self.denominator = 0.0

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        """See Optimizer."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    start = self.state[p].setdefault("start", p.clone())
                    self.numerator += group["lr"] * self.d * float((p.grad * (start - p)).sum())
                    self.denominator += group["lr"] * self.d * float(p.grad.abs().sum())
        if self.denominator > 0:
            self.d = max(self.d, self.numerator / self.denominator)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * self.d))


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization: a second pass at the worst point nearby (arXiv:2010.01412)."""

    def __init__(self, parameters: Any, lr: float = 0.1, radius: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "radius": radius})

    @torch.no_grad()
    def step(self, closure: Closure) -> torch.Tensor:
        """See Optimizer; the closure zeroes gradients and runs a backward pass."""
        with torch.enable_grad():
            loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        radius = self.param_groups[0]["radius"]
        away = [p.grad * (radius / (norm + 1e-12)) for p in parameters]
        torch._foreach_add_(parameters, away)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(parameters, away)
        for p in parameters:
            p.sub_(p.grad * self.param_groups[0]["lr"])
        return loss


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD, with its counter on the optimizer (arXiv:2405.15682)."""

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta})
        self.k = 0

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        """See Optimizer."""
        self.k += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, 1 / self.k)
                    p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / self.k) - 1))
                    z.sub_(p.grad, alpha=group["lr"])


class CountingSgd(torch.optim.SGD):
    """SGD whose step size falls with a counter of its own steps."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self.steps_taken = 0

    def step(self, closure: Closure | None = None) -> None:
        """See Optimizer."""
        self.steps_taken += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps_taken
        super().step(closure)


class LargestGradientOnly(torch.optim.Optimizer):
    """Updates only the parameter whose gradient is largest: which one depends on all of them."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        """See Optimizer."""
        with_gradient = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if with_gradient:
            p = max(with_gradient, key=lambda each: float(each.grad.norm()))
            p.sub_(p.grad * self.param_groups[0]["lr"])


class NoisySgd(torch.optim.Optimizer):
    """SGD with noise from a generator of its own: the order of parameters decides who gets which number."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        """See Optimizer."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_((p.grad + 0.01 * torch.randn(p.shape, generator=self.generator)) * group["lr"])


def network() -> nn.Module:
    """Several layers of different sizes, so that schedules cut and merge."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4), nn.LayerNorm(4))


def matrices() -> nn.Module:
    """Matrices only, which is what Muon takes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20, bias=False), nn.Tanh(), nn.Linear(20, 10, bias=False))


def sparse() -> nn.Module:
    """An embedding with sparse gradients, which is what SparseAdam takes."""
    return nn.Sequential(nn.Embedding(6, 4, sparse=True))


def half_frozen() -> nn.Module:
    """The first layer does not train."""
    model = network()
    model[0].requires_grad_(False)
    return model


@dataclass(frozen=True)
class Row:
    """One optimizer of the matrix."""

    make: Make
    model: Callable[[], nn.Module] = network
    separable: bool = True
    """Whether updates may be made layer by layer."""
    refused: str = ""
    """A pattern of the message, if laconic does not take it."""
    closure: bool = False
    """Whether its step runs the backward passes itself, so that nothing is left to be made later."""
    prepare: Callable[[torch.optim.Optimizer], Callable[[], object] | None] | None = None
    """Called once; what it returns is called after every step."""


def _of(kind: Any, **settings: Any) -> Make:
    return lambda model: kind(model.parameters(), **settings)


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [
            {"params": list(model[0].parameters()), "lr": 0.5},  # frozen: listed, but without gradients
            {"params": [p for p in model[2:].parameters() if p.dim() > 1], "weight_decay": 0.1, "lr": 0.05},
            {"params": [p for p in model[2:].parameters() if p.dim() == 1], "momentum": 0.9},
        ],
        lr=0.1,
    )


def _scheduler(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=20).step


def _count_steps(optimizer: Any) -> None:
    optimizer.hook_calls = 0

    def count(*_: object) -> None:
        optimizer.hook_calls += 1

    optimizer.register_step_post_hook(count)


def _hook_clips(optimizer: torch.optim.Optimizer) -> None:
    def clip(*_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 0.05)

    optimizer.register_step_pre_hook(clip)


_ = torch.optim
ROWS: dict[str, Row] = {
    "SGD": Row(_of(_.SGD, lr=0.1)),
    "SGD momentum": Row(_of(_.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)),
    "SGD nesterov foreach": Row(_of(_.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True)),
    "SGD momentum fused": Row(_of(_.SGD, lr=0.1, momentum=0.9, fused=True)),
    "Adam": Row(_of(_.Adam, lr=0.01)),
    "AdamW foreach": Row(_of(_.AdamW, lr=0.01, foreach=True)),
    "AdamW fused": Row(_of(_.AdamW, lr=0.01, fused=True)),
    "AdamW amsgrad": Row(_of(_.AdamW, lr=0.01, amsgrad=True, maximize=True)),
    "Adagrad": Row(_of(_.Adagrad, lr=0.05)),
    "RMSprop centered": Row(_of(_.RMSprop, lr=0.01, centered=True, momentum=0.5)),
    "Adadelta": Row(_of(_.Adadelta, lr=1.0)),
    "Adamax": Row(_of(_.Adamax, lr=0.01)),
    "NAdam": Row(_of(_.NAdam, lr=0.01)),
    "RAdam": Row(_of(_.RAdam, lr=0.01)),
    "ASGD": Row(_of(_.ASGD, lr=0.05, t0=3)),
    "Rprop": Row(_of(_.Rprop, lr=0.01)),
    "Adafactor": Row(_of(_.Adafactor, lr=0.01)),
    "Muon": Row(_of(_.Muon, lr=0.01), matrices),
    "three groups, one frozen": Row(_groups, half_frozen),
    "SGD with OneCycleLR": Row(_of(_.SGD, lr=0.1, momentum=0.9), prepare=_scheduler),
    "Adam with a counting hook": Row(_of(_.Adam, lr=0.01), prepare=_count_steps),
    "SGD with a hook that clips": Row(_of(_.SGD, lr=0.1), prepare=_hook_clips),
    "SparseAdam": Row(_of(_.SparseAdam), sparse, refused="sparse"),
    "LBFGS": Row(_of(_.LBFGS), refused="LBFGS"),
    "clipping by a global norm": Row(_of(GlobalNormClippingSgd), separable=False),
    "LAMB with a global norm": Row(_of(GlobalNormLamb), separable=False),
    "Prodigy-like": Row(_of(ProdigyLike), separable=False),
    "SAM": Row(_of(Sam), separable=False, closure=True),
    "schedule-free": Row(_of(ScheduleFree), separable=False),
    "a counter on itself": Row(_of(CountingSgd), separable=False),
    "the largest gradient only": Row(_of(LargestGradientOnly), separable=False),
    "noise of its own": Row(_of(NoisySgd), separable=False),
}
