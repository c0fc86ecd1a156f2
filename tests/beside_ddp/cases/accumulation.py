"""Gradients added up over several passes, with and without exchange."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from tests.beside_ddp.cases.contract import Turn, case, right
from tests.beside_ddp.cases.models import convolutions, deep, mlp


def loss(turn: Turn) -> torch.Tensor:
    return turn.call(turn.data(4, 5)).square().mean()


@case(model=mlp)
def accumulation(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    for part in range(3):
        with turn.no_sync() if part < 2 else nullcontext():
            (loss(turn) / 3).backward()
    turn.optimizer.step()


@case(model=deep, bucket_cap_mb=0.0005)
def accumulation_many_buckets_gradients_zeroed(turn: Turn) -> None:
    with turn.no_sync():
        loss(turn).backward()
    loss(turn).backward()
    turn.optimizer.step()
    turn.optimizer.zero_grad(set_to_none=False)


@case(model=mlp, steps=6)
def accumulation_every_other_step(turn: Turn) -> None:
    if turn.step % 2 == 0:
        turn.optimizer.zero_grad()
        with turn.no_sync():
            loss(turn).backward()
    else:
        loss(turn).backward()
        turn.optimizer.step()


@case(model=convolutions)
def accumulation_with_batch_norm(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    with turn.no_sync():
        turn.call(turn.data(3, 2, 8, 8)).square().mean().backward()
    turn.call(turn.data(3, 2, 8, 8)).square().mean().backward()
    turn.optimizer.step()


@case(model=mlp)
def accumulation_nested_no_sync(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    with turn.no_sync():
        with turn.no_sync():
            loss(turn).backward()
        loss(turn).backward()
    loss(turn).backward()
    turn.optimizer.step()


@case(model=mlp)
def two_exchanged_passes_for_one_step(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    loss(turn).backward()
    loss(turn).backward()
    turn.optimizer.step()


@case(model=mlp)
def gradients_never_zeroed(turn: Turn) -> None:
    loss(turn).backward()
    turn.optimizer.step()


@case(model=deep, bucket_cap_mb=0.0005, steps=5)
def gradients_never_zeroed_many_buckets(turn: Turn) -> None:
    loss(turn).backward()
    turn.optimizer.step()


@case(model=mlp)
def several_forward_passes_before_one_backward(turn: Turn) -> None:
    turn.learn(sum((loss(turn) for _ in range(3)), torch.zeros(())))


@case(model=mlp)
def forward_passes_without_gradient_in_between(turn: Turn) -> None:
    first = loss(turn)
    with torch.no_grad():
        loss(turn)
    turn.learn(first + loss(turn))


TWICE = right("DDP exchanges only the first pass through a graph, and replicas diverge")


@case(model=mlp, expected=TWICE)
def a_graph_gone_through_twice(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    value = loss(turn)
    with turn.no_sync():
        value.backward(retain_graph=True)
    value.backward()
    turn.optimizer.step()


@case(model=mlp, expected=TWICE)
def a_graph_gone_through_twice_exchanged_twice(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    value = loss(turn)
    value.backward(retain_graph=True)
    value.backward()
    turn.optimizer.step()


@case(model=mlp)
def gradient_of_the_input_kept(turn: Turn) -> None:
    inputs = turn.data(4, 5).requires_grad_()
    turn.learn(turn.call(inputs).square().mean())
    assert inputs.grad is not None


@case(model=mlp)
def accumulation_of_different_numbers_of_parts_per_rank(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    with turn.no_sync():
        for _ in range(turn.rank + turn.step):
            loss(turn).backward()
    loss(turn).backward()
    turn.optimizer.step()
