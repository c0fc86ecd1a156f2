"""async_diloco: the servers' outer steps for a fixed order of arrivals, training in turns, saving, and refusals."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import nn

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import CommunicationError, InvalidSetting, StrategyError
from laconic.simulator import Conditions, simulate
from laconic.strategy import Strategy
from laconic.synchronization import AsyncDiLoCo, DiLoCo
from tests.processes import run_processes
from tests.runtime.replicas import assert_equal, mlp, mlp_loss, snapshot
from tests.runtime.servers.hand_made import BUCKET, ShelfByHand
from tests.simulator.jobs import hosts, job

pytestmark = pytest.mark.timeout(120)

LR, BETA = 0.5, 0.8


class Reference:
    """The outer steps as the paper writes them, with c = spread / N, on a list of numbers."""

    def __init__(self, values: Sequence[float], num_changes: int, c: float) -> None:
        self.x, self.m, self.sums = list(values), [0.0] * len(values), [0.0] * len(values)
        self.num_changes, self.c, self.t = num_changes, c, 0

    def arrive(self, change: Sequence[float]) -> list[float]:
        n, c = self.num_changes, self.c
        self.sums = [s + g for s, g in zip(self.sums, change, strict=True)]
        factor = c
        if (self.t + 1) % n == 0:
            self.m = [BETA * m + s / n for m, s in zip(self.m, self.sums, strict=True)]
            self.sums = [0.0] * len(self.sums)
            factor = 1 - c * n + c
        self.x = [x - LR * (factor * BETA * m + g / n) for x, m, g in zip(self.x, self.m, change, strict=True)]
        self.t += 1
        return self.x


def by_hand(settings: str = "", world_size: int = 3, compression: str = "none") -> ShelfByHand:
    text = f"async_diloco(period=4, lr={LR}, momentum={BETA}{settings}) / parameter_server / {compression}"
    return ShelfByHand(text, world_size, optimizer="", groups=())


def changes(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, BUCKET.numel, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize(
    ("settings", "num_changes", "spread"),
    [("", 3, 0.0), (", buffer=1", 1, 0.0), (", buffer=4, spread=1", 4, 1.0), (", buffer=2, spread=0.4", 2, 0.4)],
)
def test_the_outer_steps_of_a_fixed_order_of_arrivals(settings: str, num_changes: int, spread: float) -> None:
    server = by_hand(settings)
    right = Reference(server.start.tolist(), num_changes, spread / num_changes)
    made = [0, 0, 0]
    for rank, change in zip([0, 2, 0, 0, 1, 2, 1, 1, 0], changes(9), strict=True):
        made[rank] += 4
        server.push(rank, change, made[rank] - 1)
        (found,) = server.answers.to(rank)[-1].tensors
        torch.testing.assert_close(found, torch.tensor(right.arrive(change.tolist())), rtol=1e-5, atol=1e-5)
    facts = [json.loads(frame.note) for frame in server.answers.frames]
    assert [fact["staleness"] for fact in facts] == [0, 1, 1, 0, 4, 3, 1, 0, 4]
    assert facts[3]["lead"] == 12, "three rounds of four steps ahead of rank 1"


def test_with_a_buffer_of_one_it_is_nesterov_momentum() -> None:
    server = by_hand(", buffer=1")
    x = nn.Parameter(server.start.clone())
    outer = torch.optim.SGD([x], lr=LR, momentum=BETA, nesterov=True)
    for step, change in enumerate(changes(5)):
        server.push(step % 3, change, step)
        x.grad = change
        outer.step()
    torch.testing.assert_close(server.values(), x.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_one_change_of_each_worker_moves_parameters_as_an_outer_step_of_diloco(spread: float) -> None:
    server = by_hand(f", spread={spread}" if spread else "")
    sent = changes(3)
    for rank, change in enumerate(sent):
        server.push(rank, change, 3)
    x = server.start.clone()
    memory = {"diloco.momentum": torch.zeros_like(x)}
    DiLoCo(lr=LR, momentum=BETA).outer(x, torch.stack(sent).mean(0), memory, 0.1)
    # The momentum starts at zero, so its parts on the first two changes are zero.
    lacks = 0.0 if not spread else spread * (1 - 1 / 3)
    torch.testing.assert_close(server.values(), x + lacks * LR * BETA * memory["diloco.momentum"], rtol=1e-5, atol=1e-5)


def test_a_server_continues_from_its_saved_state_and_takes_no_other() -> None:
    one, other = by_hand(), by_hand()
    sent = changes(7)
    for step, change in enumerate(sent[:4]):
        one.push(step % 3, change, step)
    state = one.store.state()
    keys, tensors = list(state), (one.values(), *state.values())
    for wrong_keys, wrong_tensors, words in (
        (keys[:-1], tensors[:-1], 'lacks "step"'),
        ([*keys[:-1], keys[-1].replace("step", "clock")], tensors, "has, but this server does not|lacks"),
        (keys, (*tensors[:-1], torch.tensor([3.0], dtype=torch.float64)), "as the number of changes"),
        (keys, (*tensors[:-1], torch.tensor([float("nan")])), "NaN"),
    ):
        with pytest.raises(CommunicationError, match=words):
            other.store.restore(wrong_tensors, wrong_keys)
        assert torch.equal(other.values(), other.start), "nothing has changed"
    other.store.restore(tensors, keys)
    for step, change in enumerate(sent[4:]):
        for server in (one, other):
            server.push(step % 3, change, step)
    assert torch.equal(one.values(), other.values())


def test_a_change_with_settings_of_an_optimizer_is_refused() -> None:
    server = by_hand()
    with pytest.raises(CommunicationError, match="comes without groups"):
        server.push(0, changes(1)[0], note=json.dumps({"step": 3, "groups": [{"lr": 1.0}], "unused": []}))
    assert torch.equal(server.values(), server.start)


# -- training ----------------------------------------------------------------------------------------------------


def in_turns(world_size: int, run: Callable[[InProcessTransport, Callable[[], Iterator[None]]], object]) -> list:
    """Run on every rank; `for _ in turns():` gives each rank its turn, one after the other."""
    barrier = threading.Barrier(world_size, timeout=60)

    def one(transport: InProcessTransport) -> object:
        def turns() -> Iterator[None]:
            for rank in range(world_size):
                if rank == transport.rank:
                    yield
                barrier.wait()

        try:
            return run(transport, turns)
        except BaseException:
            barrier.abort()
            raise

    return laconic.InProcessCluster(world_size, timeout_s=60).run(one)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    mlp_loss(model, step, rank).backward()
    optimizer.step()
    optimizer.zero_grad()


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def plain(world_size: int, period: int, steps: int, num_changes: int) -> torch.Tensor:
    """Workers in turns and one server, without laconic; unsent changes are averaged at the end."""
    models = [mlp() for _ in range(world_size)]
    optimizers = [adamw(model) for model in models]
    x = flat(models[0])
    m, sums, arrivals = torch.zeros_like(x), torch.zeros_like(x), 0
    anchors = [x.clone() for _ in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step_of(model, optimizer, step, rank)
            if (step + 1) % period:
                continue
            change = anchors[rank] - flat(model)
            sums, arrivals = sums + change, arrivals + 1
            x = x - LR / num_changes * change
            if arrivals % num_changes == 0:
                m, sums = BETA * m + sums / num_changes, torch.zeros_like(x)
                x = x - LR * BETA * m
            anchors[rank] = x.clone()
            nn.utils.vector_to_parameters(x.clone(), model.parameters())
    unsent = [anchor - flat(model) for anchor, model in zip(anchors, models, strict=True)]
    return x - torch.stack(unsent).mean(0)


@pytest.mark.parametrize(("world_size", "buffer", "steps"), [(1, 0, 7), (3, 0, 11), (2, 3, 9)])
def test_training_in_turns_is_what_the_paper_does(world_size: int, buffer: int, steps: int) -> None:
    text = f"async_diloco(period=3, lr={LR}, momentum={BETA}{f', buffer={buffer}' if buffer else ''})"

    # Not in threads: they have one random generator in common, so one could seed it while another draws from it.
    models = [mlp() for _ in range(world_size)]

    def run(transport: InProcessTransport, turns: Callable[[], Iterator[None]]) -> torch.Tensor:
        model = models[transport.rank]
        optimizer = adamw(model)
        with laconic.attach(model, optimizer, text, transport=transport) as session:
            for step in range(steps):
                for _ in turns():
                    step_of(model, optimizer, step, transport.rank)
            assert len(optimizer.state) == 4, "each worker keeps the state of its own optimizer"
            counted = session.traffic.sent_bytes("payload")
            specs = [laconic.TensorSpec.of(name, p) for name, p in model.named_parameters()]
            assert counted == steps // 3 * session.strategy.wire_bytes_per_round(specs, world_size)
            assert counted == steps // 3 * sum(spec.nbytes for spec in specs)
            session.average()
        return flat(model)

    right = plain(world_size, 3, steps, buffer or world_size)
    for found in in_turns(world_size, run):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_workers_may_make_different_numbers_of_steps_and_any_optimizer_will_do() -> None:
    class Mine(torch.optim.SGD):
        """An optimizer that no server knows."""

    def one(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        model = mlp()
        optimizers = [Mine(layer.parameters(), lr=0.05) for layer in (model[0], model[2])]
        with laconic.attach(model, optimizers, "async_diloco(period=2)", transport=transport) as session:
            for step in range(4 + 6 * transport.rank):
                mlp_loss(model, step, transport.rank).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            session.average()
        return snapshot(model)

    first, *others = laconic.InProcessCluster(3, timeout_s=60).run(one)
    assert not torch.equal(first["0.weight"], mlp()[0].weight)
    for found in others:
        assert_equal(found, first)


@pytest.mark.parametrize("compression", ["none", "bf16 + error_feedback", "topk(density=0.5) + error_feedback"])
def test_saved_in_the_middle_of_a_round_training_continues_bit_for_bit(compression: str) -> None:
    text = f"async_diloco(period=3) / parameter_server / {compression}"

    def run(transport: InProcessTransport, turns: Callable[[], Iterator[None]]) -> None:
        def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, torch.Tensor]:
            for step in steps:
                for _ in turns():
                    step_of(model, optimizer, step, transport.rank)
            return snapshot(model)

        model = mlp()
        optimizer = adamw(model)
        with laconic.attach(model, optimizer, text, transport=transport) as session:
            train(model, optimizer, range(5))
            saved = session.state_dict()
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), saved))
            right = train(model, optimizer, range(5, 12))
        again = mlp()
        optimizer = adamw(again)
        with laconic.attach(again, optimizer, text, transport=transport) as session:
            again.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            session.load_state_dict(kept[2])
            assert_equal(snapshot(again), kept[0])
            found = train(again, optimizer, range(5, 12))
        assert_equal(found, right)

    in_turns(2, run)


@pytest.mark.slow
@pytest.mark.dist
def test_real_processes_with_servers_of_their_own() -> None:
    results = run_processes("tests.runtime.servers.ranks:with_outer_servers", world_size=2, timeout_s=110)
    for result in results:
        assert result.value["after"] < 0.6 * result.value["before"]
        assert result.value["sent"] == result.value["predicted"]
        assert_equal(result.value["model"], results[0].value["model"])


# -- what fits, and what does not ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("async_diloco / gossip", "needs servers, which make its outer steps, and gossip has none"),
        ("async_diloco / choco / int8", "needs servers, which make its outer steps, and choco has none"),
        ("async_diloco / all_reduce", "all_reduce needs all of them at once"),
        ("async_diloco / parameter_server / signsgd", "signsgd"),
    ],
)
def test_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        Strategy.parse(text)


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="spread has no effect with buffer=1"):
        AsyncDiLoCo(buffer=1, spread=0.5)
    with pytest.raises(InvalidSetting, match="spread has no effect with momentum=0"):
        AsyncDiLoCo(momentum=0.0, spread=0.5)


def test_in_the_simulator_a_slow_worker_holds_up_no_other_and_rounds_are_rare() -> None:
    workload, cluster = job((0.01, 0.02, 4_000_000)), hosts(4, delay_s=1e-4)
    rare, often = (simulate(f"async_diloco(period={period})", workload, cluster).prediction for period in (8, 2))
    assert workload.compute_s < rare.step_s < often.step_s
    assert rare.step_s - workload.compute_s == pytest.approx((often.step_s - workload.compute_s) / 4, rel=0.05)
    slow = Conditions(slow={0: 4.0})
    alone = simulate("async_diloco(period=8)", workload, cluster, conditions=slow).prediction
    together = simulate("diloco(period=8)", workload, cluster, conditions=slow).prediction
    assert alone.step_s < 0.5 * together.step_s
