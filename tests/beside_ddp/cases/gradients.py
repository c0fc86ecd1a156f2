"""Loops and hooks that touch `.grad`, and models changed while they train."""

from __future__ import annotations

import torch
from torch import nn

from tests.beside_ddp.cases.contract import UNUSED, Turn, case, right
from tests.beside_ddp.cases.models import deep, mlp


def backward(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    turn.call(turn.data(4, 5)).square().mean().backward()


@case(model=mlp)
def clipping_by_norm(turn: Turn) -> None:
    backward(turn)
    nn.utils.clip_grad_norm_(turn.model.parameters(), 0.01)
    turn.optimizer.step()


@case(model=mlp)
def clipping_by_value(turn: Turn) -> None:
    backward(turn)
    nn.utils.clip_grad_value_(turn.model.parameters(), 0.01)
    turn.optimizer.step()


@case(model=mlp)
def gradients_changed_in_place(turn: Turn) -> None:
    backward(turn)
    for parameter in turn.model.parameters():
        parameter.grad.mul_(0.5).add_(0.001)
    turn.optimizer.step()


@case(model=mlp, steps=6)
def grad_data_assigned_in_one_step(turn: Turn) -> None:
    backward(turn)
    if turn.step == 2:
        for parameter in turn.model.parameters():
            parameter.grad.data = parameter.grad.data * 0.5  # old-style clipping
    turn.optimizer.step()


@case(model=mlp, steps=6)
def grad_data_assigned_and_gradients_zeroed(turn: Turn) -> None:
    turn.call(turn.data(4, 5)).square().mean().backward()
    for parameter in turn.model.parameters():
        parameter.grad.data = parameter.grad.data * 0.5
    turn.optimizer.step()
    turn.optimizer.zero_grad(set_to_none=False)


@case(model=mlp)
def gradients_replaced_by_other_tensors(turn: Turn) -> None:
    backward(turn)
    for parameter in turn.model.parameters():
        parameter.grad = parameter.grad.clone() * 2
    turn.optimizer.step()


@case(model=mlp)
def gradients_replaced_and_then_accumulated(turn: Turn) -> None:
    turn.call(turn.data(4, 5)).square().mean().backward()
    for parameter in turn.model.parameters():
        parameter.grad = parameter.grad.clone()
    turn.optimizer.step()


@case(model=lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)))
def a_transposed_gradient_then_accumulated(turn: Turn) -> None:
    backward(turn)
    weight = turn.model[0].weight
    weight.grad = weight.grad.t()
    turn.call(turn.data(4, 5)).square().mean().backward()
    weight.grad = weight.grad.contiguous()  # only its values are compared
    turn.optimizer.step()


@case(model=mlp)
def gradients_preset_before_the_first_pass(turn: Turn) -> None:
    if turn.step == 0:
        for parameter in turn.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
    turn.call(turn.data(4, 5)).square().mean().backward()
    turn.optimizer.step()


@case(model=mlp)
def gradients_in_one_flat_tensor_of_the_users(turn: Turn) -> None:
    parameters = list(turn.model.parameters())
    if turn.step == 0:
        turn.memory["flat"] = torch.zeros(sum(p.numel() for p in parameters))
        parts = turn.memory["flat"].split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
    turn.call(turn.data(4, 5)).square().mean().backward()
    turn.optimizer.step()
    turn.optimizer.zero_grad(set_to_none=False)


@case(model=mlp)
def some_gradients_dropped_before_the_step(turn: Turn) -> None:
    backward(turn)
    turn.model[0].bias.grad = None
    turn.optimizer.step()


@case(model=mlp)
def noise_added_after_the_exchange(turn: Turn) -> None:
    backward(turn)
    generator = torch.Generator().manual_seed(turn.step)
    for parameter in turn.model.parameters():
        parameter.grad += torch.randn(parameter.shape, generator=generator)
    turn.optimizer.step()


def hook_tensors(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)


