"""Simulated steps as events: they cover the time, tell whose they are, and can be shown as a run is."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from laconic.cluster import Cluster, Link
from laconic.core.event import Event
from laconic.report.perfetto import trace
from laconic.report.timeline import typical_steps
from laconic.simulator.simulation import Conditions, Simulation, simulate
from laconic.simulator.trace import events, rank_names
from laconic.strategy import PRESETS
from laconic.workload import CodecCost, Layer, TensorShape, Workload

CODEC = CodecCost(
    compressor="int8",
    encode_startup_s=1e-4,
    encode_byte_s=1e-10,
    decode_startup_s=2e-4,
    decode_byte_s=1e-10,
    source="Made up for tests.",
)
SMALL = Workload(
    name="small",
    batch=4,
    layers=tuple(
        Layer(
            name=f"l{number}",
            forward_s=0.002,
            backward_s=0.004,
            tensors=(TensorShape(name=f"l{number}.weight", shape=(1000, 500)),),
        )
        for number in range(4)
    ),
    source="Made up for tests.",
    codecs=(CODEC,),
)
FOUR = Cluster.uniform(4, Link(bandwidth_bps=1e9, delay_s=1e-4))
KINDS = {"turn", "iteration", "forward", "backward", "wait", "optimizer", "encode", "exchange", "decode"}


def simulated(strategy: str, **conditions: object) -> Simulation:
    return simulate(strategy, SMALL, FOUR, conditions=Conditions(**conditions))  # pyrefly: ignore


def by_rank(found: list[Event], *kinds: str) -> dict[int, list[Event]]:
    ranks: dict[int, list[Event]] = defaultdict(list)
    for event in found:
        if event.kind in kinds:
            ranks[event.rank].append(event)
    return ranks


def end_of(event: Event) -> float:
    return event.time_s + event.duration_s


@pytest.mark.parametrize("strategy", PRESETS)
def test_compute_and_waits_fill_every_step(strategy: str) -> None:
    found = events(simulated(strategy, slow={3: 2.0}, optimizer_s=0.001))
    assert {event.kind for event in found} <= KINDS
    assert [event.time_s for event in found] == sorted(event.time_s for event in found)
    for rank, iterations in by_rank(found, "iteration").items():
        doing = by_rank(found, "forward", "backward", "wait", "optimizer")[rank]
        for one, next_one in pairwise(sorted(doing, key=lambda event: (event.time_s, end_of(event)))):
            assert next_one.time_s == pytest.approx(end_of(one), abs=2e-9)
        assert sum(event.duration_s for event in doing) == pytest.approx(sum(step.duration_s for step in iterations))
        assert [step.step for step in iterations] == list(range(len(iterations)))


def test_each_class_computes_at_its_own_speed() -> None:
    found = simulated("ddp", slow={2: 3.0})
    assert rank_names(found) == {0: "3 ranks", 1: "1 rank, compute x 3"}
    for rank, factor in ((0, 1.0), (1, 3.0)):
        computed = [
            event.duration_s
            for event in by_rank(events(found), "forward", "backward")[rank]
            if event.step == 2  # any
        ]
        assert sum(computed) == pytest.approx(factor * SMALL.compute_s)


@pytest.mark.parametrize("strategy", ["ddp", "dear", "bytescheduler-ps", "bsp / all_reduce / int8 / wfbp", "downpour"])
def test_a_part_of_the_network_does_one_thing_at_a_time(strategy: str) -> None:
    for exchanges in by_rank(events(simulated(strategy)), "exchange").values():
        for where in {event.data["where"] for event in exchanges}:
            there = [event for event in exchanges if event.data["where"] == where]
            for one, next_one in pairwise(there):
                assert next_one.time_s >= one.time_s + float(one.data["busy_s"] or 0) - 1e-12


def test_an_exchange_lasts_until_what_waits_for_it_may_go_on() -> None:
    found = events(simulated("bsp-a2a"))
    (exchange,) = [event for event in found if event.kind == "exchange" and event.step == 3]
    (wait,) = [event for event in found if event.kind == "wait" and event.step == 3]
    assert end_of(exchange) == pytest.approx(end_of(wait))
    # 8 MB over a ring of 4 at 1 Gbit/s, and 6 steps of 2 x 0.1 ms of delay during which the link is free.
    assert exchange.data["busy_s"] == pytest.approx(2 * 3 / 4 * 8e6 * 8 / 1e9)
    assert exchange.duration_s - float(exchange.data["busy_s"] or 0) == pytest.approx(6 * 2e-4)
    assert exchange.data["wire_bytes"] == 8_000_000


def test_who_encodes_is_told_and_how_long_that_takes() -> None:
    found = events(simulated("bsp / all_reduce / int8 / sequential", slow={1: 2.0}))
    for kind in ("encode", "decode"):
        coded = {rank: [event.duration_s for event in coding] for rank, coding in by_rank(found, kind).items()}
        assert set(coded) == {0, 1}
        # The slower class has slower hands, too.
        assert coded[1] == pytest.approx([2 * seconds for seconds in coded[0]])
    assert coded[0][0] >= CODEC.decode_s(8e6)
    assert by_rank(found, "encode")[0][0].duration_s == pytest.approx(CODEC.encode_s(8e6))


@pytest.mark.parametrize("strategy", ["downpour", "ssp", "ssp(staleness=0) / parameter_server"])
def test_workers_without_a_barrier_have_exchanges_of_their_own(strategy: str) -> None:
    found = events(simulated(strategy, slow={0: 4.0}))
    times = {
        rank: {event.time_s for event in exchanges if event.data["where"] == "network"}
        for rank, exchanges in by_rank(found, "exchange").items()
    }
    assert set(times) == {0, 1}
    assert not times[0] & times[1], "what all share, one class uses at a time"
    # What a class sends leaves when its own gradients are there.
    for rank, exchanges in by_rank(found, "exchange").items():
        ready = {event.step: end_of(event) for event in by_rank(found, "backward")[rank]}
        assert all(event.time_s >= ready[event.step] - 1e-12 for event in exchanges)


def test_times_can_be_moved() -> None:
    found = simulated("ddp")
    plain, later = events(found), events(found, began_s=5.0)
    assert [event.time_s + 5.0 for event in plain] == [event.time_s for event in later]


def test_what_draws_runs_draws_simulations() -> None:
    found = simulated("ddp", slow={3: 2.0})
    records = json.loads(json.dumps(trace(events(found), rank_names(found)), allow_nan=False))["traceEvents"]
    processes = [record["args"]["name"] for record in records if record["name"] == "process_name"]
    threads = {record["args"]["name"] for record in records if record["name"] == "thread_name"}
    assert processes == ["3 ranks", "1 rank, compute x 2"]
    assert threads >= {"turns", "training", "exchanges, network"}
    (timeline,) = typical_steps(lambda: events(found))
    assert timeline.strategy == str(found.prediction.strategy)
    assert set(timeline.ranks) == {0, 1}
