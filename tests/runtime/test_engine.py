"""The engine of exchanges: one order on all ranks, also for methods with several rounds and many buckets."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar, cast

import pytest
import torch
from torch import nn

from laconic.compression import Compressor
from laconic.compression.traits import Traits
from laconic.core.clock import WallClock
from laconic.core.event import DiscardEvents
from laconic.core.exchange import Exchange, Group, Round, one_round
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.timing import Timing
from laconic.core.transport import DoneWork
from laconic.errors import CommunicationError
from laconic.runtime.engine import Engine, Task
from laconic.runtime.hooks.planning import Planning
from laconic.runtime.job import Job
from laconic.runtime.stopwatch import Stopwatch
from laconic.scheduling import Fusion, Priority, Wfbp
from laconic.strategy import Strategy
from tests.runtime.replicas import assert_equal, data, train


@dataclass(frozen=True, kw_only=True)
class Halves(Compressor):
    """Sums the two halves of a bucket in two rounds, then a checksum in a third; buckets of odd size take one more."""

    name: ClassVar[str] = "halves"

    @property
    def traits(self) -> Traits:
        return Traits(lossless=True)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        middle = flat.numel() // 2
        yield group.sum((flat[:middle],))
        yield group.sum((flat[middle:],))
        checksum = flat.sum().reshape(1)
        yield group.sum((checksum,))
        torch.testing.assert_close(checksum, group.size * flat.sum().reshape(1))
        if flat.numel() % 2:
            yield group.sum((checksum,))

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        size, element = bucket.numel, bucket.dtype.itemsize
        parts = [size // 2, size - size // 2, 1, *([1] if size % 2 else [])]
        return tuple(Round("sum", (element * part,)) for part in parts)


class Uneven(nn.Module):
    """A deep model whose backward pass takes another time at every layer, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(24))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = _Dawdle.apply(torch.tanh(layer(inputs)))
        return inputs


class _Dawdle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(random.random() * 0.003)
        return gradient


@pytest.mark.parametrize("scheduling", [Wfbp(), Fusion(bytes=200, first_bytes=100)], ids=str)
def test_several_rounds_and_many_buckets_keep_one_order(scheduling) -> None:
    # The in-process transport raises as soon as two ranks issue different operations.
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(data(step, rank, 2, 5)).square().mean()

    expected = train(Uneven(), Strategy(scheduling=scheduling), loss=loss, world_size=3, steps=3)
    found = train(Uneven(), Strategy(compression=Halves(), scheduling=scheduling), loss=loss, world_size=3, steps=3)
    for state in found:
        assert_equal(state, found[0])
    for name, value in found[0].items():
        torch.testing.assert_close(value, expected[0][name])


