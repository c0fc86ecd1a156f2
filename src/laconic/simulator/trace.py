"""Simulated steps as events of the runtime's format, so that every view of a run also shows a simulation.

Ranks that do the same at the same time are simulated once and appear as one rank, the number of their class. The kinds
of events are those of the runtime: turn, iteration, forward, backward, wait, optimizer, encode, exchange, decode. An
exchange also has "where", the part of the network it uses, and "busy_s", how long no other exchange can use that part;
a bucket whose exchange has several stages has several events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from laconic.core.event import Event, Scalar
from laconic.simulator.simulation import Simulation

_SHORTEST_S = 1e-9
"""Shorter durations are invisible, and may be rounding."""


def events(simulation: Simulation, *, began_s: float = 0.0) -> list[Event]:
    """All events in order of time; `began_s` is added to all times."""
    found = [*_turns(simulation), *_iterations(simulation), *_tasks(simulation), *_waits(simulation)]
    shared: dict[str, Scalar] = {
        "strategy": simulation.prediction.strategy,
        "link": simulation.prediction.cluster,
        "simulated": True,
    }
    return sorted(
        (
            Event(
                event.kind, event.time_s + began_s, event.rank, event.step, event.duration_s, {**event.data, **shared}
            )
            for event in found
        ),
        # Of events that begin together, the longer one encloses the other.
        key=lambda event: (event.time_s, -event.duration_s),
    )


def rank_names(simulation: Simulation) -> dict[int, str]:
    """The ranks that each rank of the events represents."""
    classes = simulation.task_graph.inputs.classes
    names: dict[int, str] = {}
    for number, ranks in enumerate(classes):
        how_many = "1 rank" if ranks.size == 1 else f"{ranks.size} ranks"
        names[number] = how_many if ranks.slowdown == 1 else f"{how_many}, compute x {ranks.slowdown:g}"
    return names


def _turns(simulation: Simulation) -> Iterator[Event]:
    num_steps = len(simulation.task_graph.step_ends)
    for rank in range(len(simulation.task_graph.inputs.classes)):
        yield Event("turn", 0.0, rank, 0, simulation.outcome.makespan_s, {"num_steps": num_steps})


def _iterations(simulation: Simulation) -> Iterator[Event]:
    """From the end of one step to the end of the next, as a training loop would time it."""
    end_s = simulation.outcome.end_s
    for rank in range(len(simulation.task_graph.inputs.classes)):
        began_s = 0.0
        for step, ends in enumerate(simulation.task_graph.step_ends):
            ended_s = float(end_s[ends[rank]])
            yield Event("iteration", began_s, rank, step, ended_s - began_s)
            began_s = ended_s


def _tasks(simulation: Simulation) -> Iterator[Event]:
    task_graph, outcome = simulation.task_graph, simulation.outcome
    for task, ranks in enumerate(_ranks_of_tasks(simulation)):
        label = task_graph.labels[task]
        began_s, took_s = float(outcome.start_s[task]), float(outcome.end_s[task] - outcome.start_s[task])
        if label.kind in {"start-up", "latency"} or took_s < _SHORTEST_S:
            continue
        data: dict[str, Scalar] = {}
        if label.kind in {"encode", "decode", "exchange"}:
            data["bucket"] = label.of
        if label.kind == "exchange":
            data |= {"where": label.where, "wire_bytes": label.nbytes, "move": label.move, "busy_s": took_s}
            took_s += _latency_s(simulation, task)
        for rank in ranks:
            yield Event(label.kind, began_s, rank, label.step, took_s, data)


def _latency_s(simulation: Simulation, task: int) -> float:
    """The part of an exchange after its links are free again: the task after it."""
    labels, outcome = simulation.task_graph.labels, simulation.outcome
    if task + 1 == len(labels) or labels[task + 1].kind != "latency":
        return 0.0
    return float(outcome.end_s[task + 1] - outcome.start_s[task + 1])


def _waits(simulation: Simulation) -> Iterator[Event]:
    """Gaps between two compute tasks of a class."""
    task_graph, outcome = simulation.task_graph, simulation.outcome
    ended_s: dict[int, float] = {}
    tasks = np.array(task_graph.compute_tasks, dtype=np.int64)
    for task in tasks[np.argsort(outcome.start_s[tasks], kind="stable")].tolist():
        label = task_graph.labels[task]
        began_s = float(outcome.start_s[task])
        if (waited_s := began_s - ended_s.get(label.of, 0.0)) >= _SHORTEST_S:
            yield Event("wait", ended_s.get(label.of, 0.0), label.of, label.step, waited_s)
        ended_s[label.of] = max(float(outcome.end_s[task]), ended_s.get(label.of, 0.0))


def _ranks_of_tasks(simulation: Simulation) -> Iterator[Sequence[int]]:
    """The classes that take part in each task."""
    task_graph, graph = simulation.task_graph, simulation.graph
    strategy, everyone = task_graph.inputs.strategy, range(len(task_graph.inputs.classes))
    # Without a barrier, the steps of one class are added after those of another, exchanges included.
    alone = strategy.architecture.has_servers and not strategy.synchronization.barrier
    last = 0
    for task, label in enumerate(task_graph.labels):
        if label.kind in {"forward", "backward", "optimizer"}:
            last = label.of
            yield (last,)
        elif label.kind in {"encode", "decode"}:
            # The communication thread has the number of its class.
            yield (int(graph.resource_names[graph.resource[task]].rpartition(" ")[2]),)
        else:
            yield (last,) if alone else everyone
