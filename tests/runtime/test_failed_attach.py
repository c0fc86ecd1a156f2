"""attach() either works or leaves nothing; detach() always takes everything off, and never hides the first error."""

from __future__ import annotations

import copy
import threading
import time
import warnings

import pytest
import torch
from torch import nn

import laconic
from laconic.core.event import Event
from laconic.core.in_process import InProcessTransport
from laconic.errors import AttachError, LaconicWarning, PeerLost
from laconic.runtime.hooks.gradients import GradientHooks
from tests.runtime.replicas import data, sgd

STRATEGIES = [
    "bsp",
    "bsp / all_reduce / none / priority",
    "bsp / all_reduce / none / dear",
    "bsp / parameter_server",
    "diloco(period=2)",
    "bsp / gossip",
    "asp / parameter_server",
    "asp / gossip",
]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def loss(replica: nn.Module, step: int, rank: int) -> torch.Tensor:
    return replica(data(step, rank, 4, 5)).square().mean()


def traces(replica: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Whatever is left of laconic on a model and its optimizer."""
    found = [
        f"hook on {name}" for name, p in replica.named_parameters() if getattr(p, "_post_accumulate_grad_hooks", None)
    ]
    for name, module in replica.named_modules():
        hooks = (module._forward_pre_hooks, module._state_dict_pre_hooks, module._load_state_dict_pre_hooks)
        found += [f"hook on module {name}"] if any(hooks) else []
    found += [key for key, value in vars(optimizer).items() if key.endswith("_hooks") and value]
    return found + [key for key in vars(optimizer) if key == "_step_supports_amp_scaling"]


def laconic_threads() -> list[str]:
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s:
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("laconic")]
        if not names:
            return []
        time.sleep(0.05)
    return names


def steps(replica: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(50):
        loss(replica, step, rank).backward()
        optimizer.step()
        time.sleep(0.02)


class Full:
    """Events that cannot be written on one rank: attach fails at its very end."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def write(self, event: Event) -> None:
        if self.rank == 1:
            raise OSError("no space left on device")

    def close(self) -> None:
        pass


@every_strategy
def test_a_failed_attach_leaves_nothing_and_the_next_one_works(strategy: str) -> None:
    original = model()

    def one_rank(transport: InProcessTransport) -> None:
        replica = copy.deepcopy(original)
        optimizer = sgd(replica)
        try:
            session = laconic.attach(replica, optimizer, strategy, transport=transport, events=Full(transport.rank))
        except (OSError, PeerLost):
            session = None  # rank 0 may still have been attaching
        if session is not None:
            with pytest.raises(PeerLost, match="rank 1 raised OSError while attaching"):
                steps(replica, optimizer, transport.rank)
            session.detach()
        assert not traces(replica, optimizer)
        with laconic.attach(replica, optimizer, "bsp", transport=laconic.InProcessCluster(1).transport(0)):
            loss(replica, 0, 0).backward()
            optimizer.step()

    laconic.InProcessCluster(2, timeout_s=5).run(one_rank)
    assert not laconic_threads()


def test_a_warning_that_is_an_error_leaves_nothing_on_any_rank() -> None:
    def one_rank(transport: InProcessTransport) -> None:
        replica = model()
        optimizer = sgd(replica)
        with pytest.raises((LaconicWarning, PeerLost)):
            laconic.attach(replica, optimizer, "bsp / all_reduce / topk", transport=transport)
        assert not traces(replica, optimizer)
        transport.acquire()

    with warnings.catch_warnings():
        warnings.simplefilter("error", LaconicWarning)
        laconic.InProcessCluster(2, timeout_s=5).run(one_rank)


@every_strategy
def test_the_users_exception_is_the_one_that_comes_out(strategy: str) -> None:
    """From `with` and from `finally: detach()`, and nothing is left behind."""
    original = model()

    def one_rank(transport: InProcessTransport) -> None:
        replica = copy.deepcopy(original)
        optimizer = sgd(replica)
        session = laconic.attach(replica, optimizer, strategy, transport=transport)
        try:
            for step in range(200):
                loss(replica, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 4 and transport.rank == 1:
                    raise ValueError("user bug")
                time.sleep(0.01)
        finally:
            session.detach()
            session.detach()

    def caught(transport: InProcessTransport) -> tuple[str, str]:
        began_s = time.monotonic()
        try:
            one_rank(transport)
        except (ValueError, PeerLost) as exc:
            assert time.monotonic() - began_s < 15
            return type(exc).__name__, str(exc)
        raise AssertionError("it went on")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaconicWarning)
        first, second = laconic.InProcessCluster(2, timeout_s=5).run(caught)
    assert second == ("ValueError", "user bug")
    assert first[0] == "PeerLost"
    assert "rank 1 raised ValueError: user bug" in first[1]
    assert not laconic_threads()


def test_a_session_inside_a_handler_ends_as_usual() -> None:
    """An exception that was being handled when the session began says nothing about it."""

    def one_rank(transport: InProcessTransport) -> float:
        replica = model()
        optimizer = sgd(replica)
        try:
            raise MemoryError("a larger batch did not fit")
        except MemoryError:
            with laconic.attach(replica, optimizer, "bsp", transport=transport):
                loss(replica, 0, transport.rank).backward()
                optimizer.step()
        return float(replica[1].running_mean.sum())  # type: ignore[union-attr]

    first, second = laconic.InProcessCluster(2, timeout_s=5).run(one_rank)
    assert first == second, "buffers were made equal"


def test_a_problem_while_cleaning_up_is_a_note_on_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: GradientHooks) -> None:
        raise RuntimeError("a hook that does not come off")

    def one_rank(transport: InProcessTransport) -> list[str]:
        replica = model()
        optimizer = sgd(replica)
        with (
            pytest.raises(ValueError, match="user bug") as caught,
            laconic.attach(replica, optimizer, "bsp", transport=transport),
        ):
            raise ValueError("user bug")
        transport.acquire()  # everything else was undone
        return caught.value.__notes__

    monkeypatch.setattr(GradientHooks, "detach", broken)
    for notes in laconic.InProcessCluster(2, timeout_s=5).run(one_rank):
        assert notes == ["laconic: while detaching, RuntimeError: a hook that does not come off"]


@pytest.mark.parametrize("environment", [{}, {"LACONIC_REPLICA": "0.0", "RANK": "0", "WORLD_SIZE": "2"}])
def test_under_laconic_run_a_session_must_be_elastic(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LACONIC_STORE": "127.0.0.1:1", "LACONIC_WORKER": "0.0", **environment}.items():
        monkeypatch.setenv(name, value)
    replica = model()
    optimizer = sgd(replica)
    with pytest.raises(AttachError, match=r"elastic=laconic\.Elastic\(\)"):
        laconic.attach(replica, optimizer, "bsp")
    assert not traces(replica, optimizer)
