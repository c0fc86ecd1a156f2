"""All-gathers of parameters before each pass, reduce-scatters of gradients after it: FSDP2 on a virtual clock.

A part of the model is gathered while the previous part computes, one part ahead, as FSDP2 does on a GPU (on a CPU its
collectives block, which is not modelled). Gradients of a part are sent when the backward pass of its first layer has
ended, overlapped with the backward pass of the parts before it. All-gathers have one order, reduce-scatters another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from laconic.core.exchange import Move
from laconic.core.plan import Bucket, Plan
from laconic.simulator.lowering.task_graph import TaskGraph, Which
from laconic.workload import CodecCost, Workload

Ends = list[list[int]]
"""For each class of ranks, the tasks after which a result is available."""


class ShardedSteps:
    """Adds the tasks of one step after the other."""

    def __init__(self, task_graph: TaskGraph, plan: Plan) -> None:
        self._task_graph = task_graph
        self._classes = range(len(task_graph.inputs.classes))
        self._passes = _Passes(task_graph.inputs.workload, plan)
        inputs, strategy = task_graph.inputs, task_graph.inputs.strategy
        whom, moment = strategy.architecture, inputs.moment
        alone = not inputs.exchanges()
        weights = strategy.weights_codec
        self._gathers = [() if alone else whom.gather_moves(part, weights, moment) for part in plan.weights]
        self._sums = [() if alone else whom.moves(part, strategy.codec, moment) for part in self._passes.gradients]
        costs = {one.compressor: one for one in inputs.workload.codecs}
        self._weights_cost, self._sums_cost = costs.get(str(weights)), costs.get(str(strategy.codec.between_hosts))
        self._plan = plan

    def step(self, number: int) -> None:
        """Forward, backward, optimizer."""
        task_graph = self._task_graph
        before: Ends = (
            [[ends] for ends in task_graph.step_ends[-1]] if task_graph.step_ends else [[] for _ in self._classes]
        )
        computed = self._run(number, before, forward=True)
        sums: Ends = [[] for _ in self._classes]
        computed = self._run(number, computed, forward=False, sums=sums)
        waits, optimizer_s = _both(computed, sums), task_graph.inputs.optimizer_s
        task_graph.step_ends.append(
            [task_graph.compute("optimizer", number, one, optimizer_s, waits[one]) for one in self._classes]
        )

    def _run(self, number: int, before: Ends, *, forward: bool, sums: Ends | None = None) -> Ends:
        """One pass; `sums` collects the tasks after which all gradients are summed."""
        task_graph, passes = self._task_graph, self._passes
        segments = passes.segments if forward else passes.segments[::-1]
        gathered, summed = before, before
        computed, earlier = before, before
        for segment in segments:
            for part in segment.first_used if forward else segment.gathered_again:
                # One part ahead: not before the segment before the last one is done.
                gathered = self._communicate(number, part, self._plan.weights[part], _both(gathered, earlier), True)
            duration_s = segment.forward_s if forward else segment.backward_s
            waits = _both(computed, gathered)
            earlier, computed = (
                computed,
                [
                    [task_graph.compute("forward" if forward else "backward", number, one, duration_s, waits[one])]
                    for one in self._classes
                ],
            )
            for part in [] if forward else segment.last_used:
                summed = self._communicate(number, part, passes.gradients[part], _both(summed, computed), False)
                assert sums is not None
                sums[:] = summed
        return computed

    def _communicate(self, step: int, part: int, bucket: Bucket, ready: Ends, gathers: bool) -> Ends:
        """Encode, move, decode."""
        task_graph, which = self._task_graph, Which(step, part, bucket)
        moves: Sequence[Move] = (self._gathers if gathers else self._sums)[part]
        if not moves:
            return ready
        cost = self._weights_cost if gathers else task_graph.inputs.codec
        encode_s, decode_s = _codec_s(cost, bucket, task_graph.inputs.world_size, gathers=gathers)
        issued = [task_graph.code("encode", which, one, encode_s, ready[one]) for one in self._classes]
        task_graph.next_in_order()
        ends = list(dict.fromkeys(task for tasks in issued for task in tasks))
        for move in moves[:-1]:
            ends = task_graph.move(which, move, ends).ends
            # A rank decodes the payloads from its host, and encodes the sums that go to other hosts.
            share = bucket.nbytes / len(task_graph.inputs.hosts[0])
            sums = self._sums_cost
            between_s = decode_s + (sums.encode_s(share) if sums is not None else 0.0)
            coded = [task_graph.code("decode", which, one, between_s, ends) for one in self._classes]
            ends = list(dict.fromkeys(task for tasks in coded for task in tasks))
            decode_s = sums.decode_s(share) if sums is not None else 0.0
        ends = task_graph.move(which, moves[-1], ends).ends
        return [task_graph.code("decode", which, one, decode_s, ends) for one in self._classes]


def _both(first: Ends, second: Ends) -> Ends:
    return [list(dict.fromkeys([*one, *other])) for one, other in zip(first, second, strict=True)]


def _codec_s(cost: CodecCost | None, bucket: Bucket, world_size: int, *, gathers: bool) -> tuple[float, float]:
    """A rank encodes its shard of weights and decodes all; it encodes all gradients, decodes a shard of each rank."""
    if cost is None:
        return 0.0, 0.0
    encoded = bucket.nbytes / world_size if gathers else bucket.nbytes
    return cost.encode_s(encoded), cost.decode_s(bucket.nbytes)


class _Segment:
    """Layers between two boundaries of parts."""

    def __init__(self, workload: Workload, begin: int, end: int) -> None:
        layers = workload.layers[begin:end]
        self.forward_s = sum(layer.forward_s for layer in layers)
        self.backward_s = sum(layer.backward_s for layer in layers)
        self.first_used: list[int] = []
        """Parts that the forward pass needs from here on."""
        self.gathered_again: list[int] = []
        """Parts that the backward pass needs from here on, and that were resharded in between."""
        self.last_used: list[int] = []
        """Parts whose gradients are complete after this segment of the backward pass."""


class _Passes:
    """Both passes, cut where parts begin or end."""

    def __init__(self, workload: Workload, plan: Plan) -> None:
        layer_of = {tensor.name: index for index, layer in enumerate(workload.layers) for tensor in layer.tensors}
        spans = [
            (min(used), max(used))
            for part in plan.weights
            for used in [[layer_of[tensor.owner] for tensor in part.tensors]]
        ]
        names = [part.tensors[0].owner for part in plan.weights]
        sent = {bucket.tensors[0].owner: bucket for bucket in plan.buckets}
        self.gradients = [sent[name] for name in names]
        """The bucket of each part's gradients, in the order of `plan.weights`."""
        cuts = sorted({0, len(workload.layers), *(first for first, _ in spans), *(last + 1 for _, last in spans)})
        self.segments = [_Segment(workload, begin, end) for begin, end in pairwise(cuts)]
        number_of = {begin: number for number, begin in enumerate(cuts)}
        for part, (first, last) in enumerate(spans):
            self.segments[number_of[first]].first_used.append(part)
            self.segments[number_of[first]].last_used.append(part)
            if plan.weights[part].tensors[0].gathers > 1:
                self.segments[number_of[last + 1] - 1].gathered_again.append(part)
