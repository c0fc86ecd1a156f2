"""What a builder refuses, and that it says where; what a graph keeps."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from laconic.errors import LaconicError
from laconic.simulator.engine import GraphBuilder, run
from tests.simulator.engine.fabrics import Wires, switch


def two_tasks() -> GraphBuilder:
    builder = GraphBuilder()
    builder.resource("gpu")
    builder.timed(1.0)
    builder.timed(1.0)
    return builder


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda b: b.timed(-1.0), r"task 2: duration_s must be finite and not negative, got -1\.0"),
        (lambda b: b.timed(math.nan), r"task 2: duration_s .* got nan"),
        (lambda b: b.timed(math.inf), r"task 2: duration_s .* got inf"),
        (lambda b: b.timed(1.0, resource=1), r"task 2: there is no resource 1"),
        (lambda b: b.timed(1.0, resource=-2), r"task 2: there is no resource -2"),
        (lambda b: b.timed(1.0, priority=math.nan), r"task 2: priority must be a number"),
        (lambda b: b.timed(1.0, after=[0, 2]), r"task 2: it cannot come after task 2"),
        (lambda b: b.timed(1.0, after=[-1]), r"task 2: it cannot come after task -1"),
        (lambda b: b.transfer([0], [1], -5.0), r"task 2: nbytes must be finite and not negative, got -5\.0"),
        (lambda b: b.transfer([0, 1], [1, 0], [1.0, math.nan]), r"task 2: nbytes .* got nan"),
        (lambda b: b.transfer([0], [1, 2], 5.0), r"task 2: .* as many sources as destinations"),
        (lambda b: b.transfer([0, 1], [1, 2], [5.0]), r"task 2: .* got 2, 2 and 1"),
        (lambda b: b.transfer([0], [-1], 5.0), r"task 2: destinations must not be negative"),
        (lambda b: b.transfer([0.5], [1], 5.0), r"task 2: sources must be a sequence of device numbers"),
        (lambda b: b.transfer([0], [1], 5.0, latency_s=-1.0), r"task 2: latency_s"),
        (lambda b: b.transfer([0], [1], 5.0, after=[7]), r"task 2: it cannot come after task 7"),
        (lambda b: b.after(0, 2), r"after\(0, 2\): there is no task 2"),
        (lambda b: b.after(1, 1), r"a task cannot wait for itself"),
        (lambda b: b.resource("none", 0), r'resource "none": capacity must be at least 1, got 0'),
    ],
)
def test_what_is_refused_leaves_nothing_behind(wrong: Callable[[GraphBuilder], object], message: str) -> None:
    builder = two_tasks()
    with pytest.raises(LaconicError, match=message):
        wrong(builder)
    assert builder.num_tasks == 2
    assert run(builder.build()).end_s.tolist() == [1.0, 1.0]


def test_a_cycle_is_named() -> None:
    builder = GraphBuilder()
    before = builder.timed(1.0)
    one = builder.timed(1.0, after=[before])
    two = builder.timed(1.0, after=[one])
    three = builder.timed(1.0, after=[two])
    builder.timed(1.0, after=[three])
    builder.after(one, three)
    with pytest.raises(
        LaconicError, match=r"task \d waits for itself: (1 -> 3 -> 2 -> 1|3 -> 2 -> 1 -> 3|2 -> 1 -> 3)"
    ):
        run(builder.build())


def test_a_long_cycle_is_shortened() -> None:
    builder = GraphBuilder()
    tasks = [builder.timed(1.0)]
    for _ in range(99):
        tasks.append(builder.timed(1.0, after=[tasks[-1]]))
    builder.after(tasks[0], tasks[-1])
    with pytest.raises(LaconicError, match=r"\(92 more\)"):
        run(builder.build())


def test_transfers_need_a_fabric_with_their_devices_and_links_that_work() -> None:
    builder = GraphBuilder()
    builder.timed(1.0)
    builder.transfer([0], [2], 5.0)
    with pytest.raises(LaconicError, match=r"task 1 is a transfer.* give build\(\) a fabric"):
        builder.build()
    with pytest.raises(LaconicError, match="task 1 names device 2, but the fabric has devices 0 to 1"):
        builder.build(switch(2, 100.0))
    with pytest.raises(LaconicError, match=r'link 1 of the fabric \("wire 1"\) must carry more than 0'):
        builder.build(Wires([1.0, 0.0], {(0, 2): [0]}))


@pytest.mark.parametrize("given", [[1.0, -1.0], [1.0, math.nan], [1.0]])
def test_wrong_durations_are_refused(given: list[float]) -> None:
    with pytest.raises(LaconicError, match="durations_s"):
        run(two_tasks().build(), durations_s=np.array(given))


def test_durations_of_transfers_stay_as_they_are() -> None:
    builder = GraphBuilder()
    builder.transfer([0], [1], 100.0, latency_s=0.5)
    graph = builder.build(switch(2, 100.0))
    assert run(graph, durations_s=np.array([math.nan])).end_s.tolist() == [1.5]


def test_a_wrong_task_has_no_critical_path() -> None:
    outcome = run(two_tasks().build())
    with pytest.raises(LaconicError, match="task must be between 0 and 1, got 2"):
        outcome.critical_path(2)


def test_labels_are_kept() -> None:
    builder = GraphBuilder()
    builder.timed(1.0, label=7)
    builder.transfer([0], [1], 1.0, label=8)
    assert builder.build(switch(2, 1.0)).label.tolist() == [7, 8]


def test_equal_flow_sets_are_kept_once_and_equal_flows_merged() -> None:
    # Both devices 0 and 1 reach device 2 over the same two links: two of the four flows are alike, and one is empty.
    fabric = Wires([10.0, 20.0], {(0, 2): [0, 1], (1, 2): [0, 1]})
    builder = GraphBuilder()
    for _ in range(5):
        builder.transfer([0, 1, 0, 1], [2, 2, 2, 2], [5.0, 5.0, 7.0, 0.0])
    builder.transfer([0], [2], 5.0)
    graph = builder.build(fabric)
    assert graph.flow_set.tolist() == [0, 0, 0, 0, 0, 1]
    assert graph.flows.first.tolist() == [0, 2, 3]
    assert graph.flows.num_bytes.tolist() == [5.0, 7.0, 5.0]
    assert graph.flows.count.tolist() == [2, 1, 1]
    assert graph.flows.links.tolist() == [0, 1]
    assert run(graph).link_bytes.tolist() == [5 * 17.0 + 5.0] * 2
