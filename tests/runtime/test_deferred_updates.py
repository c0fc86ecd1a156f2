"""Deferred updates: nothing hangs, diverges or surprises, whatever the optimizer and whoever looks at parameters."""

from __future__ import annotations

import copy
import io
import threading
import time
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.core.paced import PacedLink, PacedTransport
from laconic.errors import CommunicationError, LaconicWarning, PeerLost
from laconic.runtime.hooks.separability import why_not_separable
from tests.runtime.replicas import assert_equal, data, snapshot

DEFERRING = {
    "priority": "priority(partition_bytes=1KiB)",
    "dear": "dear(bytes=1KiB)",
    "dear, one bucket": "dear(bytes=25MiB)",
}
every_deferring = pytest.mark.parametrize("schedule", DEFERRING.values(), ids=DEFERRING)
SETTLED = 9


class GlobalNorm(torch.optim.SGD):
    """Divides by the norm of all gradients inside step()."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            norm = torch.sqrt(sum(gradient.square().sum() for gradient in gradients))
            for gradient in gradients:
                gradient.div_(norm.clamp(min=1.0))
        return super().step(closure)


class CountsItself(torch.optim.SGD):
    """A counter on self decides how far a step goes."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.calls
        return super().step(closure)


class LosesCount(torch.optim.SGD):
    """A counter on self that nothing depends on yet."""

    def __init__(self, params, **settings) -> None:
        super().__init__(params, **settings)
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step(closure)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 10))


def loss(replica: nn.Module, step: int, rank: int) -> torch.Tensor:
    return (3 * replica(data(step, rank, 4, 20))).square().mean()


Body = Callable[[nn.Module, torch.optim.Optimizer, laconic.Session, int], None]


def trained(schedule: str, body: Body, make=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), link=None):
    """What both ranks end with."""

    original = model()

    def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        replica = copy.deepcopy(original)
        optimizer = make(replica)
        wire = transport if link is None else PacedTransport(transport, link, timeout_s=20)
        with laconic.attach(replica, optimizer, f"bsp / all_reduce / none / {schedule}", transport=wire) as session:
            body(replica, optimizer, session, transport.rank)
        return snapshot(replica)

    return laconic.InProcessCluster(2, timeout_s=20).run(one_rank)


def plain_loop(replica: nn.Module, optimizer: torch.optim.Optimizer, session: laconic.Session, rank: int) -> None:
    for step in range(SETTLED):
        loss(replica, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def slower_on_one_rank(replica, optimizer, session, rank: int) -> None:
    for step in range(SETTLED):
        loss(replica, step, rank).backward()
        time.sleep(0.004 * rank * (step % 3))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@every_deferring
@pytest.mark.parametrize("kind", [GlobalNorm, CountsItself, LosesCount])
@pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")
def test_optimizers_that_cannot_be_split_up(schedule: str, kind: type[torch.optim.SGD]) -> None:
    def make(replica: nn.Module) -> torch.optim.Optimizer:
        return kind(replica.parameters(), lr=0.1, momentum=0.9)

    expected = trained("fusion", plain_loop, make)
    found = trained(schedule, slower_on_one_rank, make, PacedLink(2e6))
    assert_equal(found[0], found[1])
    assert_equal(found[0], expected[0])


@pytest.mark.parametrize(
    ("kind", "what"),
    [(GlobalNorm, "a parameter"), (CountsItself, "a parameter"), (LosesCount, 'the attribute "calls"')],
)
def test_what_cannot_be_split_up_is_said_so_on_every_rank(kind: type[torch.optim.SGD], what: str) -> None:
    assert what in (why_not_separable(kind(model().parameters(), lr=0.1)) or "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained("dear(bytes=1KiB)", plain_loop, lambda replica: kind(replica.parameters(), lr=0.1))
    told = [str(one.message) for one in caught if one.category is LaconicWarning]
    assert len(told) == 2
    assert all(what in text and "optimizer.step() waits for all gradients" in text for text in told)


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
        lambda ps: torch.optim.AdamW(ps, lr=0.1),
        lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
        lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True, foreach=True),
        torch.optim.NAdam,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Rprop,
        torch.optim.Adafactor,
    ],
)
def test_element_wise_optimizers_are_known_to_be_separable_and_are_left_alone(make) -> None:
    parameters = list(model().parameters())
    before = [p.detach().clone() for p in parameters]
    optimizer = make(parameters)
    random_before = torch.get_rng_state()
    state_before = copy.deepcopy(optimizer.state_dict())
    assert why_not_separable(optimizer) is None
    assert repr(optimizer.state_dict()) == repr(state_before)
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(parameters, before, strict=True))
    assert torch.equal(torch.get_rng_state(), random_before)


