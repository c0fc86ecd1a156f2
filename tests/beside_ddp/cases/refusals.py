"""What laconic refuses, by name."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from tests.beside_ddp.cases.contract import Turn, World, case, refused, whole_run
from tests.beside_ddp.cases.models import mlp
from tests.beside_ddp.cases.unused import Branches

ONE = (2,)
"""A refusal does not depend on the number of ranks, and takes a second or two until all have heard of it."""


@case(model=mlp, expected=refused("create_graph"), ranks=ONE)
def create_graph(turn: Turn) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        turn.call(turn.data(4, 5)).square().mean().backward(create_graph=True)


@case(model=lambda: nn.Embedding(10, 3, sparse=True), expected=refused("sparse"), ranks=ONE)
def sparse_embeddings(turn: Turn) -> None:
    raise AssertionError("attached")


@case(model=mlp, expected=refused("LBFGS"), ranks=ONE, optimizer=lambda model: torch.optim.LBFGS(model.parameters()))
def lbfgs(turn: Turn) -> None:
    raise AssertionError("attached")


@case(model=mlp, expected=refused("not a trainable parameter|was not a"), ranks=ONE)
def a_parameter_added_to_the_optimizer(turn: Turn) -> None:
    turn.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


def frozen_first() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


@case(model=frozen_first, expected=refused("trainable|unfreez|Unfreez|never exchanged"), ranks=ONE)
def a_parameter_unfrozen_after_attaching(turn: Turn) -> None:
    turn.model[0].requires_grad_(True)
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(
    model=nn.ReLU,
    expected=refused("no trainable parameter"),
    ranks=ONE,
    optimizer=lambda _: torch.optim.SGD([torch.zeros(1)]),
)
def a_model_without_parameters(turn: Turn) -> None:
    raise AssertionError("attached")


@case(model=lambda: nn.Sequential(nn.LazyLinear(3)), expected=refused("lazy"), ranks=ONE)
def a_lazy_module(turn: Turn) -> None:
    raise AssertionError("attached")


@case(model=mlp, expected=refused("float64"), ranks=ONE)
def a_dtype_changed_while_attached(turn: Turn) -> None:
    turn.model.double()
    turn.learn(turn.call(turn.data(4, 5).double()).square().mean())


@case(model=mlp, expected=refused("accumulat"), ranks=ONE)
def a_step_on_gradients_that_were_only_accumulated(turn: Turn) -> None:
    with turn.no_sync():
        turn.call(turn.data(4, 5)).square().mean().backward()
    turn.optimizer.step()


@case(
    model=mlp,
    expected=refused("_apply_optimizer_in_backward"),
    ranks=ONE,
    before=lambda model: _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1}),
)
def optimizers_in_the_backward_pass(turn: Turn) -> None:
    turn.call(turn.data(4, 5)).square().mean().backward()


@whole_run(expected=refused("already attached"), ranks=ONE)
def attached_twice(world: World) -> None:
    model = mlp()
    for _ in range(2):
        world.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))


@whole_run(expected=refused("already attached"), ranks=ONE)
def a_part_of_an_attached_model(world: World) -> None:
    model = mlp()
    world.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    world.wrap(model[0], torch.optim.SGD(model[0].parameters(), lr=0.1))


@whole_run(expected=refused("differ|disagree|same"), ranks=ONE)
def ranks_with_different_models(world: World) -> None:
    model = nn.Linear(5, 3 if world.rank == 0 else 4)
    world.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))


@whole_run(expected=refused("find_unused_parameters=False promises|rank 0"), ranks=ONE)
def a_broken_promise_that_all_parameters_are_used(world: World) -> None:
    import laconic

    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = laconic.attach(
        model, optimizer, "bsp / all_reduce / none / fusion", find_unused_parameters=False, timeout_s=10
    )
    world.stack.enter_context(session)
    model(torch.randn(4, 5), [0]).backward()
    optimizer.step()


@whole_run(expected=refused("rank 1"), ranks=(2, 3))
def an_exception_on_one_rank_is_named_by_the_others(world: World) -> None:
    model = mlp()
    wrapped = world.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        if world.rank == 1 and step == 1:
            from laconic.errors import LaconicError

            raise LaconicError("rank 1 broke")
        wrapped.call(torch.randn(4, 5)).square().mean().backward()
        wrapped.optimizer.step()


@whole_run(expected=refused("rank 1|leaves early"), ranks=(2, 3))
def uneven_numbers_of_steps(world: World) -> None:
    from laconic.errors import LaconicError

    model = mlp()
    wrapped = world.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2 if world.rank == 1 else 4):
        wrapped.call(torch.randn(4, 5)).square().mean().backward()
        wrapped.optimizer.step()
    world.stack.close()  # detaches, as a loop that has ended does
    raise LaconicError("rank 1 leaves early, without an error of its own")
