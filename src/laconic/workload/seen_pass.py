"""The hooks' record of one step as a list of layers for a workload.

A workload's backward pass takes its layers in reverse, each once, and a layer's gradients are ready when its time has
passed. So layers are listed in the reverse of the order in which they finished: a module that is called twice is listed
where its first call is, because its gradients are complete only there, and so is a layer whose weight others share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from laconic.workload.device_time import DeviceTime, Mark
from laconic.workload.layer_watch import LayerWatch, Sight


@dataclass(frozen=True)
class Step:
    """When the passes of one step began and ended."""

    forward: tuple[Mark, Mark]
    backward: tuple[Mark, Mark]


@dataclass(frozen=True, kw_only=True)
class SeenPass:
    """One step with hooks, in seconds."""

    forward_s: dict[str, float]
    """By layer, in the order in which layers first computed."""
    backward_s: dict[str, float]
    ready_s: dict[str, float]
    """By parameter, in the order in which gradients were complete; counted from the beginning of the backward pass."""
    owners: dict[str, str]
    """By parameter: in which layer's time its gradient became complete."""
    last_seen: dict[str, int]
    """By layer that computed backward: the number of events in the pass before it began for the last time."""
    completed: dict[str, int]
    """By parameter: the number of events in the pass before its gradient was complete."""

    @classmethod
    def read(cls, timer: DeviceTime, watch: LayerWatch, step: Step) -> SeenPass:
        """Made from a watch's record of a step; all marks must be in the past."""
        ready_s: dict[str, float] = {}
        owners: dict[str, str] = {}
        last_seen: dict[str, int] = {}
        completed: dict[str, int] = {}
        layer = ""
        for place, sight in enumerate(watch.backward):
            if sight.kind == "layer":
                layer = sight.name
                last_seen[layer] = place
            else:
                # The last time counts: checkpointing may complete a gradient piece by piece.
                ready_s.pop(sight.name, None)
                ready_s[sight.name] = timer.between_s(step.backward[0], sight.mark)
                owners[sight.name] = layer
                completed[sight.name] = place
        return cls(
            forward_s=_by_layer(timer, watch.forward, *step.forward),
            backward_s=_by_layer(timer, watch.backward, *step.backward),
            ready_s=ready_s,
            owners=owners,
            last_seen=last_seen,
            completed=completed,
        )

    def parameters_by_layer(self) -> dict[str, list[str]]:
        """The parameters of each layer that has any; all together they come in the order in which they were ready."""
        runs = [(layer, list(run)) for layer, run in groupby(self.ready_s, self.owners.__getitem__)]
        last = {layer: number for number, (layer, _) in enumerate(runs)}
        found: dict[str, list[str]] = {}
        carried: list[str] = []
        for number, (layer, names) in enumerate(runs):
            carried += names
            # A layer around others may complete gradients before and after them. The earlier ones go with whoever comes
            # next: late by a little, but in order.
            if last[layer] == number:
                found[layer] = carried
                carried = []
        return found

    def layers(self) -> list[str]:
        """All layers in the order of a workload."""
        parameters = self.parameters_by_layer()
        finished = {
            layer: self.completed[parameters[layer][-1]] if layer in parameters else place
            for layer, place in self.last_seen.items()
        }
        ordered = sorted(finished, key=finished.__getitem__, reverse=True)
        before: str | None = None
        for layer in self.forward_s:
            if layer not in finished:
                # No gradient came through it; it stands where the forward pass had it.
                ordered.insert(0 if before is None else ordered.index(before) + 1, layer)
            before = layer
        return ordered


def _by_layer(timer: DeviceTime, sights: Sequence[Sight], began: Mark, ended: Mark) -> dict[str, float]:
    """Seconds of each layer: from each sight of it to the next of any; time before all sights belongs to the first."""
    layers = [sight for sight in sights if sight.kind == "layer"]
    starts = [began, *(sight.mark for sight in layers[1:])]
    spent: dict[str, float] = {}
    for sight, start, stop in zip(layers, starts, [*starts[1:], ended], strict=True):
        spent[sight.name] = spent.get(sight.name, 0.0) + timer.between_s(start, stop)
    return spent
