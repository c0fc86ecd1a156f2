"""Sums of several steps' momenta exchanged in place of gradients: against a loop written out by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import laconic
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.errors import AttachError, InvalidSetting
from laconic.strategy import Strategy
from tests.runtime.replicas import assert_equal, data, mlp, snapshot

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")]
STEPS, WARMUP, PERIOD = 24, 6, 4
LR, BETAS, EPS, DECAY = 0.01, (0.8, 0.9), 1e-8, 0.1
FLOOR = 0.05
RULE = (
    f"zero_one_adam(warmup_share={WARMUP / STEPS}, total_steps={STEPS}, first=none, floor={FLOOR}, "
    f"refresh_share=0.2, period={PERIOD})"
)
REFRESHES = (8, 10, 12, 16, 18, 22)
"""From 6 steps on a fifth more each time, rounded up: 7.2, 9.6, 12, 14.4, 18, 21.6; step 15 ends with a round."""

Tensors = dict[str, torch.Tensor]


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(data(step, rank, 4, 5)).square().mean()


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def _train(strategy: str, *, world_size: int = 3) -> list[list[Tensors]]:
    """The parameters of every replica after every step."""
    start = mlp()

    def one_rank(transport: InProcessTransport) -> list[Tensors]:
        model, seen = copy.deepcopy(start), []
        optimizer = _adamw(model)
        with laconic.attach(model, optimizer, strategy, transport=transport):
            for step in range(STEPS):
                _loss(model, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(snapshot(model))
        return seen

    return InProcessCluster(world_size).run(one_rank)


def _by_hand(compress: Callable[[torch.Tensor], torch.Tensor] | None, world_size: int = 3) -> list[list[Tensors]]:
    """One model per worker, parameter by parameter, with residuals on the workers."""
    models = [mlp() for _ in range(world_size)]
    each = [dict(model.named_parameters()) for model in models]
    names = list(each[0])

    def zeros() -> Tensors:
        return {name: torch.zeros_like(p) for name, p in each[0].items()}

    m, u, left = ([zeros() for _ in models] for _ in range(3))
    v, old = zeros(), {name: p.detach().clone() for name, p in each[0].items()}
    seen: list[list[Tensors]] = [[] for _ in models]
    last = WARMUP
    for step in range(STEPS):
        gradients: list[Tensors] = []
        for rank, model in enumerate(models):
            model.zero_grad()
            _loss(model, step, rank).backward()
            gradients.append({name: p.grad.clone() for name, p in each[rank].items() if p.grad is not None})
        c1, c2 = (1 - beta ** (step + 1) for beta in BETAS)
        for name in names:
            middle = torch.stack([gradient[name] for gradient in gradients]).mean(0)
            if step < WARMUP:
                v[name] = BETAS[1] * v[name] + (1 - BETAS[1]) * middle**2
            if step == WARMUP:
                v[name] = v[name].clamp(min=FLOOR * float(v[name].mean())) / (1 - BETAS[1] ** WARMUP)
            if step in REFRESHES:
                weight = (1 - BETAS[1]) / (1 - BETAS[1] ** (WARMUP + REFRESHES.index(step) + 1))
                v[name] = (1 - weight) * v[name] + weight * middle**2
            divisor = (v[name] / c2 if step < WARMUP else v[name]).sqrt() + EPS
            together = step < WARMUP or step in REFRESHES
            for rank, gradient in enumerate(gradients):
                new = middle if together else gradient[name]
                m[rank][name] = BETAS[0] * m[rank][name] + (1 - BETAS[0]) * new
                if step >= WARMUP:
                    u[rank][name] = u[rank][name] + m[rank][name]
            old[name] = old[name] * (1 - LR * DECAY)
            if step >= WARMUP and (step + 1) % PERIOD == 0:
                sent = []
                for rank in range(world_size):
                    due = u[rank][name] + left[rank][name]
                    sent.append(due if compress is None else compress(due))
                    left[rank][name] = due - sent[-1]
                total = torch.stack(sent).mean(0)
                old[name] = old[name] - LR * (total / c1) / divisor
                for rank in range(world_size):
                    each[rank][name].data.copy_(old[name])
                    m[rank][name], u[rank][name] = total / (step + 1 - last), torch.zeros_like(total)
            else:
                for rank in range(world_size):
                    each[rank][name].data.mul_(1 - LR * DECAY).sub_(LR * (m[rank][name] / c1) / divisor)
                if step < WARMUP:
                    old[name] = each[0][name].detach().clone()
        if step >= WARMUP and (step + 1) % PERIOD == 0:
            last = step + 1
        for rank, model in enumerate(models):
            seen[rank].append(snapshot(model))
    return seen


def _signs(x: torch.Tensor) -> torch.Tensor:
    positive = x >= 0
    up = x[positive].mean() if positive.any() else x.new_zeros(())
    down = x[~positive].mean() if (~positive).any() else x.new_zeros(())
    return torch.where(positive, up, down)


@pytest.mark.parametrize(
    ("compression", "compress"), [("none", None), ("onebit(route=gather) + error_feedback", _signs)]
)
@pytest.mark.parametrize("schedule", ["fusion", "fusion(bytes=64)"])
def test_as_written_out_by_hand(
    compression: str, compress: Callable[[torch.Tensor], torch.Tensor] | None, schedule: str
) -> None:
    found, expected = _train(f"{RULE} / all_reduce / {compression} / {schedule}"), _by_hand(compress)
    for step in range(STEPS):
        for rank in range(3):
            for name, value in expected[rank][step].items():
                close = torch.allclose(found[rank][step][name], value, rtol=1e-3, atol=1e-4)
                assert close, f"step {step}, rank {rank}, {name}"
        if step < WARMUP or (step + 1) % PERIOD == 0:
            for rank in range(3):
                assert_equal(found[rank][step], found[0][step])
    assert any(not torch.equal(found[0][STEPS - 2][name], found[1][STEPS - 2][name]) for name in found[0][0])


@pytest.mark.parametrize("saved_after", [3, 9, 12])
def test_a_checkpoint_continues_bit_for_bit(saved_after: int) -> None:
    """In the warm-up, between rounds, and after one."""
    start, strategy = mlp(), f"{RULE} / all_reduce / onebit + error_feedback"

    def one_rank(transport: InProcessTransport) -> tuple[Tensors, Tensors]:
        def steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: range) -> None:
            for step in which:
                _loss(model, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()

        model = copy.deepcopy(start)
        optimizer = _adamw(model)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            steps(model, optimizer, range(saved_after))
            saved = copy.deepcopy((session.state_dict(), model.state_dict(), optimizer.state_dict()))
            steps(model, optimizer, range(saved_after, STEPS))
        again = copy.deepcopy(start)
        second = _adamw(again)
        with laconic.attach(again, second, strategy, transport=transport) as session:
            again.load_state_dict(saved[1])
            second.load_state_dict(saved[2])
            session.load_state_dict(saved[0])
            steps(again, second, range(saved_after, STEPS))
        return snapshot(model), snapshot(again)

    for uninterrupted, continued in InProcessCluster(2).run(one_rank):
        assert_equal(uninterrupted, continued)


def test_bytes_are_those_of_rounds_and_nothing_travels_between() -> None:
    strategy = Strategy.parse(f"{RULE} / all_reduce / onebit + error_feedback")
    start = mlp()

    def one_rank(transport: InProcessTransport) -> list[int]:
        model, sent = copy.deepcopy(start), []
        optimizer = _adamw(model)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(STEPS):
                before, payload = transport.traffic.sent_bytes(), transport.traffic.sent_bytes("payload")
                _loss(model, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                sent.append(transport.traffic.sent_bytes() - before)
                payload = transport.traffic.sent_bytes("payload") - payload
                predicted = strategy.plan_bytes(session.plan, laconic.Moment(step, transport.rank, 3))
                assert payload == (predicted if strategy.synchronization.due(step + 1) else 0), step
        return sent

    for sent in InProcessCluster(3).run(one_rank):
        alone = [step for step in range(STEPS) if not sent[step]]
        assert alone == [6, 9, 13, 14, 17, 20, 21]


def test_what_is_refused() -> None:
    with pytest.raises(InvalidSetting, match='use "onebit_adam"'):
        Strategy.parse("zero_one_adam(period=1)")
    model = mlp()
    transport = InProcessCluster(1).transport(0)
    with pytest.raises(AttachError, match="total_steps"):
        laconic.attach(model, _adamw(model), "zero-one-adam", transport=transport)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AttachError, match="momentum of Adam"):
        laconic.attach(model, sgd, "zero-one-adam", transport=transport, total_steps=100)


def test_a_parameter_that_was_never_used_does_not_decay() -> None:
    start = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def one_rank(transport: InProcessTransport) -> Tensors:
        model = copy.deepcopy(start)
        optimizer = _adamw(model)
        with laconic.attach(model, optimizer, f"{RULE} / all_reduce / none", transport=transport):
            for step in range(WARMUP + 2 * PERIOD):
                model[0](data(step, transport.rank, 4, 5)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return snapshot(model)

    for found in InProcessCluster(2).run(one_rank):
        assert torch.equal(found["1.weight"], start[1].weight)
