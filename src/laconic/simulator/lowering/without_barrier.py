"""Workers that do not wait for each other: with servers that hold the parameters, or in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from laconic.core.exchange import Move
from laconic.core.plan import Plan
from laconic.simulator.lowering.communication import BucketExchange, CommunicationThread
from laconic.simulator.lowering.phases import Phase, phases_of_all
from laconic.simulator.lowering.task_graph import TaskGraph, Which
from laconic.synchronization import Synchronization


class AsyncServerSteps:
    """Each class pushes gradients, or changes after some steps, and pulls parameters.

    It waits for no other class, or only for those too far behind.

    Where the first gradients of a step are used, the classes of the fastest ranks wait for each other, and no class
    waits for those whose gradients are dropped. The server then answers when it has received the whole gradient, so all
    buckets are one exchange here.

    Steps are those of the steady state: the fastest are as many steps ahead as allowed.
    """

    def __init__(self, task_graph: TaskGraph, plan: Plan, rule: Synchronization, first_step: int) -> None:
        self._task_graph = task_graph
        self._rule = rule
        self._first_step = first_step
        self._lead = 0 if rule.takes_first else rule.lead
        self._buckets = plan.buckets
        self._phases = phases_of_all(task_graph.inputs, plan.buckets)
        if rule.takes_first:
            self._buckets, self._phases = plan.buckets[:1], [_at_once(self._phases)]
        classes = task_graph.inputs.classes
        self._waits = [not rule.takes_first or count > 0 for count in task_graph.inputs.counted]
        """For each class, whether it waits for others and others wait for it, if the rule has a bound."""
        alone = len(classes) > 1
        self._threads = [CommunicationThread(task_graph, [number], alone=alone) for number in range(len(classes))]
        slowest = max(ranks.slowdown for ranks in classes)
        self._ahead = [0 if ranks.slowdown == slowest else self._lead or 0 for ranks in classes]
        self._arrived: list[dict[int, list[list[int]]]] = []
        """For every step, class and bucket: the tasks after which servers have received it."""

    def step(self, number: int) -> None:
        """One step of every class, each at its own time."""
        task_graph, workload = self._task_graph, self._task_graph.inputs.workload
        self._arrived.append({})
        ends: dict[int, int] = {}
        for rank_class in reversed(range(len(self._threads))):  # slowest first, because others wait for them
            before = [task_graph.step_ends[-1][rank_class]] if task_graph.step_ends else []
            forward = task_graph.compute("forward", number, rank_class, workload.forward_s, before)
            backward = task_graph.compute("backward", number, rank_class, workload.backward_s, [forward])
            ready = backward
            if not self._rule.optimizer_on_servers:
                ready = task_graph.compute("optimizer", number, rank_class, task_graph.inputs.optimizer_s, [backward])
            ends[rank_class] = ready
            if self._rule.due(self._first_step + number + 1):
                done = self._exchange(number, rank_class, ready)
                ends[rank_class] = task_graph.compute("optimizer", number, rank_class, 0.0, done)
        task_graph.step_ends.append([ends[rank_class] for rank_class in range(len(self._threads))])

    def _exchange(self, number: int, rank_class: int, ready: int) -> list[int]:
        found: list[BucketExchange] = []
        for index, (bucket, phases) in enumerate(zip(self._buckets, self._phases, strict=True)):
            held_by = self._held_by(number, rank_class, index)
            found.append(BucketExchange(Which(number, index, bucket), phases, held_by=held_by))
            is_last = index == len(self._buckets) - 1
            self._threads[rank_class].submit(found[-1], [[ready]], last=is_last)
        self._arrived[number][rank_class] = [exchange.arrived for exchange in found]
        return [ready, *(task for exchange in found for task in exchange.done[0])]

    def _held_by(self, number: int, rank_class: int, bucket: int) -> list[int]:
        """The pushes of other classes that must arrive before a server answers: c - min_j(c_j) <= lead."""
        if self._lead is None or not self._waits[rank_class]:
            return []
        found: list[int] = []
        for other, ahead in enumerate(self._ahead):
            clock = number + self._ahead[rank_class] - self._lead - ahead
            if clock == number and other not in self._arrived[number]:
                clock -= 1  # within this lead, faster classes come first anyway
            if other != rank_class and self._waits[other] and clock >= 0:
                found += self._arrived[clock][other][bucket]
        return found


def _at_once(phases: Sequence[tuple[Phase, ...]]) -> tuple[Phase, ...]:
    """All buckets in one exchange: everything is sent before anything comes back."""
    whole = [phase for bucket in phases for phase in bucket]
    moves = [move for phase in whole for move in phase.moves]
    if not moves:
        return ()
    sizes = tuple(size for move in moves for size in move.sizes)
    move = replace(moves[0], sizes=sizes, answer_bytes=sum(move.answer_bytes for move in moves))
    return (
        Phase((move,), before_s=sum(phase.before_s for phase in whole), after_s=sum(phase.after_s for phase in whole)),
    )


class AsyncPairSteps:
    """Pairs average in the background: a step takes its compute time, and pairs average as often as they can."""

    def __init__(self, task_graph: TaskGraph, plan: Plan) -> None:
        self._task_graph = task_graph
        self._plan = plan
        self._free_s = 0.0

    def step(self, number: int) -> None:
        """One step of every class; an exchange begins after it if the previous one has ended by then."""
        task_graph, inputs = self._task_graph, self._task_graph.inputs
        ends: list[int] = []
        for rank_class in range(len(inputs.classes)):
            before = [task_graph.step_ends[-1][rank_class]] if task_graph.step_ends else []
            forward = task_graph.compute("forward", number, rank_class, inputs.workload.forward_s, before)
            backward = task_graph.compute("backward", number, rank_class, inputs.workload.backward_s, [forward])
            ends.append(task_graph.compute("optimizer", number, rank_class, inputs.optimizer_s, [backward]))
        task_graph.step_ends.append(ends)
        now_s = (number + 1) * inputs.classes[0].slowdown * (inputs.workload.compute_s + inputs.optimizer_s)
        if now_s >= self._free_s and inputs.exchanges():
            self._free_s = now_s + self._average(number, ends[0])

    def _average(self, number: int, after: int) -> float:
        """Add the messages of one average that a rank starts and of one that it answers; returns their duration."""
        inputs, took_s, last = self._task_graph.inputs, 0.0, [after]
        strategy = inputs.strategy
        for index, bucket in enumerate(self._plan.buckets):
            self._task_graph.next_in_order()
            nbytes = strategy.architecture.pairwise_bytes(bucket, strategy.compression, inputs.moment)
            move = Move("send", (nbytes,))
            last = self._task_graph.move(Which(number, index, bucket), move, last).ends
            took_s += inputs.seconds(move)
        self._task_graph.prices.complete = False  # the start of the next exchange depends on the duration of this one
        return took_s
