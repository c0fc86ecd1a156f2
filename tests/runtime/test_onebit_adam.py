"""Momentum exchanged in place of gradients: against loops written out by hand, and what is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import laconic
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.errors import AttachError, CommunicationError, IllegalCombination
from laconic.runtime.hooks.given_momentum import GivenMomentum, why_not_given
from tests.runtime.replicas import assert_equal, data, mlp, snapshot

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")]
STEPS, WARMUP = 24, 6
LR, BETAS, EPS, DECAY = 0.01, (0.8, 0.9), 1e-8, 0.1
FLOOR = 0.05
RULE = f"onebit_adam(warmup_share={WARMUP / STEPS}, total_steps={STEPS}, first=none, floor={FLOOR}, refresh_share=0)"
REFRESHED = RULE.replace("refresh_share=0", "refresh_share=0.2")
REFRESHES = (8, 10, 12, 15, 18, 22)
"""From 6 steps on a fifth more each time, rounded up: 7.2, 9.6, 12, 14.4, 18, 21.6."""

Compress = Callable[[torch.Tensor], torch.Tensor]


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(data(step, rank, 4, 5)).square().mean()


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def _train(
    strategy: str,
    *,
    world_size: int = 3,
    steps: int = STEPS,
    make: Callable[[nn.Module], torch.optim.Optimizer] = _adamw,
) -> list[dict[str, torch.Tensor]]:
    start = mlp()

    def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(start)
        optimizer = make(model)
        with laconic.attach(model, optimizer, strategy, transport=transport):
            for step in range(steps):
                _loss(model, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
        return snapshot(model)

    return InProcessCluster(world_size).run(one_rank)


def _by_hand(
    compress: Compress | None, refreshes: tuple[int, ...] = (), *, world_size: int = 3
) -> dict[str, torch.Tensor]:
    """Parameter by parameter, as the paper writes it, with residuals on the workers."""
    model = mlp()
    parameters = dict(model.named_parameters())
    zeros = {name: torch.zeros_like(p) for name, p in parameters.items()}
    m, v = copy.deepcopy(zeros), copy.deepcopy(zeros)
    frozen: dict[str, torch.Tensor] = {}
    residuals = [copy.deepcopy(zeros) for _ in range(world_size)]
    for step in range(STEPS):
        gradients: list[dict[str, torch.Tensor]] = []
        for rank in range(world_size):
            model.zero_grad()
            _loss(model, step, rank).backward()
            gradients.append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        c1, c2 = (1 - beta ** (step + 1) for beta in BETAS)
        for name, p in parameters.items():
            mean = torch.stack([g[name] for g in gradients]).mean(0)
            if step < WARMUP:
                m[name] = BETAS[0] * m[name] + (1 - BETAS[0]) * mean
                v[name] = BETAS[1] * v[name] + (1 - BETAS[1]) * mean**2
                denominator = (v[name] / c2).sqrt() + EPS
            else:
                if step == WARMUP:
                    before = 1 - BETAS[1] ** WARMUP
                    frozen[name] = v[name].clamp(min=FLOOR * float(v[name].mean())) / before
                if step in refreshes:
                    weight = (1 - BETAS[1]) / (1 - BETAS[1] ** (WARMUP + refreshes.index(step) + 1))
                    frozen[name] = (1 - weight) * frozen[name] + weight * mean**2
                    m[name] = BETAS[0] * m[name] + (1 - BETAS[0]) * mean
                else:
                    sent: list[torch.Tensor] = []
                    for rank, residual in enumerate(residuals):
                        own = BETAS[0] * m[name] + (1 - BETAS[0]) * gradients[rank][name]
                        due = own + residual[name]
                        sent.append(due if compress is None else compress(due))
                        residual[name] = due - sent[-1]
                    m[name] = torch.stack(sent).mean(0)
                denominator = frozen[name].sqrt() + EPS
            p.data.mul_(1 - LR * DECAY).sub_(LR * (m[name] / c1) / denominator)
    return snapshot(model)


def _largest_fifth(x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1)
    chosen = flat.abs().topk(math.ceil(0.2 * flat.numel())).indices
    kept = torch.zeros_like(flat)
    kept[chosen] = flat[chosen]
    return kept.view_as(x)


def _signs(x: torch.Tensor) -> torch.Tensor:
    positive = x >= 0
    up = x[positive].mean() if positive.any() else x.new_zeros(())
    down = x[~positive].mean() if (~positive).any() else x.new_zeros(())
    return torch.where(positive, up, down)


@pytest.mark.parametrize(
    ("compression", "compress"),
    [
        ("none", None),
        ("topk(density=0.2, route=gather) + error_feedback", _largest_fifth),
        ("onebit(route=gather) + error_feedback", _signs),
    ],
)
@pytest.mark.parametrize(("rule", "refreshes"), [(RULE, ()), (REFRESHED, REFRESHES)], ids=["frozen", "refreshed"])
def test_as_written_out_by_hand(
    rule: str, refreshes: tuple[int, ...], compression: str, compress: Compress | None
) -> None:
    replicas = _train(f"{rule} / all_reduce / {compression}")
    expected = _by_hand(compress, refreshes)
    for replica in replicas:
        assert_equal(replica, replicas[0])
        for name, value in expected.items():
            assert torch.allclose(replica[name], value, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("schedule", ["fusion", "sequential", "wfbp", "mg_wfbp", "fusion(bytes=64)"])
def test_schedules_change_nothing(schedule: str) -> None:
    expected = _by_hand(None)
    for replica in _train(f"{RULE} / all_reduce / none / {schedule}"):
        for name, value in expected.items():
            assert torch.allclose(replica[name], value, rtol=1e-4, atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("make", [_adamw, lambda m: torch.optim.AdamW(m.parameters(), lr=LR, fused=True)])
@pytest.mark.parametrize(
    "compression",
    [
        "onebit(route=scatter) + error_feedback",
        "powersgd(rank=1) + error_feedback",
        "int4 + error_feedback",
        "topk + error_feedback",
    ],
)
def test_replicas_stay_equal_and_the_second_moment_stays(
    compression: str, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    start = mlp()

    def one_rank(transport: InProcessTransport) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        model = copy.deepcopy(start)
        optimizer = make(model)
        seen: list[torch.Tensor] = []
        rule = RULE.replace("first=none", "first=int8")
        with laconic.attach(model, optimizer, f"{rule} / all_reduce / {compression}", transport=transport) as session:
            for step in range(STEPS):
                _loss(model, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                if session.step > WARMUP:
                    beta = optimizer.param_groups[0]["betas"][1]
                    seen.append(optimizer.state[model[0].weight]["exp_avg_sq"] / (1 - beta**session.step))
        return snapshot(model), seen

    results = InProcessCluster(4).run(one_rank)
    for replica, variances in results:
        assert_equal(replica, results[0][0])
        for variance in variances:
            assert torch.allclose(variance, variances[0], rtol=1e-4, atol=0.0)
            assert bool(torch.isfinite(variance).all())


@pytest.mark.slow
def test_one_bit_learns_what_adam_learns() -> None:
    def trained(strategy: str, total_steps: int | None) -> float:
        start = mlp()

        def one_rank(transport: InProcessTransport) -> float:
            model = copy.deepcopy(start)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            truth = torch.nn.Linear(5, 3)
            for tensor in truth.parameters():
                tensor.data.copy_(data(77, 0, *tensor.shape))
            with laconic.attach(model, optimizer, strategy, transport=transport, total_steps=total_steps):
                for step in range(300):
                    inputs = data(step, transport.rank, 16, 5)
                    (model(inputs) - truth(inputs).tanh()).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            inputs = data(9999, 0, 256, 5)
            return (model(inputs) - truth(inputs).tanh()).square().mean().item()

        return InProcessCluster(4).run(one_rank)[0]

    plain = trained("bsp", None)
    assert trained("onebit-adam", 300) < 1.2 * plain


@pytest.mark.slow
def test_a_checkpoint_continues_bit_for_bit() -> None:
    strategy = f"{REFRESHED} / all_reduce / onebit(route=scatter) + error_feedback"

    start = mlp()

    def one_rank(transport: InProcessTransport) -> list[dict[str, torch.Tensor]]:
        ends: list[dict[str, torch.Tensor]] = []
        model = copy.deepcopy(start)
        optimizer = _adamw(model)
        saved: dict[int, tuple[dict, dict, dict]] = {}
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(STEPS):
                if step in (WARMUP - 1, WARMUP, REFRESHES[0], REFRESHES[0] + 1, WARMUP + 7):
                    state = session.state_dict()
                    saved[step] = copy.deepcopy((model.state_dict(), optimizer.state_dict(), state))
                _loss(model, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append(snapshot(model))
        for begin, (weights, moments, state) in saved.items():
            again = copy.deepcopy(start)
            other = _adamw(again)
            again.load_state_dict(weights)
            other.load_state_dict(moments)
            with laconic.attach(again, other, strategy, transport=transport) as session:
                session.load_state_dict(state)
                for step in range(begin, STEPS):
                    _loss(again, step, transport.rank).backward()
                    other.step()
                    other.zero_grad()
            ends.append(snapshot(again))
        return ends

    for ends in InProcessCluster(3).run(one_rank):
        for end in ends[1:]:
            assert_equal(end, ends[0])


def test_bytes_are_as_predicted_before_and_after_the_switch() -> None:
    def one_rank(transport: InProcessTransport) -> list[tuple[int, int]]:
        model = mlp()
        optimizer = _adamw(model)
        pairs: list[tuple[int, int]] = []
        strategy = f"{REFRESHED.replace('first=none', 'first=int8')} / all_reduce / onebit + error_feedback"
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(STEPS):
                before, due = session.traffic.sent_bytes("payload"), session.predicted_bytes_per_step()
                _loss(model, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                pairs.append((session.traffic.sent_bytes("payload") - before, due))
        return pairs

    for pairs in InProcessCluster(4).run(one_rank):
        assert all(sent == due for sent, due in pairs), pairs
        assert pairs[WARMUP][0] < pairs[WARMUP - 1][0] == pairs[REFRESHES[0]][0]


def _all_finite(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(torch.isfinite(value).all()) if value.is_floating_point() else True
    return all(map(_all_finite, value.values())) if isinstance(value, dict) else True


def test_a_gradient_that_is_not_finite_leaves_the_momentum() -> None:
    def one_rank(transport: InProcessTransport) -> bool:
        model = mlp()
        optimizer = _adamw(model)
        with laconic.attach(model, optimizer, f"{RULE} / all_reduce / none", transport=transport) as session:
            for step in range(WARMUP + 4):
                loss = _loss(model, step, transport.rank)
                if step == WARMUP + 2 and transport.rank == 1:
                    loss = loss * float("inf")
                loss.backward()
                if step != WARMUP + 2:  # as a GradScaler does
                    optimizer.step()
                optimizer.zero_grad()
            state = session.state_dict()
        return _all_finite(state)

    assert all(InProcessCluster(2).run(one_rank))


@pytest.mark.parametrize("rule", ["onebit_adam", "zero_one_adam(period=2)"])
@pytest.mark.parametrize("how", ["not used", "zero gradients"])
def test_a_parameter_that_starts_after_the_switch_makes_steps_of_usual_length(rule: str, how: str) -> None:
    """Rows of an embedding take turns, so the first gradient says nothing about most of them."""
    rate, steps = 0.01, 12
    torch.manual_seed(0)
    start = nn.ModuleList([nn.Linear(3, 2), nn.Embedding(8, 2)])
    settings = f"warmup_share=0.25, total_steps={steps}, refresh_share=0, first=none"
    strategy = f"{rule.removesuffix(')')}{', ' if '(' in rule else '('}{settings}) / all_reduce / none"

    def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        with laconic.attach(model, optimizer, strategy, transport=transport):
            for step in range(steps):
                loss = model[0](data(step, transport.rank, 4, 3)).square().mean()
                late = (model[1](torch.tensor([(step + transport.rank) % 8])) - 5).square().sum()
                if how == "zero gradients":
                    loss = loss + (late if step > 4 else 0.0 * late)
                elif step > 4:
                    loss = loss + late
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return snapshot(model)

    one, other = InProcessCluster(2).run(one_rank)
    assert_equal(one, other)
    moved = (one["1.weight"] - start[1].weight.detach()).abs()
    assert 0 < float(moved.max()) < 50 * rate * steps


class TestRefused:
    def _attach(
        self, strategy: str, make: Callable[[nn.Module], torch.optim.Optimizer] = _adamw, **options: int
    ) -> None:
        def one_rank(transport: InProcessTransport) -> None:
            model = mlp()
            laconic.attach(model, make(model), strategy, transport=transport, **options).detach()

        InProcessCluster(2).run(one_rank)

    def test_without_the_number_of_steps(self) -> None:
        with pytest.raises(AttachError, match=r"attach\(\.\.\., total_steps=1000\)"):
            self._attach("onebit-adam")
        self._attach("onebit-adam", total_steps=10)
        with pytest.raises(AttachError, match="is 5, and attach\\(\\) was given 10"):
            self._attach("onebit_adam(total_steps=5)", total_steps=10)
        with pytest.raises(AttachError, match="total_steps must be a whole number"):
            self._attach("onebit-adam", total_steps=0)

    def test_a_period_longer_than_training(self) -> None:
        with pytest.raises(AttachError, match="an outer step every 32 steps, and training takes 10"):
            self._attach("diloco", total_steps=10)
        with pytest.raises(AttachError, match="covers all of a training of 10 steps"):
            self._attach("bsp / all_reduce / topk + error_feedback + warmup(steps=10)", total_steps=10)
        self._attach("bsp / all_reduce / topk(density=0.2) + error_feedback + warmup(steps=9)", total_steps=10)

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), "SGD has none"),
            (lambda m: torch.optim.AdamW(m.parameters(), betas=(0.0, 0.9)), "AdamW has none"),
            (lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1), "weight_decay as Adam has it"),
            (lambda m: torch.optim.Adamax(m.parameters()), 'its state has no "exp_avg"'),
            (lambda m: torch.optim.AdamW(m.parameters(), maximize=True), "Minimize the negative loss instead"),
        ],
    )
    def test_optimizers_without_that_momentum(
        self, make: Callable[[nn.Module], torch.optim.Optimizer], reason: str
    ) -> None:
        with pytest.raises(AttachError, match=reason):
            self._attach(RULE, make)

    def test_groups_with_different_momentum(self) -> None:
        def make(model: nn.Module) -> torch.optim.Optimizer:
            first, *others = model.parameters()
            return torch.optim.AdamW([{"params": [first], "betas": (0.5, 0.9)}, {"params": others}])

        with pytest.raises(AttachError, match=r"different betas\[0\]"):
            self._attach(RULE, make)

    @pytest.mark.parametrize(
        "rest",
        [
            "parameter_server",
            "gossip",
            "all_reduce / none / priority",
            "all_reduce / none / dear",
            "all_reduce / dgc",
            "all_reduce / signsgd",
            "all_reduce / topk + error_feedback + warmup(steps=3)",
        ],
    )
    def test_combinations(self, rest: str) -> None:
        with pytest.raises(IllegalCombination, match="Nearest that works"):
            laconic.Strategy.parse(f"{RULE} / {rest}")

    def test_a_closure_and_join(self) -> None:
        def one_rank(transport: InProcessTransport) -> None:
            model = mlp()
            optimizer = _adamw(model)
            with laconic.attach(model, optimizer, "onebit_adam(total_steps=1)", transport=transport) as session:
                refused = pytest.raises(CommunicationError, match=r"session.join\(\) does not work with onebit_adam")
                with refused, session.join():
                    pass
                _loss(model, 0, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()

                def closure() -> torch.Tensor:
                    loss = _loss(model, 1, transport.rank)
                    loss.backward()
                    return loss

                with pytest.raises(CommunicationError, match="with a closure"):
                    optimizer.step(closure)

        InProcessCluster(2).run(one_rank)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam])
def test_optimizers_that_can_be_given_their_momentum(kind: type[torch.optim.Optimizer]) -> None:
    assert why_not_given(kind(mlp().parameters(), lr=0.0)) is None


class _OnGpu(torch.Tensor):
    """A number that says it is on a GPU, and how often it was read."""

    reads = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")

    def __int__(self) -> int:
        _OnGpu.reads += 1
        return int(self.as_subclass(torch.Tensor))


def test_a_count_on_a_gpu_is_read_once_and_again_when_a_state_has_been_loaded() -> None:
    given = GivenMomentum.__new__(GivenMomentum)
    given._steps = {}
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter])

    def load(number: float) -> None:
        optimizer.state[parameter]["step"] = torch.tensor(number).as_subclass(_OnGpu)

    load(7.0)
    assert [given._count(optimizer, parameter) for _ in range(3)] == [8, 9, 10]
    assert _OnGpu.reads == 1
    load(4.0)
    assert [given._count(optimizer, parameter) for _ in range(2)] == [5, 6]
    assert _OnGpu.reads == 2
