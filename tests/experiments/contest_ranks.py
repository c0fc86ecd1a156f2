"""What ranks do in the tests of contenders."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from laconic.compression.integer import Int8
from laconic.core.event import Event, EventSink, Scalar
from laconic.experiments.contender import Contender
from laconic.experiments.step_timer import StepTimer
from laconic.experiments.tasks import TaskConfig, make_task

CPU = torch.device("cpu")
COMPILING_S = 1.0
OUTLASTING_S = 0.5
TINY = TaskConfig(size="tiny", batch=1)


def rehearsed_and_not(strategies: list[str], steps: int) -> dict[str, list[list[Scalar]]]:
    """The losses of each strategy without and with a rehearsal."""
    dist.init_process_group("gloo")
    task = make_task(TINY)
    losses: dict[str, list[list[Scalar]]] = {}
    for strategy in strategies:
        for rehearses in (False, True):
            contender = Contender(0, strategy, task, CPU, link="unlimited")
            before, began_s = torch.get_rng_state(), 0.0
            if rehearses:
                contender.rehearse()
                began_s = time.perf_counter()
            assert torch.equal(torch.get_rng_state(), before)
            events = [*contender.turn(steps - 2), *contender.turn(2)]
            contender.finish()
            iterations = [event for event in events if event.kind == "iteration"]
            assert [event.step for event in iterations] == list(range(steps))
            recorded = [event for event in events if event.kind != "attach"]
            assert all(event.time_s >= began_s for event in recorded), "nothing of the rehearsal"
            losses.setdefault(strategy, []).append([event.data["loss"] for event in iterations])
    dist.destroy_process_group()
    return losses


def compiling(rehearses: bool) -> list[float]:
    """How long each of three steps takes where the first exchange of a compressor takes COMPILING_S longer."""
    int8: Any = Int8
    exchange: Callable[..., Any] = int8.exchange
    compiled: list[bool] = []

    def slow_at_first(*arguments: Any) -> Any:
        if not compiled:
            compiled.append(True)
            time.sleep(COMPILING_S)
        return exchange(*arguments)

    int8.exchange = slow_at_first
    dist.init_process_group("gloo")
    contender = Contender(0, "bsp / all_reduce / int8 / fusion", make_task(TINY), CPU, link="unlimited")
    if rehearses:
        contender.rehearse()
    events = contender.turn(3)
    assert compiled
    contender.finish()
    dist.destroy_process_group()
    return [event.duration_s for event in events if event.kind == "iteration"]


def outlasting() -> list[list[float]]:
    """How long steps take in turns of one and of three steps, where an exchange that nothing waits for takes longer."""
    int8: Any = Int8
    exchange: Callable[..., Any] = int8.exchange

    def slow(*arguments: Any) -> Any:
        time.sleep(OUTLASTING_S)
        return exchange(*arguments)

    int8.exchange = slow
    dist.init_process_group("gloo")
    contender = Contender(0, "delayed / all_reduce / int8 / sequential", make_task(TINY), CPU, link="unlimited")
    contender.rehearse()
    turns = [contender.turn(1), contender.turn(3)]
    contender.finish()
    dist.destroy_process_group()
    return [[event.duration_s for event in events if event.kind == "iteration"] for events in turns]


class FakeDevice(StepTimer):
    """A device that is one second behind at every mark, and tells the times only when somebody waits for it."""

    STEP_S = 0.5

    def __init__(self, device: torch.device, events: EventSink, rank: int) -> None:
        self.runs_behind = True
        self.waits = 0
        self._events = events
        self._rank = rank
        self._marks = count()
        self._notes: list[tuple[str, int, float, float, dict[str, Scalar]]] = []

    def mark(self) -> float:
        return time.perf_counter() + self.STEP_S * next(self._marks)

    def note(self, kind: str, step: int, began: Any, ended: Any, **data: Scalar) -> None:
        self._notes.append((kind, step, began, ended, data))

    def settle(self) -> None:
        self.waits += 1
        for kind, step, began, ended, data in self._notes:
            self._events.write(Event(kind, began, self._rank, step, ended - began, data))
        self._notes.clear()


def behind_the_host() -> dict[str, Any]:
    """A turn on a device that runs behind."""
    dist.init_process_group("gloo")
    timers: list[FakeDevice] = []

    def timer(device: torch.device, events: EventSink, rank: int) -> FakeDevice:
        timers.append(FakeDevice(device, events, rank))
        return timers[0]

    contender = Contender(0, "ddp", make_task(TINY), CPU, link="unlimited", timer=timer)
    contender.rehearse()
    waits = timers[0].waits
    began_s = time.perf_counter()
    events = contender.turn(4)
    took_s = time.perf_counter() - began_s
    contender.finish()
    dist.destroy_process_group()
    (turn,) = [event for event in events if event.kind == "turn"]
    return {
        "durations_s": {
            kind: [event.duration_s for event in events if event.kind == kind]
            for kind in ("alone", "forward", "backward", "optimizer", "iteration")
        },
        "losses": [event.data["loss"] for event in events if event.kind == "iteration"],
        "wall_s": turn.data["wall_s"],
        "seconds": contender.seconds,
        "took_s": took_s,
        "waits": timers[0].waits - waits,
    }