@every_deferring
def test_hooks_and_counters_of_the_user_run_once_per_step(schedule: str) -> None:
    counts: list[tuple[int, int, int]] = []

    def body(replica, optimizer, session, rank) -> None:
        calls = [0, 0]
        optimizer.register_step_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
        if rank == 0:
            optimizer.register_step_post_hook(lambda *_: calls.__setitem__(1, calls[1] + 1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        plain_loop(replica, optimizer, session, rank)
        scheduler.step()
        counts.append((rank, *calls))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaconicWarning)
        trained(schedule, body)
    assert sorted(counts) == [(0, SETTLED, SETTLED), (1, SETTLED, 0)]


@every_deferring
def test_a_learning_rate_in_a_tensor_is_that_of_the_step(schedule: str) -> None:
    def adam(replica: nn.Module) -> torch.optim.Optimizer:
        betas = (torch.tensor(0.9), torch.tensor(0.99))
        return torch.optim.Adam(replica.parameters(), lr=torch.tensor(0.01), betas=betas, foreach=False)

    def body(replica, optimizer, session, rank: int) -> None:
        group = optimizer.param_groups[0]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1.0, 0.0, 3.0)[step % 3])
        for step in range(SETTLED):
            loss(replica, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            group["betas"][0].fill_(0.9 - 0.05 * (step % 4))

    deferred, fused = trained(schedule, body, adam), trained("fusion", body, adam)
    assert_equal(deferred[0], deferred[1])
    assert_equal(deferred[0], fused[0])


@every_deferring
@pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")
def test_a_hook_around_the_step_sees_gradients_before_and_new_parameters_after(schedule: str) -> None:
    seen: dict[tuple[str, int, int], tuple[float, float]] = {}

    def watched(name: str) -> Body:
        def body(replica, optimizer, session, rank) -> None:
            norm = [0.0]

            def before(*_) -> None:
                norm[0] = float(sum(p.grad.square().sum() for p in replica.parameters()))

            def after(*_) -> None:
                seen[name, rank, session.step] = (
                    norm[0],
                    float(sum(p.detach().square().sum() for p in replica.parameters())),
                )

            optimizer.register_step_pre_hook(before)
            optimizer.register_step_post_hook(after)
            plain_loop(replica, optimizer, session, rank)

        return body

    trained(schedule, watched("deferring"))
    trained("fusion", watched("fusion"))
    for (name, rank, step), values in seen.items():
        assert values == seen["fusion", rank, step], (name, rank, step)


@every_deferring
def test_a_write_between_step_and_forward_raises_by_name(schedule: str) -> None:
    def body(replica, optimizer, session, rank) -> None:
        for step in range(SETTLED):
            loss(replica, step, rank).backward()
            optimizer.step()
            with torch.no_grad():
                for parameter in replica.parameters():
                    parameter.clamp_(-0.1, 0.1)
            optimizer.zero_grad()

    with pytest.raises(
        CommunicationError, match=r'parameter "\d.\w+" was changed after optimizer.step\(\).*settle\(\)'
    ):
        trained(schedule, body)


class FlatLayers(nn.Module):
    """Layers whose weights are views of one tensor, and so share its version counter."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(3 * 400, generator=torch.Generator().manual_seed(0)) / 20
        self.layers = nn.ModuleList(nn.Linear(20, 20, bias=False) for _ in range(3))
        for layer, part in zip(self.layers, flat.view(3, 20, 20), strict=True):
            layer.weight = nn.Parameter(part)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch


@every_deferring
def test_parameters_that_are_views_of_one_tensor_are_updated_in_the_step(schedule: str) -> None:
    """The update of one layer would pass for a write to the others: for this check, and for autograd's own."""

    def one_rank(transport: InProcessTransport, schedule: str) -> dict[str, torch.Tensor]:
        replica = FlatLayers()
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        with laconic.attach(replica, optimizer, f"bsp / all_reduce / none / {schedule}", transport=transport):
            for step in range(SETTLED):
                loss(replica, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
        return snapshot(replica)

    cluster = laconic.InProcessCluster(2, timeout_s=20)
    expected = cluster.run(lambda transport: one_rank(transport, "fusion"))
    with pytest.warns(LaconicWarning, match=r'"layers.0.weight" and "layers.1.weight" are views of one tensor'):
        found = cluster.run(lambda transport: one_rank(transport, schedule))
    assert_equal(found[0], expected[0])


@every_deferring
def test_settle_lets_parameters_be_read_and_written(schedule: str) -> None:
    averages: dict[tuple[str, int], dict[str, torch.Tensor]] = {}

    def body(replica, optimizer, session, rank) -> None:
        average = AveragedModel(model())
        for step in range(SETTLED):
            loss(replica, step, rank).backward()
            optimizer.step()
            session.settle()
            with torch.no_grad():
                for parameter in replica.parameters():
                    parameter.clamp_(-0.1, 0.1)
            average.update_parameters(replica)
            optimizer.zero_grad()
        averages[session.strategy.scheduling.name, rank] = snapshot(average)

    assert_equal(trained(schedule, body)[0], trained("fusion", body)[0])
    first, *others = averages.values()
    for other in others:
        assert_equal(first, other)


@every_deferring
def test_the_model_can_be_saved_copied_and_loaded_between_steps(schedule: str) -> None:
    def body(replica, optimizer, session, rank) -> None:
        plain_loop(replica, optimizer, session, rank)
        saved = io.BytesIO()
        torch.save(replica, saved)
        loss(replica, 50, rank).backward()
        optimizer.step()
        copied = copy.deepcopy(replica)
        assert_equal(snapshot(copied), snapshot(replica))
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        loss(loaded, 0, 0).backward()
        loss(replica, 51, rank).backward()
        optimizer.step()
        replica.load_state_dict(loaded.state_dict())
        assert_equal(snapshot(replica), snapshot(loaded))

    trained(schedule, body)


@every_deferring
def test_the_first_error_comes_out_and_nothing_is_left(schedule: str) -> None:
    """The user's own exception in the body, while exchanges are in flight."""
    threads = threading.active_count()
    seen: list[BaseException] = []

    def one_rank(transport: InProcessTransport) -> None:
        replica = model()
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        wire = PacedTransport(transport, PacedLink(1e6), timeout_s=20)
        try:
            with laconic.attach(replica, optimizer, f"bsp / all_reduce / none / {schedule}", transport=wire) as session:
                plain_loop(replica, optimizer, session, transport.rank)
                loss(replica, 0, transport.rank).backward()
                optimizer.step()
                if transport.rank == 1:
                    raise ValueError("user bug")
                plain_loop(replica, optimizer, session, transport.rank)
        except (ValueError, PeerLost) as exc:
            seen.append(exc)
        assert not any(module._forward_pre_hooks for module in replica.modules())
        assert all(p.grad is None or type(p.grad) is torch.Tensor for p in replica.parameters())
        wire.acquire()  # it was released
        wire.release()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaconicWarning)
        laconic.InProcessCluster(2, timeout_s=20).run(one_rank)
    assert {type(exc) for exc in seen} == {ValueError, PeerLost}
    assert "rank 1 raised ValueError: user bug" in str(next(exc for exc in seen if isinstance(exc, PeerLost)))
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= threads


MOMENTS = ("forward", "backward", "before step", "between")


@every_deferring
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")
def test_a_peer_that_dies_is_named_and_nobody_hangs(schedule: str, moment: str) -> None:
    """It leaves without a word at any moment; the others are told by name within the time limit."""
    ended: dict[int, BaseException | None] = {}

    def one_rank(transport: InProcessTransport) -> None:
        replica = model()
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        session = laconic.attach(replica, optimizer, f"bsp / all_reduce / none / {schedule}", transport=transport)
        try:
            for step in range(SETTLED + 4):
                dies = transport.rank == 1 and step == SETTLED
                if dies and moment == "forward":
                    raise _Dies
                result = loss(replica, step, transport.rank)
                if dies and moment == "backward":
                    raise _Dies
                result.backward()
                if dies and moment == "before step":
                    raise _Dies
                optimizer.step()
                if dies and moment == "between":
                    raise _Dies
                optimizer.zero_grad()
            session.detach()
        except _Dies:
            transport.announce_failure("died")
            session.detach()  # for the sake of its threads; a process that died would have none
        except CommunicationError as exc:
            ended[transport.rank] = exc
            session.detach()

    began_s = time.monotonic()
    laconic.InProcessCluster(2, timeout_s=3).run(one_rank)
    assert time.monotonic() - began_s < 10
    assert "rank 1 died" in str(ended[0])


class _Dies(Exception):
    pass