@dataclass(frozen=True, kw_only=True)
class MatricesTwice(Halves):
    """Two rounds for matrices, one for vectors, so that a later bucket can be done before an earlier one."""

    name: ClassVar[str] = "matrices_twice"

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        middle = flat.numel() // 2 if flat.numel() > 10 else flat.numel()
        yield group.sum((flat[:middle],))
        if middle < flat.numel():
            yield group.sum((flat[middle:],))

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        size, element = bucket.numel, bucket.dtype.itemsize
        parts = [size // 2, size - size // 2] if size > 10 else [size]
        return tuple(Round("sum", (element * part,)) for part in parts)


def test_the_backward_pass_returns_when_every_bucket_is_done() -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(data(step, rank, 2, 5)).square().mean()

    for _ in range(5):
        states = train(Uneven(), Strategy(compression=MatricesTwice(), scheduling=Wfbp()), loss=loss, steps=3)
        assert_equal(states[0], states[1])
        assert_equal(states[0], train(Uneven(), Strategy(scheduling=Wfbp()), loss=loss, steps=3)[0])


@pytest.mark.parametrize("on_stream", [False, True])
def test_an_error_in_a_compressor_reaches_the_training_loop(on_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcessTransport, "waits_on_stream", lambda self, device: on_stream)

    @dataclass(frozen=True, kw_only=True)
    class Broken(Halves):
        name: ClassVar[str] = "broken"

        def exchange(
            self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
        ) -> Exchange:
            yield group.sum((flat,))
            raise ZeroDivisionError("a bug in a third-party method")

    with pytest.raises(ZeroDivisionError, match="third-party"):
        train(nn.Linear(5, 3), Strategy(compression=Broken()))


class _Later:
    """Arrives after a while, whoever looks."""

    def __init__(self, after_s: float) -> None:
        self._there_s = time.monotonic() + after_s

    def wait(self) -> None:
        time.sleep(max(0.0, self._there_s - time.monotonic()))

    def done(self) -> bool:
        return time.monotonic() >= self._there_s


class _Stream:
    """Operations of a GPU's stream: the host never waits; `launched` has them in the order of issue."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def exchange(self, name: str) -> Exchange:
        for number in range(2):
            self.launched.append(f"{name}, round {number}")
            yield DoneWork()


@pytest.mark.parametrize("decoupled", [False, True])
def test_operations_on_a_stream_are_issued_before_submit_returns(
    decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcessTransport, "waits_on_stream", lambda self, device: True)
    engine = Engine(InProcessCluster(1).transport(0), Stopwatch(WallClock(), DiscardEvents(), 0))
    stream = _Stream()
    try:
        for step in range(20):
            task = Task("x", lambda step=step: stream.exchange(f"laconic {step}"), over_group=True, decoupled=decoupled)
            engine.submit(task)
            stream.launched.append(f"script {step}")
            if decoupled:
                engine.submit_second_half(task, last=True)
            engine.wait(task)
    finally:
        engine.stop()
    script = 1 if decoupled else 2
    for step in range(20):
        seen = [f"laconic {step}, round 0", f"laconic {step}, round 1"]
        seen.insert(script, f"script {step}")
        assert stream.launched[3 * step : 3 * step + 3] == seen


def test_an_operation_of_servers_is_left_to_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcessTransport, "waits_on_stream", lambda self, device: True)
    engine = Engine(InProcessCluster(1).transport(0), Stopwatch(WallClock(), DiscardEvents(), 0))
    issued_by: list[str] = []

    def start() -> Exchange:
        issued_by.append(threading.current_thread().name)
        yield DoneWork()

    try:
        for over_group in (False, True):
            engine.wait(engine.submit(Task("a bucket", start, over_group=over_group)))
    finally:
        engine.stop()
    assert issued_by == ["laconic-communication", threading.current_thread().name]


def test_after_an_error_on_a_stream_nothing_more_is_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcessTransport, "waits_on_stream", lambda self, device: True)
    engine = Engine(InProcessCluster(1).transport(0), Stopwatch(WallClock(), DiscardEvents(), 0))
    done: list[str] = []

    def broken() -> Exchange:
        yield DoneWork()
        raise ZeroDivisionError("a bug")

    def never() -> Exchange:
        raise AssertionError("issued after an error")
        yield

    try:
        for name, start in (("first", broken), ("second", never)):
            task = Task(name, start, over_group=True, on_done=lambda name=name: done.append(name))
            engine.submit(task)
            assert task.finished.is_set()
            with pytest.raises(ZeroDivisionError):
                engine.wait(task)
    finally:
        engine.stop()
    assert done == ["first", "second"]


def test_what_has_arrived_is_finished_while_nothing_new_comes() -> None:
    transport = InProcessCluster(1).transport(0)
    engine = Engine(transport, Stopwatch(WallClock(), DiscardEvents(), 0))
    try:
        task = engine.submit(Task("a bucket", lambda: one_round(_Later(0.05)), 1, last=False))
        assert task.finished.wait(5.0), "without another task after it"
        assert task.ended_s is not None
        assert 0.05 <= task.ended_s - task.submitted_s < 2.0
    finally:
        engine.stop()


def test_priority_learns_how_fast_the_link_is_from_its_own_exchanges() -> None:
    known: list[Timing] = []
    strategy = SimpleNamespace(scheduling=Priority(), plan=lambda *_, timing, **__: known.append(timing))
    job = SimpleNamespace(
        recovery=None,
        strategy=strategy,
        specs=dict,
        find_unused_parameters=None,
        step=0,
        engine=SimpleNamespace(call=lambda *_, **__: None),
        transport=SimpleNamespace(control_device=torch.device("cpu"), world_size=2),
    )
    planning = Planning(cast(Job, job))

    def exchange(submitted_s: float, ended_s: float | None, nbytes: int) -> Task:
        return Task("a bucket", lambda: one_round(_Later(0)), submitted_s=submitted_s, ended_s=ended_s, nbytes=nbytes)

    # One by itself, then three back to back, which share the link: 600 bytes in 6 s, 1 s of it start-up.
    planning.exchanged([exchange(0, 9, 10), exchange(20, 23, 200), exchange(21, 25, 200), exchange(21, 26, 200)])
    planning._agree_on_times((1.0, 0.5))
    assert known[-1].startup_s == 1.0
    assert known[-1].byte_s == pytest.approx(5 / 600)
    # Where the host does not see the end, what was measured by itself stays.
    other = Planning(cast(Job, job))
    other.exchanged([exchange(0, None, 10)])
    other._agree_on_times((1.0, 0.5))
    assert known[-1].byte_s == 0.5


def test_a_finished_exchange_is_no_failure_when_a_later_one_fails() -> None:
    """A unit that has arrived stays prepared although the view ends in the vote that follows it."""

    class Over(CommunicationError):
        pass

    def over() -> Exchange:
        raise Over("the view is over")
        yield

    engine = Engine(InProcessCluster(1).transport(0), Stopwatch(WallClock(), DiscardEvents(), 0), recoverable=(Over,))
    try:
        first = engine.submit(Task("a bucket", lambda: one_round(DoneWork())))
        second = engine.submit(Task("the vote", over))
        with pytest.raises(Over):
            engine.wait(second)
        engine.wait(first)
    finally:
        engine.stop()
