"""The order in which exchanges are issued is that of the runtime's own communication thread."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.core.clock import WallClock
from laconic.core.event import DiscardEvents
from laconic.core.exchange import Exchange, Move
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.core.transport import DoneWork
from laconic.runtime.engine import Engine, Task
from laconic.runtime.stopwatch import Stopwatch
from laconic.simulator.engine import run
from laconic.simulator.lowering.communication import BucketExchange, CommunicationThread
from laconic.simulator.lowering.phases import Phase
from laconic.simulator.lowering.task_graph import Inputs, RankClass, TaskGraph, Which
from laconic.strategy import Strategy
from tests.simulator.jobs import Line, job


@dataclass(frozen=True)
class Asked:
    """One exchange: its rounds, and how much it is."""

    rounds: int
    nbytes: int


steps = st.lists(st.lists(st.builds(Asked, st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=14), max_size=3)
credits_bytes = st.sampled_from([0, 0, 5, 12, 1000])


def issued_by_the_runtime(asked: list[list[Asked]], credit_bytes: int, *, decoupled: bool) -> list[tuple[int, int]]:
    """(number of the exchange, round) in the order in which the communication thread issues them."""
    log: list[tuple[int, int]] = []

    def exchange(number: int, rounds: int) -> Exchange:
        for phase in range(rounds):
            log.append((number, phase))
            yield DoneWork()

    def rank(transport: InProcessTransport) -> None:
        engine = Engine(transport, Stopwatch(WallClock(), DiscardEvents(), 0))
        number = 0
        for step in asked:
            tasks: list[Task] = []
            for place, one in enumerate(step):
                tasks.append(
                    Task(
                        f"exchange {number}",
                        lambda number=number, rounds=one.rounds: exchange(number, rounds),
                        None if decoupled else one.rounds,
                        last=place == len(step) - 1 and not decoupled,
                        nbytes=one.nbytes,
                        credit_bytes=credit_bytes,
                        decoupled=decoupled,
                    )
                )
                engine.submit(tasks[-1])
                number += 1
            if decoupled:
                for task in reversed(tasks):
                    engine.submit_second_half(task, last=task is tasks[0])
            for task in tasks:
                engine.wait(task)
        engine.stop()

    InProcessCluster(1).run(rank)
    return log


def issued_by_the_simulator(asked: list[list[Asked]], credit_bytes: int, *, decoupled: bool) -> list[tuple[int, int]]:
    task_graph = TaskGraph(
        Inputs(
            strategy=Strategy(),
            workload=job((0, 0, 4)),
            world_size=2,
            network=Line(),
            classes=(RankClass(2),),
            codec=None,
        )
    )
    thread = CommunicationThread(task_graph, [0])
    number = 0
    for step in asked:
        exchanges: list[BucketExchange] = []
        for place, one in enumerate(step):
            which = Which(0, number, Bucket((TensorSpec("w", (1,)),)))
            phases = [Phase((Move("sum", (8,), algorithm=str(phase)),)) for phase in range(one.rounds)]
            exchanges.append(BucketExchange(which, phases, one.nbytes, credit_bytes, decoupled))
            thread.submit(exchanges[-1], [[]], last=place == len(step) - 1 and not decoupled)
            number += 1
        if decoupled:
            for exchange in reversed(exchanges):
                thread.submit_second_half(exchange, last=exchange is exchanges[0])
        assert all(exchange.done for exchange in exchanges), "nothing is left over"
    outcome = run(task_graph.builder.build())
    moved = [task for task, label in enumerate(task_graph.labels) if label.kind == "exchange"]
    assert all(outcome.end_s[a] <= outcome.start_s[b] + 1e-18 for a, b in pairwise(moved))
    return [(task_graph.labels[task].of, int(task_graph.labels[task].move.split()[1])) for task in moved]


@settings(max_examples=60)
@given(asked=steps, credit_bytes=credits_bytes)
def test_exchanges_are_issued_in_the_order_of_the_runtime(asked: list[list[Asked]], credit_bytes: int) -> None:
    with torch.no_grad():
        expected = issued_by_the_runtime(asked, credit_bytes, decoupled=False)
    assert issued_by_the_simulator(asked, credit_bytes, decoupled=False) == expected


@settings(max_examples=40)
@given(asked=steps, credit_bytes=credits_bytes)
def test_second_halves_are_issued_in_the_order_of_the_runtime(asked: list[list[Asked]], credit_bytes: int) -> None:
    two = [[Asked(2, one.nbytes) for one in step] for step in asked]
    assert issued_by_the_simulator(two, credit_bytes, decoupled=True) == issued_by_the_runtime(
        two, credit_bytes, decoupled=True
    )


def test_a_round_that_is_not_the_last_waits_until_the_last_exchange_has_come() -> None:
    """As in the runtime: with few buckets second rounds do not begin before the backward pass has ended."""
    two_rounds = [[Asked(2, 1)] * 3]
    assert issued_by_the_simulator(two_rounds, 0, decoupled=False) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    many = issued_by_the_simulator([[Asked(2, 1)] * 10], 0, decoupled=False)
    assert many[:17] == [*((number, 0) for number in range(8)), *((number, 1) for number in range(8)), (8, 0)]
