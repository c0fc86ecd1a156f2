"""Training loops that are awkward: other optimizers' ways, closures, penalties, exceptions, collectives, slow ranks."""

from __future__ import annotations

import copy
import io
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.beside_ddp.cases.contract import EQUAL, Turn, case, refused, right
from tests.beside_ddp.cases.models import convolutions, deep, mlp


def loss(turn: Turn) -> torch.Tensor:
    return turn.call(turn.data(4, 5)).square().mean()


@case(model=mlp)
def a_closure(turn: Turn) -> None:
    def closure() -> torch.Tensor:
        turn.optimizer.zero_grad()
        value = loss(turn)
        value.backward()
        return value

    turn.optimizer.step(closure)


@case(model=mlp)
def a_gradient_penalty(turn: Turn) -> None:
    inputs = turn.data(4, 5).requires_grad_()
    outputs = turn.call(inputs)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    turn.learn(outputs.square().mean() + (slope.norm(dim=1) - 1).square().mean())


@case(model=mlp)
def an_inner_step_on_detached_copies(turn: Turn) -> None:
    inner = copy.deepcopy(turn.model)
    inner(turn.data(4, 5)).square().mean().backward()
    turn.learn((turn.call(turn.data(4, 5)) - inner(turn.data(4, 5)).detach()).square().mean())


@case(model=lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)))
def adversarial_inputs(turn: Turn) -> None:
    inputs = turn.data(4, 5).requires_grad_()
    with turn.no_sync():
        (slope,) = torch.autograd.grad(turn.call(inputs).square().mean(), inputs)
    turn.learn(turn.call(inputs.detach() + 0.1 * slope.sign()).square().mean())


@case(
    model=mlp,
    optimizer=lambda model: torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters(), "weight_decay": 0.1}], lr=0.1
    ),
)
def parameter_groups_and_a_scheduler(turn: Turn) -> None:
    scheduler = turn.memory.setdefault(
        "scheduler", torch.optim.lr_scheduler.OneCycleLR(turn.optimizer, max_lr=[0.3, 0.1], total_steps=10)
    )
    turn.learn(loss(turn))
    scheduler.step()


@case(model=mlp, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True, amsgrad=True))
def adamw_foreach_amsgrad(turn: Turn) -> None:
    turn.learn(loss(turn))


@case(model=mlp, optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True))
def adam_fused(turn: Turn) -> None:
    turn.learn(loss(turn))


@case(model=mlp, optimizer=lambda model: torch.optim.SGD(model[2].parameters(), lr=0.1))
def an_optimizer_of_some_parameters_only(turn: Turn) -> None:
    turn.model.zero_grad()
    loss(turn).backward()
    turn.optimizer.step()


@case(model=mlp)
def two_optimizer_steps_for_one_pass(turn: Turn) -> None:
    turn.learn(loss(turn))
    turn.optimizer.step()


@case(model=mlp, steps=5)
def a_step_skipped_on_all_ranks(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    loss(turn).backward()
    if turn.step % 2:
        turn.optimizer.step()


@case(model=mlp)
def evaluation_between_steps(turn: Turn) -> None:
    turn.learn(loss(turn))
    turn.model.eval()
    with torch.inference_mode():
        turn.model(turn.data(4, 5))
    turn.model.train()


@case(model=mlp)
def evaluation_on_one_rank_only(turn: Turn) -> None:
    turn.learn(loss(turn))
    if turn.rank == 0:
        turn.model.eval()
        with torch.no_grad():
            turn.model(turn.data(64, 5))
        turn.model.train()


@case(model=convolutions, steps=3)
def saved_copied_and_loaded_while_training(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(3, 2, 8, 8)).square().mean())
    file = io.BytesIO()
    torch.save([turn.model.state_dict(), turn.optimizer.state_dict()], file)
    file.seek(0)
    saved = torch.load(file)
    copied = copy.deepcopy(turn.model)
    for _ in range(1 + turn.rank):  # a copy trains alone
        copied(turn.data(3, 2, 8, 8)).sum().backward()
    turn.model.load_state_dict(saved[0])
    turn.optimizer.load_state_dict(saved[1])


@case(model=mlp, steps=3)
def a_slow_rank(turn: Turn) -> None:
    if turn.rank == 1:
        time.sleep(0.05)
    turn.learn(loss(turn))


class GathersInside(nn.Module):
    """A collective inside the graph, as contrastive losses have it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        from torch.distributed.nn.functional import all_gather

        return torch.cat(all_gather(self.linear(inputs)))


@case(model=GathersInside)
def a_collective_inside_the_graph(turn: Turn) -> None:
    features = turn.call(turn.data(2, 5))
    turn.learn((features @ features.t()).logsumexp(1).mean())


@case(model=deep, bucket_cap_mb=0.0005)
def the_users_collectives_between_and_within(turn: Turn) -> None:
    value = loss(turn)
    pending = dist.all_reduce(torch.ones(1000), async_op=True)
    turn.learn(value)
    shown = value.detach().clone()
    dist.all_reduce(shown)
    assert pending is not None
    pending.wait()


class Raises(torch.autograd.Function):
    """Raises where the gradient should pass, if told to."""

    @staticmethod
    def forward(ctx, inputs, out_of_memory):
        ctx.out_of_memory = out_of_memory
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.out_of_memory:
            raise RuntimeError("out of memory")
        return gradient, None


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, inputs: torch.Tensor, head: int, out_of_memory: bool) -> torch.Tensor:
        return self.heads[head](Raises.apply(self.body(inputs), out_of_memory))


@case(
    model=Interrupted,
    expected=right("DDP raises an error in the next forward pass, because the batch was not finished"),
)
def a_batch_skipped_after_an_exception(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    value = turn.call(turn.data(4, 5), turn.step % 2, turn.step == 2).square().mean()
    if turn.step == 2:
        with pytest.raises(RuntimeError, match="out of memory"):
            value.backward()
        turn.optimizer.zero_grad()
    else:
        value.backward()
        turn.optimizer.step()


@case(model=mlp, expected=refused("was never exchanged|set by hand|no backward pass"))
def gradients_only_set_by_hand(turn: Turn) -> None:
    for parameter in turn.model.parameters():
        parameter.grad = torch.ones_like(parameter) * turn.rank
    turn.optimizer.step()


@case(model=mlp, expected=EQUAL, steps=3)
def a_forward_pass_that_is_thrown_away(turn: Turn) -> None:
    loss(turn)
    turn.learn(loss(turn))


@case(model=mlp, steps=3)
def anomaly_detection(turn: Turn) -> None:
    with torch.autograd.detect_anomaly(check_nan=False):
        turn.learn(loss(turn))


@case(model=mlp, steps=3)
def backward_in_another_thread(turn: Turn) -> None:
    import threading

    turn.optimizer.zero_grad()
    value = loss(turn)
    thread = threading.Thread(target=value.backward)
    thread.start()
    thread.join()
    turn.optimizer.step()


@case(model=mlp)
def torch_autograd_backward_of_two_losses(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    torch.autograd.backward([loss(turn), loss(turn)])
    turn.optimizer.step()


@case(model=mlp)
def a_loss_built_outside_of_the_model(turn: Turn) -> None:
    decay = sum(parameter.square().sum() for parameter in turn.model.parameters())
    turn.learn(loss(turn) + 0.01 * decay)
