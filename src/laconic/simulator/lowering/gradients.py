"""Gradients that everyone averages in every step: the plain seam on a virtual clock.

A bucket leaves when its last gradient is there and those before it have left. The optimizer waits for all of them, or,
where the schedule defers, every layer of the next forward pass for its own.
"""

from __future__ import annotations

from laconic.core.plan import Plan
from laconic.simulator.lowering.drawing import Drawing, Submission, Which
from laconic.workload import Workload


class GradientSteps:
    """Draws one step after the other."""

    def __init__(self, drawing: Drawing, plan: Plan) -> None:
        self._drawing = drawing
        self._plan = plan
        self._passes = Passes(drawing.inputs.workload, plan)
        self._submission = Submission(plan)
        self._moves = [drawing.inputs.moves(bucket, halves=plan.halves) for bucket in plan.buckets]
        self._done: list[list[list[int]]] = []
        """Of the step before: for each bucket and class, what ends with its outcome being there."""

    def step(self, number: int) -> None:
        """Forward, backward with exchanges, optimizer."""
        drawing, inputs, plan = self._drawing, self._drawing.inputs, self._plan
        classes = range(len(inputs.classes))
        before = drawing.step_ends[-1] if drawing.step_ends else None
        # backward[c][k]: ends when the gradients of the k-th stretch are there
        backward: list[list[int]] = []
        for rank_class in classes:
            last = [before[rank_class]] if before is not None else []
            last = self._forward(number, rank_class, last)
            ends: list[int] = []
            for duration_s in self._passes.backward_s:
                last = [drawing.compute("backward", number, rank_class, duration_s, last)]
                ends.append(last[0])
            backward.append(ends)
        done = self._exchanges(number, backward)
        self._done = done
        step_ends: list[int] = []
        for rank_class in classes:
            waits = [backward[rank_class][-1]]
            if not plan.deferred:
                waits += [task for bucket in done for task in bucket[rank_class]]
            step_ends.append(drawing.compute("optimizer", number, rank_class, inputs.optimizer_s, waits))
        drawing.step_ends.append(step_ends)

    def _forward(self, number: int, rank_class: int, last: list[int]) -> list[int]:
        """One task, or one per stretch of layers that wait for the same buckets of the step before."""
        for duration_s, buckets in self._passes.forward:
            waits = [task for bucket in buckets for task in self._done[bucket][rank_class]] if self._done else []
            last = [self._drawing.compute("forward", number, rank_class, duration_s, [*last, *waits])]
        return last

    def _exchanges(self, number: int, backward: list[list[int]]) -> list[list[list[int]]]:
        drawing, plan = self._drawing, self._plan
        done: list[list[list[int]]] = []
        halves: list[tuple[int, list[int]]] = []
        for index, bucket in enumerate(plan.buckets):
            which, stretch = Which(number, index, bucket), self._passes.ready[index]
            ends = drawing.encode(which, [[ends[stretch]] for ends in backward], self._submission.room())
            moves = self._moves[index]
            first, rest = (moves[:-1], moves[-1:]) if plan.halves and len(moves) > 1 else (moves, ())
            for move in first:
                ends = drawing.move(which, move, ends)
            if rest:
                halves.append((index, ends))
                self._submission.opened(bucket.nbytes, ends)
                done.append([])
                continue
            decoded = drawing.decode(which, ends)
            self._submission.opened(bucket.nbytes, _all(decoded))
            done.append(decoded)
        # The second halves follow when all gradients have left, those of the first layers first.
        left = [ends[-1] for ends in backward]
        for index, ends in reversed(halves):
            bucket = plan.buckets[index]
            which = Which(number, index, bucket)
            room = self._submission.room()
            drawing.next_in_order()
            ends = drawing.move(which, self._moves[index][-1], [*ends, *left, *room])
            done[index] = drawing.decode(which, ends)
            self._submission.opened(bucket.nbytes, _all(done[index]))
        return done


def _all(done: list[list[int]]) -> list[int]:
    return [task for tasks in done for task in tasks]


class Passes:
    """Both passes cut where something depends on them."""

    def __init__(self, workload: Workload, plan: Plan) -> None:
        layer_of = {tensor.name: index for index, layer in enumerate(workload.layers) for tensor in layer.tensors}
        wanted: list[int] = []
        first_layer = len(workload.layers)
        for bucket in plan.buckets:
            # The backward pass goes from the last layer to the first, and buckets leave in order.
            first_layer = min(first_layer, *(layer_of[tensor.owner] for tensor in bucket.tensors))
            wanted.append(0 if plan.launch == "after_backward" else first_layer)
        cuts = sorted({0, *wanted}, reverse=True)
        self.backward_s: list[float] = []
        """How long each stretch of the backward pass takes."""
        above = len(workload.layers)
        for cut in cuts:
            self.backward_s.append(sum(layer.backward_s for layer in workload.layers[cut:above]))
            above = cut
        number_of = {cut: number for number, cut in enumerate(cuts)}
        self.ready: list[int] = [number_of[layer] for layer in wanted]
        """For each bucket the stretch after which it may leave."""
        self.forward: list[tuple[float, list[int]]] = _forward(workload, plan, layer_of)
        """How long each stretch of the forward pass takes, and the buckets it waits for."""


def _forward(workload: Workload, plan: Plan, layer_of: dict[str, int]) -> list[tuple[float, list[int]]]:
    if not plan.deferred:
        return [(sum(layer.forward_s for layer in workload.layers), [])]
    buckets_of: dict[int, set[int]] = {}
    for number, bucket in enumerate(plan.buckets):
        for tensor in bucket.tensors:
            buckets_of.setdefault(layer_of[tensor.owner], set()).add(number)
    found: list[tuple[float, list[int]]] = []
    there: set[int] = set()
    for index, layer in enumerate(workload.layers):
        new = buckets_of.get(index, set()) - there
        there |= new
        if new or not found:
            found.append((layer.forward_s, sorted(new)))
        else:
            found[-1] = (found[-1][0] + layer.forward_s, found[-1][1])
    return found
