"""Rounds that exchange something of the parameters after a step, and may last longer than one: two seams."""

from __future__ import annotations

from laconic.core.plan import Plan
from laconic.simulator.lowering.drawing import Drawing, Submission, Which
from laconic.synchronization import LocalUpdates


class _Rounds:
    """Steps of one task each, and rounds between them."""

    def __init__(self, drawing: Drawing, plans: list[Plan]) -> None:
        self._drawing = drawing
        self._plans = plans
        self._submission = Submission(plans[0])
        layers = drawing.inputs.workload.layers
        self._forward_s = sum(layer.forward_s for layer in layers)
        self._backward_s = sum(layer.backward_s for layer in layers)
        self._first = [sum(len(plan.buckets) for plan in plans[:part]) for part in range(len(plans))]

    def _compute(self, number: int, after: list[list[int]]) -> list[int]:
        """Both passes of every class."""
        ends: list[int] = []
        for rank_class, tasks in enumerate(after):
            forward = self._drawing.compute("forward", number, rank_class, self._forward_s, tasks)
            ends.append(self._drawing.compute("backward", number, rank_class, self._backward_s, [forward]))
        return ends

    def _optimizer(self, number: int, after: list[list[int]]) -> list[int]:
        time_s = self._drawing.inputs.optimizer_s
        return [
            self._drawing.compute("optimizer", number, rank_class, time_s, tasks)
            for rank_class, tasks in enumerate(after)
        ]

    def _before(self) -> list[list[int]]:
        ends = self._drawing.step_ends
        return [[task] for task in ends[-1]] if ends else [[] for _ in self._drawing.inputs.classes]

    def _exchange(self, number: int, part: int, ready: list[int]) -> list[list[int]]:
        """Exchange one part of the model; gives for each class what ends with the outcome being there."""
        drawing = self._drawing
        done: list[list[int]] = [[] for _ in ready]
        for index, bucket in enumerate(self._plans[part].buckets):
            which = Which(number, self._first[part] + index, bucket)
            ends = drawing.encode(which, [[task] for task in ready], self._submission.room())
            for move in drawing.inputs.moves(bucket):
                ends = drawing.move(which, move, ends)
            decoded = drawing.decode(which, ends)
            self._submission.opened(bucket.nbytes, [task for tasks in decoded for task in tasks])
            for rank_class, tasks in enumerate(decoded):
                done[rank_class] += tasks
        return done


class LocalSteps(_Rounds):
    """Replicas that train alone and now and then exchange how far they have come, after the optimizer's step."""

    def __init__(self, drawing: Drawing, plans: list[Plan], rule: LocalUpdates, first_step: int) -> None:
        super().__init__(drawing, plans)
        self._rule = rule
        self._first_step = first_step
        self._ends: dict[int, tuple[int, list[list[int]]]] = {}

    def step(self, number: int) -> None:
        """One step; what has been under way long enough is waited for at its end."""
        drawing, rule = self._drawing, self._rule
        ends = self._optimizer(number, [[task] for task in self._compute(number, self._before())])
        num_steps = self._first_step + number + 1
        waits: list[list[int]] = [[] for _ in ends]
        for part, (due, done) in list(self._ends.items()):
            if due == num_steps:
                del self._ends[part]
                _extend(waits, done)
        for part in rule.due(num_steps):
            done = self._exchange(number, part, ends)
            if rule.delay:
                self._ends[part] = num_steps + rule.delay, done
            else:
                _extend(waits, done)
        if any(waits):
            ends = [
                drawing.compute("optimizer", number, rank_class, 0.0, [ends[rank_class], *waits[rank_class]])
                for rank_class in range(len(ends))
            ]
        drawing.step_ends.append(ends)


class MixingSteps(_Rounds):
    """Replicas that mix parameters with neighbours while gradients are computed, or after that."""

    def __init__(self, drawing: Drawing, plans: list[Plan], first_step: int) -> None:
        super().__init__(drawing, plans)
        self._first_step = first_step
        self._overlapped = plans[0].launch == "ready"
        self._open: list[list[list[int]]] = []

    def step(self, number: int) -> None:
        """One step; what left after the step before is waited for before the optimizer's."""
        drawing = self._drawing
        ready = self._compute(number, self._before())
        if not self._overlapped:
            self._start(number, self._first_step + number, ready)
        waits: list[list[int]] = [[task] for task in ready]
        for done in self._open:
            _extend(waits, done)
        self._open = []
        ends = self._optimizer(number, waits)
        drawing.step_ends.append(ends)
        if self._overlapped:
            self._start(number, self._first_step + number + 1, ends)

    def _start(self, number: int, num_steps: int, ready: list[int]) -> None:
        rule = self._drawing.inputs.strategy.synchronization
        self._open += [self._exchange(number, part, ready) for part in rule.due(num_steps)]


def _extend(waits: list[list[int]], done: list[list[int]]) -> None:
    for tasks, more in zip(waits, done, strict=True):
        tasks += more
