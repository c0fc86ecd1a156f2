"""Timed tasks: who comes when, and what it waited for."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.simulator.engine import Graph, GraphBuilder, Outcome, run
from tests.simulator.engine.reference import Task, list_schedule


@st.composite
def task_graphs(draw: st.DrawFn) -> tuple[list[Task], list[int]]:
    """Up to 40 tasks; eighths of a second, so that many things happen at the same time and sums are exact."""
    capacity = draw(st.lists(st.integers(1, 3), max_size=3))
    tasks: list[Task] = []
    for number in range(draw(st.integers(0, 40))):
        after = draw(st.lists(st.integers(0, number - 1), max_size=3, unique=True)) if number else []
        tasks.append(
            Task(
                duration_s=draw(st.integers(0, 12)) / 8,
                resource=draw(st.integers(-1, len(capacity) - 1)),
                priority=float(draw(st.integers(-2, 2))),
                after=tuple(after),
            )
        )
    return tasks, capacity


def graph_of(tasks: list[Task], capacity: list[int]) -> Graph:
    builder = GraphBuilder()
    for number, size in enumerate(capacity):
        builder.resource(f"resource {number}", size)
    for task in tasks:
        builder.timed(task.duration_s, resource=task.resource, priority=task.priority, after=task.after)
    return builder.build()


def same(one: Outcome, two: Outcome) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(two, name))
        for name in ("start_s", "end_s", "waited_for", "busy_s", "link_bytes")
    )


def test_nothing_to_do() -> None:
    outcome = run(GraphBuilder().build())
    assert outcome.makespan_s == 0.0
    assert outcome.critical_path() == []


def test_by_hand() -> None:
    builder = GraphBuilder()
    gpu = builder.resource("gpu")
    link = builder.resource("link")
    back = [builder.timed(d, resource=gpu) for d in (3.0, 1.0, 2.0)]
    sent = [builder.timed(4.0, resource=link, after=[task]) for task in back]
    step = builder.timed(0.5, resource=gpu, after=sent)
    graph = builder.build()
    outcome = run(graph)
    assert graph.resource_names == ("gpu", "link")
    assert graph.num_tasks == 7
    assert outcome.start_s.tolist() == [0, 3, 4, 3, 7, 11, 15]
    assert outcome.end_s.tolist() == [3, 4, 6, 7, 11, 15, 15.5]
    assert outcome.waited_for.tolist() == [-1, 0, 1, 0, 3, 4, 5]
    assert outcome.busy_s.tolist() == [6.5, 12.0]
    assert outcome.critical_path() == [0, 3, 4, 5, step]
    assert outcome.critical_path(2) == [0, 1, 2]
    assert outcome.makespan_s == 15.5


def test_the_lowest_priority_goes_first_and_nobody_is_interrupted() -> None:
    builder = GraphBuilder()
    link = builder.resource("link")
    long = builder.timed(5.0, resource=link, priority=9.0)
    trigger = builder.timed(1.0)
    late = [builder.timed(1.0, resource=link, priority=p, after=[trigger]) for p in (2.0, 1.0, 2.0, -1.0)]
    outcome = run(builder.build())
    assert outcome.start_s[long] == 0.0
    assert outcome.start_s[late].tolist() == [7.0, 6.0, 8.0, 5.0]
    assert outcome.waited_for[late].tolist() == [late[1], late[3], late[0], long]


def test_what_gets_ready_at_the_same_time_is_looked_at_together() -> None:
    # The first of two equal predecessors must not let its successor slip past one of a lower priority; nor must a
    # barrier, which takes no time.
    builder = GraphBuilder()
    link = builder.resource("link")
    one, two = builder.timed(0.1 + 0.2), builder.timed(0.3)  # equal but for rounding
    slow = builder.timed(1.0, resource=link, priority=1.0, after=[two])
    barrier = builder.timed(0.0, after=[one, two])
    fast = builder.timed(1.0, resource=link, priority=0.0, after=[barrier])
    outcome = run(builder.build())
    assert outcome.start_s[fast] == pytest.approx(0.3)
    assert outcome.start_s[slow] == pytest.approx(1.3)


def test_a_resource_of_two_takes_two_at_a_time() -> None:
    builder = GraphBuilder()
    cores = builder.resource("cores", capacity=2)
    for duration in (3.0, 1.0, 1.0, 1.0, 1.0):
        builder.timed(duration, resource=cores)
    outcome = run(builder.build())
    assert outcome.start_s.tolist() == [0.0, 0.0, 1.0, 2.0, 3.0]
    assert outcome.busy_s.tolist() == [7.0]
    assert outcome.waited_for.tolist()[:4] == [-1, -1, 1, 2]


def test_a_dependency_may_be_added_later_and_point_forward() -> None:
    builder = GraphBuilder()
    first = builder.timed(1.0)
    second = builder.timed(2.0)
    builder.after(first, second)
    outcome = run(builder.build())
    assert outcome.start_s.tolist() == [2.0, 0.0]
    assert outcome.critical_path() == [second, first]


def test_other_durations_without_building_again() -> None:
    builder = GraphBuilder()
    one = builder.timed(1.0)
    builder.timed(2.0, after=[one])
    graph = builder.build()
    assert run(graph, durations_s=np.array([4.0, 0.25])).end_s.tolist() == [4.0, 4.25]
    assert run(graph).end_s.tolist() == [1.0, 3.0]


@pytest.mark.slow
@settings(max_examples=200)
@given(task_graphs())
def test_as_a_plain_list_scheduler(case: tuple[list[Task], list[int]]) -> None:
    tasks, capacity = case
    outcome = run(graph_of(tasks, capacity))
    start_s, end_s = list_schedule(tasks, capacity)
    assert outcome.start_s.tolist() == start_s
    assert outcome.end_s.tolist() == end_s
    for where in range(len(capacity)):
        assert outcome.busy_s[where] == sum(task.duration_s for task in tasks if task.resource == where)


@given(task_graphs())
def test_what_held_a_task_up_adds_up(case: tuple[list[Task], list[int]]) -> None:
    tasks, capacity = case
    outcome = run(graph_of(tasks, capacity))
    for task in range(len(tasks)):
        path = outcome.critical_path(task)
        assert path[-1] == task
        assert outcome.start_s[path[0]] == 0.0
        assert outcome.waited_for[path[0]] == -1
        assert sum(tasks[part].duration_s for part in path) == outcome.end_s[task]
        for earlier, later in pairwise(path):
            assert outcome.end_s[earlier] == outcome.start_s[later]
            shared = tasks[earlier].resource == tasks[later].resource >= 0
            assert earlier in tasks[later].after or shared


@given(task_graphs())
def test_twice_the_same(case: tuple[list[Task], list[int]]) -> None:
    graph = graph_of(*case)
    assert same(run(graph), run(graph))


WITHOUT_NUMBA = """
import sys, warnings
if sys.argv[1] == "without":
    sys.modules["numba"] = None
from laconic.simulator.engine import GraphBuilder, add_collective, run
from laconic.collectives.ring import ring
from tests.simulator.engine.fabrics import racks
assert sys.argv[1] == "without" or "numba" not in sys.modules, "only when something runs"
builder = GraphBuilder()
gpu = builder.resource("gpu")
for number in range(3):
    before = builder.timed(0.25 * number, resource=gpu, priority=-number)
    add_collective(builder, ring(6), 1000 * (number + 1), after=[before])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    outcome = run(builder.build(racks(2, 3, 100.0, 50.0)))
print(sys.argv[1], [str(one.category.__name__) for one in caught])
print([*outcome.start_s.tolist(), *outcome.end_s.tolist(), *outcome.waited_for.tolist()])
"""


@pytest.mark.slow
def test_without_numba_it_gives_the_same_numbers_and_says_that_it_is_slow() -> None:
    outputs = {}
    for choice in ("with", "without"):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_NUMBA, choice], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        outputs[choice] = done.stdout.splitlines()
    assert outputs["with"][0] == "with []"
    assert outputs["without"][0] == "without ['LaconicWarning']"
    assert outputs["with"][1] == outputs["without"][1]
