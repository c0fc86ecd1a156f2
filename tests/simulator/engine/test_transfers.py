"""Flows that share links: by hand, and against a slow simulation in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.simulator.engine import GraphBuilder, run
from tests.simulator.engine.fabrics import Wires, racks, switch
from tests.simulator.engine.reference import Flow, Task, list_schedule


def test_one_transfer_takes_bytes_over_bandwidth_plus_latency_and_delay() -> None:
    builder = GraphBuilder()
    builder.transfer([0], [1], [1000.0], latency_s=0.5)
    outcome = run(builder.build(switch(2, 100.0, delay_s=0.125)))
    assert outcome.end_s.tolist() == [10.0 + 0.5 + 2 * 0.125]
    assert outcome.link_bytes.tolist() == [1000.0, 0.0, 0.0, 1000.0]


def test_two_jobs_share_a_link_and_the_longer_one_speeds_up() -> None:
    # Both get 50 B/s until the small one is done at 4 s; then 300 bytes are left at 100 B/s.
    fabric = Wires([100.0], {(0, 1): [0], (2, 3): [0]})
    builder = GraphBuilder()
    small = builder.transfer([0], [1], 200)
    large = builder.transfer([2], [3], 500)
    following = builder.timed(1.0, after=[small])
    outcome = run(builder.build(fabric))
    assert outcome.end_s[[small, large, following]].tolist() == pytest.approx([4.0, 7.0, 5.0])
    assert outcome.link_bytes.tolist() == [700.0]


def test_a_job_that_comes_later_slows_the_first_down_from_then_on() -> None:
    # 100 bytes until 1 s, then 50 B/s: 400 left take until 9 s at half speed; 600 bytes of the other are over at 11 s.
    fabric = Wires([100.0], {(0, 1): [0], (2, 3): [0]})
    builder = GraphBuilder()
    first = builder.transfer([0], [1], 500)
    wait = builder.timed(1.0)
    second = builder.transfer([2], [3], 600, after=[wait])
    outcome = run(builder.build(fabric))
    assert outcome.end_s[[first, second]].tolist() == pytest.approx([9.0, 11.0])
    assert outcome.critical_path() == [wait, second]


def test_flows_of_one_task_end_one_by_one_and_leave_their_share_to_the_rest() -> None:
    # Three flows into one device at 30 B/s: 10 each. At 1 s the first is done, 15 each; at 3 s the second.
    fabric = Wires([30.0], {(0, 3): [0], (1, 3): [0], (2, 3): [0]})
    builder = GraphBuilder()
    builder.transfer([0, 1, 2], [3, 3, 3], [10, 40, 100])
    outcome = run(builder.build(fabric))
    assert outcome.makespan_s == pytest.approx(1.0 + 30 / 15 + (100 - 10 - 30) / 30)


def test_flows_on_one_route_are_told_apart() -> None:
    # The same two devices, three sizes, two tasks: shares of 25, 25 and twice 25 until the small ones are done.
    fabric = Wires([100.0], {(0, 1): [0]})
    builder = GraphBuilder()
    two_kinds = builder.transfer([0, 0, 0], [1, 1, 1], [100, 100, 300])
    other = builder.transfer([0], [1], [200])
    outcome = run(builder.build(fabric))
    # 4 s: both of 100 done. Left: 200 and 100 at 50 each: 2 s; then 100 left alone: 1 s.
    assert outcome.end_s[[two_kinds, other]].tolist() == pytest.approx([7.0, 6.0])


@pytest.mark.parametrize("empty", [{"nbytes": 0}, {"destinations": [0, 1]}])
def test_flows_of_nothing_or_to_themselves_take_no_bandwidth(empty: dict) -> None:
    builder = GraphBuilder()
    full = {"sources": [0, 1], "destinations": [1, 0], "nbytes": 100}
    nothing = builder.transfer(**(full | empty), latency_s=0.25)
    real = builder.transfer([0, 1], [1, 0], 100)
    outcome = run(builder.build(switch(2, 100.0)))
    assert outcome.end_s[nothing] == 0.25
    assert outcome.end_s[real] == 1.0


def test_a_message_without_bytes_still_travels_and_no_flows_end_at_once() -> None:
    builder = GraphBuilder()
    signal = builder.transfer([0], [1], 0, latency_s=1.0)
    none = builder.transfer([], [], [], latency_s=1.0)
    outcome = run(builder.build(switch(2, 100.0, delay_s=0.25)))
    assert outcome.end_s[[signal, none]].tolist() == [1.5, 1.0]


def test_links_without_limit_are_not_shared_but_counted() -> None:
    fabric = Wires([np.inf, 50.0], {(0, 1): [0, 1], (1, 0): [0]})
    builder = GraphBuilder()
    builder.transfer([0, 1], [1, 0], 100)
    outcome = run(builder.build(fabric))
    assert outcome.makespan_s == 2.0
    assert outcome.link_bytes.tolist() == [200.0, 100.0]


def test_a_transfer_holds_its_resource_until_it_ends() -> None:
    builder = GraphBuilder()
    wire = builder.resource("wire")
    late = builder.transfer([0], [1], 100, resource=wire, priority=1.0, latency_s=0.5)
    early = builder.transfer([0], [1], 100, resource=wire, priority=0.0, latency_s=0.5)
    outcome = run(builder.build(switch(2, 100.0)))
    assert outcome.end_s[[early, late]].tolist() == [1.5, 3.0]
    assert outcome.busy_s.tolist() == [3.0]
    assert outcome.waited_for.tolist() == [early, -1]


@pytest.mark.parametrize("joins_after_s", [0.0, 0.5, 1.0, 2.0, 2.5, 3.999, 4.0, 4.5, 20.0])
def test_a_transfer_that_was_seen_before_may_be_joined_at_any_time(joins_after_s: float) -> None:
    # Flows of 100, 200 and 400 bytes into one device; the second time round another job comes along.
    sizes = [100.0, 200.0, 400.0]
    fabric = racks(2, 3, 175.0, 175.0)
    routes = [(0, 12, 15, 9), (1, 12, 15, 9), (2, 12, 15, 9)]
    builder, tasks = GraphBuilder(), []
    for number in range(3):
        after = [] if number == 0 else [number - 1]
        builder.transfer([0, 1, 2], [3, 3, 3], sizes, latency_s=0.25, after=after)
        flows = [Flow(route, size) for route, size in zip(routes, sizes, strict=True)]
        tasks.append(Task(0.25, after=tuple(after), flows=flows))
    builder.timed(joins_after_s, after=[0])
    tasks.append(Task(joins_after_s, after=(0,)))
    builder.transfer([1], [4], 300.0, after=[3])
    tasks.append(Task(0.0, after=(3,), flows=[Flow((1, 12, 15, 10), 300.0)]))
    outcome = run(builder.build(fabric))
    start_s, end_s = list_schedule(tasks, [], fabric.capacity_bytes_per_s.tolist())
    np.testing.assert_allclose(outcome.start_s, start_s, rtol=1e-9)
    np.testing.assert_allclose(outcome.end_s, end_s, rtol=1e-9)


@pytest.mark.slow
def test_many_transfers_that_come_and_go() -> None:
    # Over four racks with one slow uplink: most flows do not notice when another one begins or ends.
    generator = np.random.default_rng(0)
    fabric = racks(4, 4, 10.0, 25.0)
    fabric.capacity_bytes_per_s[32] = 5.0
    builder, tasks = GraphBuilder(), []
    for number in range(60):
        begins_s, size = generator.integers(0, 200) / 8, float(generator.integers(1, 100))
        pair = generator.integers(0, 16, (2, 3))
        builder.timed(begins_s)
        tasks.append(Task(begins_s))
        builder.transfer(*pair, size, after=[2 * number])
        first, links = fabric.routes(*pair)
        flows = [Flow(tuple(crossed.tolist()), size) for crossed in np.split(links, first[1:-1])]
        tasks.append(Task(0.0, after=(2 * number,), flows=flows))
    outcome = run(builder.build(fabric))
    _, end_s = list_schedule(tasks, [], fabric.capacity_bytes_per_s.tolist())
    np.testing.assert_allclose(outcome.end_s, end_s, rtol=1e-9)


@st.composite
def traffic(draw: st.DrawFn) -> tuple[list[Task], list[int], list[list[tuple[int, int, float]]]]:
    """Timed tasks and transfers between six devices in two racks, some of them several times the same."""
    capacity = draw(st.lists(st.integers(1, 2), max_size=2))
    flow = st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from([0.0, 10.0, 20.0, 25.0, 60.0]))
    sets = draw(st.lists(st.lists(flow, min_size=1, max_size=5), min_size=1, max_size=3))
    tasks: list[Task] = []
    chosen: list[list[tuple[int, int, float]]] = []
    for number in range(draw(st.integers(1, 12))):
        after = draw(st.lists(st.integers(0, number - 1), max_size=2, unique=True)) if number else []
        chosen.append(draw(st.sampled_from([[], *sets])))
        tasks.append(
            Task(
                duration_s=draw(st.integers(0, 8)) / 8,
                resource=draw(st.integers(-1, len(capacity) - 1)),
                priority=float(draw(st.integers(0, 2))),
                after=tuple(after),
            )
        )
    return tasks, capacity, chosen


@pytest.mark.slow
@settings(max_examples=200)
@given(traffic())
def test_as_a_plain_simulation(case: tuple[list[Task], list[int], list[list[tuple[int, int, float]]]]) -> None:
    tasks, capacity, chosen = case
    fabric = racks(2, 3, 10.0, 15.0)
    builder = GraphBuilder()
    for number, size in enumerate(capacity):
        builder.resource(str(number), size)
    load = np.zeros(len(fabric.capacity_bytes_per_s))
    for task, flows in zip(tasks, chosen, strict=True):
        common = {"resource": task.resource, "priority": task.priority, "after": task.after}
        if not flows:
            builder.timed(task.duration_s, **common)
            continue
        sources, destinations, sizes = zip(*flows, strict=True)
        builder.transfer(sources, destinations, sizes, latency_s=task.duration_s, **common)
        first, links = fabric.routes(np.array(sources), np.array(destinations))
        for place, size in enumerate(sizes):
            crossed = tuple(links[first[place] : first[place + 1]].tolist())
            task.flows.append(Flow(crossed, size))
            load[list(crossed)] += size
    outcome = run(builder.build(fabric))
    start_s, end_s = list_schedule(tasks, capacity, fabric.capacity_bytes_per_s.tolist())
    np.testing.assert_allclose(outcome.start_s, start_s, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(outcome.end_s, end_s, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(outcome.link_bytes, load)
    path = outcome.critical_path()
    assert outcome.start_s[path[0]] == 0.0
    assert outcome.end_s[path[-1]] == outcome.makespan_s
    np.testing.assert_allclose(outcome.end_s[path[:-1]], outcome.start_s[path[1:]], rtol=1e-9)
