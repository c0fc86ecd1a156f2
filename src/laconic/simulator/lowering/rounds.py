"""Exchanges of parameters or their changes after a step, which may outlast a step: local updates and gossip."""

from __future__ import annotations

from laconic.core.plan import Plan
from laconic.simulator.lowering.communication import BucketExchange, CommunicationThread
from laconic.simulator.lowering.phases import phases_of_all
from laconic.simulator.lowering.task_graph import TaskGraph, Which
from laconic.synchronization import Synchronization


class _Rounds:
    """Steps of one task each, and rounds between them."""

    def __init__(self, task_graph: TaskGraph, plans: list[Plan]) -> None:
        self._task_graph = task_graph
        self._plans = plans
        # Servers own buckets of all fragments.
        phases = iter(phases_of_all(task_graph.inputs, [bucket for plan in plans for bucket in plan.buckets]))
        self._phases = [[next(phases) for _ in plan.buckets] for plan in plans]
        self._thread = CommunicationThread(task_graph, range(len(task_graph.inputs.classes)))
        self._first = [sum(len(plan.buckets) for plan in plans[:part]) for part in range(len(plans))]

    def _compute(self, number: int) -> list[list[int]]:
        """Both passes of every class, after its last step."""
        task_graph, workload = self._task_graph, self._task_graph.inputs.workload
        ends: list[list[int]] = []
        for rank_class in range(len(task_graph.inputs.classes)):
            before = [task_graph.step_ends[-1][rank_class]] if task_graph.step_ends else []
            forward = task_graph.compute("forward", number, rank_class, workload.forward_s, before)
            ends.append([task_graph.compute("backward", number, rank_class, workload.backward_s, [forward])])
        return ends

    def _optimizer(self, number: int, after: list[list[int]], time_s: float) -> list[list[int]]:
        """The optimizer's step of every class, or the end of the step."""
        return [
            [self._task_graph.compute("optimizer", number, rank_class, time_s, tasks)]
            for rank_class, tasks in enumerate(after)
        ]

    def _end(self, ends: list[list[int]]) -> None:
        self._task_graph.step_ends.append([tasks[0] for tasks in ends])

    def _exchange(self, number: int, part: int, ready: list[list[int]]) -> list[list[int]]:
        """Exchange one fragment of the model; returns, for each class, the tasks that end with the result."""
        plan, found = self._plans[part], list[BucketExchange]()
        for index, (bucket, phases) in enumerate(zip(plan.buckets, self._phases[part], strict=True)):
            which = Which(number, self._first[part] + index, bucket)
            found.append(BucketExchange(which, phases, bucket.nbytes, plan.credit_bytes))
            self._thread.submit(found[-1], ready, last=index == len(plan.buckets) - 1)
        return [[task for exchange in found for task in exchange.done[rank_class]] for rank_class in range(len(ready))]


class LocalSteps(_Rounds):
    """Local updates: replicas make local steps and exchange their changes after some optimizer steps."""

    def __init__(self, task_graph: TaskGraph, plans: list[Plan], rule: Synchronization, first_step: int) -> None:
        super().__init__(task_graph, plans)
        self._rule = rule
        self._first_step = first_step
        self._open: dict[int, tuple[int, list[list[int]]]] = {}
        """For each fragment in flight, the step after which it is applied."""

    def step(self, number: int) -> None:
        """One step; then exchanges that end here are awaited, and those that are due begin."""
        rule, num_steps = self._rule, self._first_step + number + 1
        ends = self._optimizer(number, self._compute(number), self._task_graph.inputs.optimizer_s)
        due = [part for part, (when, _) in self._open.items() if when == num_steps]
        for part in due:
            ends = self._wait(number, ends, self._open.pop(part)[1])
        for part in rule.due(num_steps):
            done = self._exchange(number, part, ends)
            if rule.delay:
                self._open[part] = num_steps + rule.delay, done
            else:
                ends = self._wait(number, ends, done)
        self._end(ends)

    def _wait(self, number: int, ends: list[list[int]], done: list[list[int]]) -> list[list[int]]:
        return self._optimizer(number, [[*own, *tasks] for own, tasks in zip(ends, done, strict=True)], 0.0)


class GossipSteps(_Rounds):
    """Gossip: replicas mix parameters with neighbours while gradients are computed, or after that."""

    def __init__(self, task_graph: TaskGraph, plans: list[Plan], first_step: int) -> None:
        super().__init__(task_graph, plans)
        self._first_step = first_step
        self._overlapped = plans[0].launch == "ready"
        self._open: list[list[list[int]]] = []

    def step(self, number: int) -> None:
        """One step; the exchange launched after the previous step is awaited before the optimizer's step."""
        waits = self._compute(number)
        if not self._overlapped:
            self._start(number, self._first_step + number, waits)
        for done in self._open:
            waits = [[*own, *tasks] for own, tasks in zip(waits, done, strict=True)]
        self._open = []
        ends = self._optimizer(number, waits, self._task_graph.inputs.optimizer_s)
        self._end(ends)
        if self._overlapped:
            self._start(number, self._first_step + number + 1, ends)

    def _start(self, number: int, num_steps: int, ready: list[list[int]]) -> None:
        rule = self._task_graph.inputs.strategy.synchronization
        self._open += [self._exchange(number, part, ready) for part in rule.due(num_steps)]
