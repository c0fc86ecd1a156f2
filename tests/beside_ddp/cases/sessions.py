"""Several models, several sessions, groups of some ranks, attaching again and again."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

from tests.beside_ddp.cases.contract import EQUAL, Turn, World, case, sgd, whole_run
from tests.beside_ddp.cases.models import mlp


def data(world: World, step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + world.rank))


@whole_run()
def a_gan(world: World) -> None:
    torch.manual_seed(world.rank)
    makes, judges = mlp(), nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    maker, judge = world.wrap(makes, sgd(makes)), world.wrap(judges, sgd(judges))
    for step in range(4):
        fake = maker.call(data(world, step, 4, 5))
        judge.optimizer.zero_grad()
        (judge.call(data(world, step, 4, 3)).mean() - judge.call(fake.detach()).mean()).backward()
        judge.optimizer.step()
        maker.optimizer.zero_grad()
        for parameter in judges.parameters():
            parameter.requires_grad_(False)
        (-judge.model(fake).mean()).backward()
        for parameter in judges.parameters():
            parameter.requires_grad_(True)
        maker.optimizer.step()
        world.look(makes, maker.optimizer)
        world.look(judges, judge.optimizer)


@whole_run()
def two_models_of_one_loss(world: World) -> None:
    torch.manual_seed(world.rank)
    first, second = nn.Linear(5, 4), nn.Linear(4, 2)
    one, two = world.wrap(first, sgd(first)), world.wrap(second, sgd(second))
    for step in range(4):
        two.call(torch.tanh(one.call(data(world, step, 4, 5)))).square().mean().backward()
        for each in (one, two) if (world.rank + step) % 2 else (two, one):
            each.optimizer.step()
            each.optimizer.zero_grad(set_to_none=False)
        world.look(first, one.optimizer)
        world.look(second, two.optimizer)


@whole_run(ranks=(4,))
def two_halves_that_train_apart(world: World) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(world.rank)
    model = mlp()
    wrapped = world.wrap(model, sgd(model), process_group=groups[world.rank // 2])
    for step in range(4):
        wrapped.optimizer.zero_grad()
        wrapped.call(data(world, step, 4, 5)).square().mean().backward()
        wrapped.optimizer.step()
        world.look(model, wrapped.optimizer)


@whole_run(ranks=(3, 4))
def some_ranks_only(world: World) -> None:
    group = dist.new_group([0, 2])
    if world.rank in (0, 2):
        torch.manual_seed(world.rank)
        model = mlp()
        wrapped = world.wrap(model, sgd(model), process_group=group)
        for step in range(3):
            wrapped.optimizer.zero_grad()
            wrapped.call(data(world, step, 4, 5)).square().mean().backward()
            wrapped.optimizer.step()
            world.look(model, wrapped.optimizer)


@whole_run(ranks=(2,))
def attached_and_detached_many_times(world: World) -> None:
    torch.manual_seed(world.rank)
    model = mlp()
    optimizer = sgd(model)
    for step in range(5):
        with world.stack.pop_all():
            pass  # leaves what was attached before
        wrapped = world.wrap(model, optimizer)
        optimizer.zero_grad()
        wrapped.call(data(world, step, 4, 5)).square().mean().backward()
        optimizer.step()
        world.look(model, optimizer)


@case(model=mlp, steps=2, ranks=(2, 3), expected=EQUAL)
def a_copy_wrapped_while_the_original_is(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())
    copied = copy.deepcopy(turn.model)
    copied.zero_grad()
    wrapped = turn.world.wrap(copied, sgd(copied))
    wrapped.call(turn.data(4, 5)).square().mean().backward()
    wrapped.optimizer.step()
    turn.world.look(copied, wrapped.optimizer)