@case(model=mlp, before=hook_tensors)
def tensor_hooks_before(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(model=mlp, after=lambda turn: hook_tensors(turn.model))
def tensor_hooks_after(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


def scale(parameter: torch.Tensor, factor: float) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(factor)


def mask(model: nn.Module) -> None:
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: scale(parameter, 0))
    model[2].weight.register_post_accumulate_grad_hook(lambda parameter: scale(parameter, 3))


@case(model=mlp, before=mask)
def post_accumulate_hooks_before(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(model=mlp, after=lambda turn: mask(turn.model))
def post_accumulate_hooks_after(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(model=deep, bucket_cap_mb=1e-6, after=lambda turn: mask(turn.model))
def post_accumulate_hooks_after_many_buckets(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(model=mlp, steps=5)
def a_post_accumulate_hook_for_one_step(turn: Turn) -> None:
    handles = []
    if turn.step == 2:
        handles = [p.register_post_accumulate_grad_hook(lambda p: scale(p, 0.1)) for p in turn.model.parameters()]
    turn.learn(turn.call(turn.data(4, 5)).square().mean())
    for handle in handles:
        handle.remove()


def hook_modules(model: nn.Module) -> None:
    model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    model[1].register_forward_hook(lambda module, inputs, output: output + 1)
    model[2].register_full_backward_hook(lambda module, inputs, outputs: tuple(g * 0.5 for g in inputs))


@case(model=mlp, before=hook_modules)
def module_hooks_before(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(model=mlp, after=lambda turn: hook_modules(turn.model))
def module_hooks_after(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


def two_convolutions() -> nn.Module:
    """Without BatchNorm, whose statistics averaging by hand does not synchronize."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 3))


OLD_FORMAT = right("DDP keeps buckets laid out for the old memory format, and its means are wrong from then on")


@case(model=two_convolutions, expected=OLD_FORMAT, steps=5)
def memory_format_changed_while_training(turn: Turn) -> None:
    if turn.step == 2:
        turn.model.to(memory_format=torch.channels_last)
    turn.learn(turn.call(turn.data(3, 2, 8, 8)).square().mean())


@case(model=two_convolutions, expected=OLD_FORMAT, steps=5)
def memory_format_changed_between_backward_and_step(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    turn.call(turn.data(3, 2, 8, 8)).square().mean().backward()
    if turn.step == 2:
        turn.model.to(memory_format=torch.channels_last)
    turn.optimizer.step()


@case(model=mlp, steps=5)
def converted_to_float64_and_back(turn: Turn) -> None:
    backward(turn)
    if turn.step == 2 and turn.world.kind == "laconic":  # with DDP, replicas diverge after this; nothing is lost
        turn.model.double()
        turn.model.float()
    turn.optimizer.step()


@case(model=mlp, steps=6)
def a_layer_frozen_for_some_steps(turn: Turn) -> None:
    # DDP is told nothing either; with zero_grad(set_to_none=False) the frozen gradient is zero.
    backward(turn)
    if turn.step in (2, 3):
        turn.model[0].weight.grad.zero_()
    turn.optimizer.step()


@case(model=mlp, find_unused_parameters=True, expected=UNUSED, steps=6)
def requires_grad_switched_off_and_on(turn: Turn) -> None:
    turn.model[0].requires_grad_(turn.step not in (2, 3))
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(model=mlp)
def parameters_written_between_steps(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())
    with torch.no_grad():
        for parameter in turn.model.parameters():
            parameter.clamp_(-0.3, 0.3)


@case(model=mlp)
def parameters_replaced_by_data(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())
    for parameter in turn.model.parameters():
        parameter.data = parameter.data * 0.9


@case(model=mlp)
def a_moving_average_beside_the_model(turn: Turn) -> None:
    average = turn.memory.setdefault("average", torch.optim.swa_utils.AveragedModel(turn.model))
    turn.learn(turn.call(turn.data(4, 5)).square().mean())
    average.update_parameters(turn.model)
    if turn.step == 3:
        turn.model.load_state_dict(average.module.state_dict())
