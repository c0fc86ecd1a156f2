"""Whether an optimizer's step for all parameters is the same as steps for a few parameters at a time.

Element-wise optimizers (SGD, Adam and most others) are separable. One that computes anything over all of its parameters
(a global norm, Prodigy's distance, a counter on `self`) is not: split up, its step differs. This is tested on
small stand-ins for the parameters: a few steps at once and the same steps in parts must leave parameters, state, group
settings and every other attribute of the optimizer equal, bit for bit.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.errors import one_line

_TRIED = ((1e-3, 0), (1.0, 0), (1e4, 0), (1e4, 0), (1.0, 1), (1.0, 2))
"""Size and direction of the gradients of each trial step. Coupling such as clipping acts on large gradients
only, and an estimate of the step size (Prodigy) moves only where steps keep their direction."""
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SIDES = (4, 3, 2)
_PER_SHAPE = 2

Settings = list[dict[str, Any]]


def raw_step(optimizer: Optimizer) -> None:
    """The optimizer's step without any hooks: those belong to the training loop's own call."""
    step = type(optimizer).step
    # torch wraps the step of every class in hooks and a profiler range, and marks it as wrapped.
    unhooked: Callable[[Optimizer], object] = getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step
    unhooked(optimizer)


def group_settings(optimizer: Optimizer) -> Settings:
    """Everything in the optimizer's groups but their parameters, as it is now.

    Tensors are copied: a scheduler changes a learning rate that is a tensor in place.
    """
    return [{key: _kept(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):  # betas
        return type(value)(map(_kept, value))
    return value


def step_in_part(optimizer: Optimizer, settings: Settings, params: Sequence[Sequence[nn.Parameter]]) -> None:
    """One step for these parameters of each group with these settings; afterwards the groups are as they were."""
    groups = optimizer.param_groups
    whole = [dict(group) for group in groups]
    # A subclass that calls its parent's step() would run all hooks there.
    hooks = {name: value for name, value in vars(optimizer).items() if name in _STEP_HOOKS}
    try:
        vars(optimizer).update({name: OrderedDict() for name in hooks})
        for group, values, chosen in zip(groups, settings, params, strict=True):
            group.update(values)
            group["params"] = list(chosen)
        raw_step(optimizer)
    finally:
        vars(optimizer).update(hooks)
        for group, before in zip(groups, whole, strict=True):
            group.update(before)


def why_not_separable(optimizer: Optimizer) -> str | None:
    """None if the optimizer is separable; otherwise the problem found when trying it."""
    devices = sorted({p.device.index or 0 for group in optimizer.param_groups for p in group["params"] if p.is_cuda})
    problem = ""
    # Some optimizers create their state in __init__; for others, state of other shapes does not fit the copies.
    for with_state in (False, True):
        try:
            with torch.random.fork_rng(devices=devices), torch.enable_grad():
                return _first_difference(optimizer, with_state=with_state)
        except Exception as exc:  # noqa: BLE001 - whatever a third-party optimizer raises
            problem = problem or f"a step on copies raised {type(exc).__name__}: {one_line(exc, 100)}"
    return problem


def _first_difference(optimizer: Optimizer, *, with_state: bool) -> str | None:
    at_once, in_parts = [with_stand_ins(optimizer, with_state=with_state) for _ in range(2)]
    for magnitude, direction in _TRIED:
        for one in (at_once, in_parts):
            set_gradients(one, magnitude, seed=direction)
        raw_step(at_once)
        _step_one_by_one(in_parts)
        difference = _difference(at_once, in_parts)
        if difference is not None:
            return f"{difference} differs when its step is made in parts"
    return None


def _step_one_by_one(optimizer: Optimizer) -> None:
    """Step as deferred updates do: once without any gradient, then once per parameter."""
    settings = group_settings(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in params]
    for p in params:
        p.grad = None
    raw_step(optimizer)
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient
    for p in params:
        step_in_part(optimizer, settings, [[q for q in g["params"] if q is p] for g in optimizer.param_groups])


def with_stand_ins(optimizer: Optimizer, *, with_state: bool) -> Optimizer:
    """A copy of the optimizer with a few small parameters of the same kinds in each group.

    with_state: the small parameters get a slice of the original parameters' state instead of none.
    """
    state: dict[Any, Any] = defaultdict(dict)
    memo: dict[int, Any] = {id(optimizer.state): state}
    for group in optimizer.param_groups:
        kinds = {(p.dim(), p.dtype, p.device): p for p in group["params"]}
        stand_ins: list[nn.Parameter] = []
        for p in kinds.values():
            for number in range(_PER_SHAPE):
                stand_ins.append(_stand_in(p, number))
                if with_state:
                    state[stand_ins[-1]] = {k: _part(v, p, stand_ins[-1]) for k, v in optimizer.state[p].items()}
        for p in group["params"]:
            memo[id(p)] = stand_ins[0]
        memo[id(group["params"])] = stand_ins
    twin = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        # Hooks, and a step wrapped by a scheduler, belong to the training loop.
        if name.endswith("_hooks"):
            vars(twin)[name] = OrderedDict()
        elif name != "step":
            vars(twin)[name] = copy.deepcopy(value, memo)
    return twin


def _stand_in(p: nn.Parameter, number: int) -> nn.Parameter:
    shape = [_SIDES[min(axis, len(_SIDES) - 1)] for axis in range(p.dim())]
    generator = torch.Generator().manual_seed(number)
    values = torch.randn(shape, generator=generator, dtype=torch.complex64 if p.is_complex() else torch.float32)
    return nn.Parameter(values.to(p.device, p.dtype))


def _part(value: Any, of: nn.Parameter, stand_in: nn.Parameter) -> Any:
    """The small copy's counterpart of a value in the state of a parameter."""
    if isinstance(value, torch.Tensor) and value.shape == of.shape and value.dim():
        return value.detach().flatten().repeat(stand_in.numel())[: stand_in.numel()].view(stand_in.shape).clone()
    return copy.deepcopy(value)


