"""Gradients that all ranks average, in every step or where a round is due: the gradient hooks on a virtual clock.

A bucket is launched when its last gradient is ready and the buckets before it have been launched. The optimizer waits
for all of them; where the schedule defers updates, the next forward pass waits layer by layer, and the updates of a
group of layers are made just before it runs.
"""

from __future__ import annotations

from typing import NamedTuple

from laconic.core.plan import Plan
from laconic.simulator.lowering.communication import BucketExchange, CommunicationThread
from laconic.simulator.lowering.phases import phases_of_all
from laconic.simulator.lowering.task_graph import TaskGraph, Which
from laconic.workload import Workload


class GradientSteps:
    """Adds the tasks of one step after the other."""

    def __init__(self, task_graph: TaskGraph, plan: Plan, first_step: int) -> None:
        self._task_graph = task_graph
        self._plan = plan
        self._first_step = first_step
        self._passes = Passes(task_graph.inputs.workload, plan)
        self._classes = range(len(task_graph.inputs.classes))
        self._thread = CommunicationThread(task_graph, self._classes)
        self._phases = phases_of_all(task_graph.inputs, plan.buckets, decoupled=plan.decoupled)
        self._nbytes = [bucket.nbytes for bucket in plan.buckets]
        self._exchanges: list[BucketExchange] = []
        """The exchanges of the previous step."""

    def step(self, number: int) -> None:
        """Forward, backward with exchanges, optimizer."""
        task_graph = self._task_graph
        # backward[c][k]: ends when the gradients of the k-th segment are ready
        backward: list[list[int]] = []
        for rank_class in self._classes:
            last = [task_graph.step_ends[-1][rank_class]] if task_graph.step_ends else []
            last = self._forward(number, rank_class, last)
            ends: list[int] = []
            for duration_s in self._passes.backward_s:
                last = [task_graph.compute("backward", number, rank_class, duration_s, last)]
                ends.append(last[0])
            backward.append(ends)
        self._exchanges = []
        if task_graph.inputs.strategy.synchronization.due(self._first_step + number + 1):
            self._exchange(number, backward)
        task_graph.step_ends.append([self._end(number, rank_class, backward) for rank_class in self._classes])

    def _end(self, number: int, rank_class: int, backward: list[list[int]]) -> int:
        """The optimizer's step; where updates are deferred, a task of no duration."""
        waits, optimizer_s = [backward[rank_class][-1]], 0.0
        if not self._plan.deferred:
            optimizer_s = self._task_graph.inputs.optimizer_s
            waits += [task for exchange in self._exchanges for task in exchange.done[rank_class]]
        return self._task_graph.compute("optimizer", number, rank_class, optimizer_s, waits)

    def _forward(self, number: int, rank_class: int, last: list[int]) -> list[int]:
        """One task, or one per segment of layers that wait for the same gradients, each after its updates."""
        task_graph, optimizer_s = self._task_graph, self._task_graph.inputs.optimizer_s
        for segment in self._passes.forward:
            waits: list[int] = []
            if self._exchanges:
                waits = [task for bucket in segment.buckets for task in self._exchanges[bucket].done[rank_class]]
                if optimizer_s and segment.share:
                    after = [task_graph.step_ends[-1][rank_class], *waits]
                    share_s = segment.share * optimizer_s
                    waits = [task_graph.compute("optimizer", number - 1, rank_class, share_s, after)]
            last = [task_graph.compute("forward", number, rank_class, segment.forward_s, [*last, *waits])]
        return last

    def _exchange(self, number: int, backward: list[list[int]]) -> None:
        """All buckets in order, then the second halves, those of the first layers first."""
        plan, thread = self._plan, self._thread
        self._exchanges = [
            BucketExchange(Which(number, index, bucket), phases, nbytes, plan.credit_bytes, plan.decoupled)
            for index, (bucket, phases, nbytes) in enumerate(zip(plan.buckets, self._phases, self._nbytes, strict=True))
        ]
        for index, exchange in enumerate(self._exchanges):
            ready = [[ends[self._passes.ready[index]]] for ends in backward]
            is_last = index == len(self._exchanges) - 1
            thread.submit(exchange, ready, last=is_last and not plan.decoupled)
        if plan.decoupled:
            for exchange in reversed(self._exchanges):
                thread.submit_second_half(exchange, last=exchange is self._exchanges[0])


class Segment(NamedTuple):
    """Layers of the forward pass that wait for the same buckets."""

    forward_s: float
    buckets: list[int]
    """The buckets they wait for; empty if the whole pass waits for none."""
    share: float
    """The share of updates that are made before this segment; 0 if the optimizer's step has made them."""


class Passes:
    """Both passes, cut where other tasks depend on them."""

    def __init__(self, workload: Workload, plan: Plan) -> None:
        layer_of = {tensor.name: index for index, layer in enumerate(workload.layers) for tensor in layer.tensors}
        wanted: list[int] = []
        first_layer = len(workload.layers)
        for bucket in plan.buckets:
            # The backward pass goes from the last layer to the first, and buckets are launched in order.
            first_layer = min(first_layer, *(layer_of[tensor.owner] for tensor in bucket.tensors))
            wanted.append(0 if plan.launch == "after_backward" else first_layer)
        cuts = sorted({0, *wanted}, reverse=True)
        self.backward_s: list[float] = []
        """The duration of each segment of the backward pass."""
        above = len(workload.layers)
        for cut in cuts:
            self.backward_s.append(sum(layer.backward_s for layer in workload.layers[cut:above]))
            above = cut
        number_of = {cut: number for number, cut in enumerate(cuts)}
        self.ready: list[int] = [number_of[layer] for layer in wanted]
        """For each bucket, the segment after which it may be launched."""
        self.forward: list[Segment] = _forward(workload, plan, layer_of)


def _forward(workload: Workload, plan: Plan, layer_of: dict[str, int]) -> list[Segment]:
    if not plan.deferred:
        return [Segment(workload.forward_s, [], 0.0)]
    buckets_of: dict[int, set[int]] = {}
    for number, bucket in enumerate(plan.buckets):
        for tensor in bucket.tensors:
            buckets_of.setdefault(layer_of[tensor.owner], set()).add(number)
    found: list[Segment] = []
    there: set[int] = set()
    num_parameters = max(1, workload.num_parameters)
    for index, layer in enumerate(workload.layers):
        needed = buckets_of.get(index, set())
        share = sum(tensor.numel for tensor in layer.tensors) / num_parameters
        if not found or not needed <= there:
            found.append(Segment(layer.forward_s, sorted(needed), share))
        else:
            last = found[-1]
            found[-1] = Segment(last.forward_s + layer.forward_s, last.buckets, last.share + share)
        there |= needed
    return found
