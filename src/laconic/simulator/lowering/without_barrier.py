"""Workers that do not wait for each other: with servers that hold the parameters, or in pairs."""

from __future__ import annotations

from laconic.core.plan import Plan
from laconic.simulator.lowering.drawing import Drawing, RankClass, Submission, Which
from laconic.synchronization import Asynchronous


class PushPullSteps:
    """Each class sends gradients and takes parameters; it waits for nobody, or for those that are too far behind."""

    def __init__(self, drawing: Drawing, plan: Plan, rule: Asynchronous) -> None:
        self._drawing = drawing
        self._plan = plan
        self._lead = rule.lead
        self._submissions = [Submission(plan) for _ in drawing.inputs.classes]
        layers = drawing.inputs.workload.layers
        self._forward_s = sum(layer.forward_s for layer in layers)
        self._backward_s = sum(layer.backward_s for layer in layers)

    def step(self, number: int) -> None:
        """One step of every class, each at its own time."""
        drawing = self._drawing
        ends: list[int] = []
        for rank_class, ranks in enumerate(drawing.inputs.classes):
            waits = [drawing.step_ends[-1][rank_class]] if drawing.step_ends else []
            forward = drawing.compute("forward", number, rank_class, self._forward_s, waits)
            backward = drawing.compute("backward", number, rank_class, self._backward_s, [forward])
            done = self._exchange(number, rank_class, ranks, backward)
            if self._lead is not None and number > self._lead:
                # Clocks: a worker may go on when the slowest has made all but `lead` of its steps.
                done += drawing.step_ends[number - self._lead - 1]
            ends.append(drawing.compute("optimizer", number, rank_class, 0.0, done))
        drawing.step_ends.append(ends)

    def _exchange(self, number: int, rank_class: int, ranks: RankClass, ready: int) -> list[int]:
        drawing, submission = self._drawing, self._submissions[rank_class]
        share = ranks.size / drawing.inputs.world_size
        done: list[int] = []
        for index, bucket in enumerate(self._plan.buckets):
            which = Which(number, index, bucket)
            ends = drawing.code_alone("encode", which, rank_class, [ready, *submission.room()])
            for move in drawing.inputs.moves(bucket):
                ends = drawing.move(which, move, ends, share=share)
            ends = drawing.code_alone("decode", which, rank_class, ends)
            submission.opened(bucket.nbytes, ends)
            done += ends
        return done


class PairwiseSteps:
    """Pairs average in the background: a step takes what it computes, and averages happen as often as they can."""

    def __init__(self, drawing: Drawing, plan: Plan) -> None:
        self._drawing = drawing
        self._plan = plan
        layers = drawing.inputs.workload.layers
        self._compute_s = sum(layer.forward_s + layer.backward_s for layer in layers)
        self._under_way: list[int] = []
        self._free_s = 0.0

    def step(self, number: int) -> None:
        """One step of every class; an exchange begins after it if the one before has ended by then."""
        drawing, inputs = self._drawing, self._drawing.inputs
        ends: list[int] = []
        for rank_class in range(len(inputs.classes)):
            waits = [drawing.step_ends[-1][rank_class]] if drawing.step_ends else []
            passes = drawing.compute("backward", number, rank_class, self._compute_s, waits)
            ends.append(drawing.compute("optimizer", number, rank_class, inputs.optimizer_s, [passes]))
        drawing.step_ends.append(ends)
        now_s = (number + 1) * (self._compute_s + inputs.optimizer_s)
        if now_s < self._free_s:
            return
        took_s = 0.0
        last = [ends[0]]
        for index, bucket in enumerate(self._plan.buckets):
            drawing.next_in_order()
            for move in inputs.pair_moves(bucket):
                last = drawing.move(Which(number, index, bucket), move, last)
                took_s += inputs.seconds(move)
        self._free_s = now_s + took_s