def set_gradients(optimizer: Optimizer, magnitude: float, *, seed: int) -> None:
    """Give all stand-ins random gradients of this size."""
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            kind = torch.complex64 if p.is_complex() else torch.float32
            p.grad = (magnitude * torch.randn(p.shape, generator=generator, dtype=kind)).to(p.device, p.dtype)


def _difference(one: Optimizer, other: Optimizer) -> str | None:
    """What differs between two copies, in words."""
    pairs = [
        (p, q)
        for group, twin in zip(one.param_groups, other.param_groups, strict=True)
        for p, q in zip(group["params"], twin["params"], strict=True)
    ]
    if not all(_equal(p.detach(), q.detach()) for p, q in pairs):
        return "a parameter"
    if not all(_equal(dict(one.state.get(p, {})), dict(other.state.get(q, {}))) for p, q in pairs):
        return "the state of a parameter"
    if not _equal(group_settings(one), group_settings(other)):
        return "a setting of a group"
    rest = set(vars(one)) | set(vars(other))
    for name in sorted(rest - {"state", "param_groups"}):
        if not name.endswith("_hooks") and not _equal(vars(one).get(name), vars(other).get(name)):
            return f'the attribute "{name}"'
    return None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # As bytes: NaN equals NaN here.
        same_kind = one.shape == other.shape and one.dtype == other.dtype
        return same_kind and torch.equal(_as_bytes(one), _as_bytes(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        # Parameters used as keys are different objects in two copies, but in the same order.
        keys = [(a, b) for a, b in zip(one, other, strict=False) if not isinstance(a, torch.Tensor)]
        same_keys = len(one) == len(other) and all(a == b for a, b in keys)
        return same_keys and all(map(_equal, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if hasattr(one, "__dict__") and not callable(one):
        return all(_equal(value, vars(other).get(name)) for name, value in vars(one).items())
    return callable(one) or bool(one == other)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
