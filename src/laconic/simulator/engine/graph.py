"""Tasks and their dependencies as arrays: built one by one, then run any number of times.

A timed task has a duration; a transfer lasts as long as its flows need on the links they share. Either may need a
resource, which it holds from its start to its end.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from laconic.cluster.fabric import Fabric
from laconic.errors import UsageError, one_line
from laconic.simulator.engine.flow_sets import FlowSets
from laconic.simulator.engine.laying import Flows, lay, nothing_laid

NOWHERE = -1
"""The resource of a task that needs none."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Graph:
    """Tasks, numbered from 0, with one entry per task in each array unless stated otherwise."""

    duration_s: npt.NDArray[np.float64]
    """For a transfer: the time after its last byte was sent, which is its latency and the delay of its longest
    route."""
    resource: npt.NDArray[np.int32]
    priority: npt.NDArray[np.float64]
    label: npt.NDArray[np.int64]
    """A value for the caller; the engine does not use it."""
    flow_set: npt.NDArray[np.int32]
    """The number of a transfer's flow set; -1: a timed task."""
    num_predecessors: npt.NDArray[np.int32]
    first_successor: npt.NDArray[np.int64]
    """Task t comes before successors[first_successor[t] : first_successor[t + 1]]."""
    successors: npt.NDArray[np.int32]
    resource_names: tuple[str, ...]
    capacity: npt.NDArray[np.int64]
    """The number of tasks that each resource takes at a time."""
    flows: Flows
    link_bytes: npt.NDArray[np.float64]
    """The bytes that all transfers together send over each link of the fabric."""

    @property
    def num_tasks(self) -> int:
        """The number of tasks."""
        return len(self.duration_s)


class GraphBuilder:
    """Adds tasks one by one; each gets the next number."""

    def __init__(self) -> None:
        self._resource_names: list[str] = []
        self._capacity: list[int] = []
        self._duration_s = array("d")
        self._resource = array("i")
        self._priority = array("d")
        self._label = array("q")
        self._flow_set = array("i")
        self._later = array("i")
        self._earlier = array("i")
        self._flow_sets = FlowSets()

    @property
    def num_tasks(self) -> int:
        """The number of tasks so far."""
        return len(self._duration_s)

    def resource(self, name: str, capacity: int = 1) -> int:
        """Add a resource that `capacity` tasks can hold at a time; returns its number."""
        if capacity < 1:
            raise UsageError(f'resource "{one_line(name, 80)}": capacity must be at least 1, got {capacity}.')
        self._resource_names.append(name)
        self._capacity.append(capacity)
        return len(self._capacity) - 1

    def timed(
        self,
        duration_s: float,
        *,
        resource: int = NOWHERE,
        priority: float = 0.0,
        after: Iterable[int] = (),
        label: int = 0,
    ) -> int:
        """Add a task that starts when all of `after` have ended and its resource is free; returns its number.

        Of the tasks that wait for a resource, the one with the lowest priority is first, then the one with the lowest
        number.
        """
        if not 0.0 <= duration_s < math.inf:  # in this form it also refuses NaN
            raise UsageError(
                f"task {self.num_tasks}: duration_s must be finite and not negative, got {duration_s}.",
            )
        return self._add(duration_s, resource, priority, after, label)

    def transfer(
        self,
        sources: npt.ArrayLike,
        destinations: npt.ArrayLike,
        nbytes: npt.ArrayLike,
        *,
        latency_s: float = 0.0,
        resource: int = NOWHERE,
        priority: float = 0.0,
        after: Iterable[int] = (),
        label: int = 0,
    ) -> int:
        """Add a transfer: flows that begin together, one from each source to its destination; returns its number.

        It ends when the last flow has left its source, and `latency_s` and the delay of the longest route have passed.
        A flow to itself or of no bytes takes no bandwidth. `nbytes` may be one number for all flows.
        """
        task = self.num_tasks
        if not 0.0 <= latency_s < math.inf:
            raise UsageError(f"task {task}: latency_s must be finite and not negative, got {latency_s}.")
        begins, ends = _devices(task, "sources", sources), _devices(task, "destinations", destinations)
        sizes = np.asarray(nbytes, dtype=np.float64)
        if sizes.ndim == 0:
            sizes = np.full(len(begins), sizes)
        if sizes.ndim != 1 or not len(begins) == len(ends) == len(sizes):
            raise UsageError(
                f"task {task}: a transfer needs as many sources as destinations and sizes, got {len(begins)}, "
                f"{len(ends)} and {sizes.size}."
            )
        wrong = ~((sizes >= 0) & (sizes < math.inf))
        if wrong.any():
            raise UsageError(f"task {task}: nbytes must be finite and not negative, got {sizes[wrong][0]}.")
        # Registered last: a task that is refused leaves nothing behind.
        added = self._add(latency_s, resource, priority, after, label)
        self._flow_set[added] = self._flow_sets.add(begins, ends, sizes)
        return added

    def after(self, task: int, earlier: int) -> None:
        """Make `task` wait for `earlier` too, which may have been added later."""
        for number in (task, earlier):
            if not 0 <= number < self.num_tasks:
                raise UsageError(f"after({task}, {earlier}): there is no task {number} yet, only {self.num_tasks}.")
        if task == earlier:
            raise UsageError(f"after({task}, {earlier}): a task cannot wait for itself.")
        self._later.append(task)
        self._earlier.append(earlier)

    def build(self, fabric: Fabric | None = None) -> Graph:
        """The tasks so far, with their flows on the links of `fabric`."""
        flow_set = np.array(self._flow_set, dtype=np.int32)
        duration_s = np.array(self._duration_s, dtype=np.float64)
        transfers = np.flatnonzero(flow_set >= 0)
        laid = nothing_laid()
        if fabric is not None:
            last_devices = self._flow_sets.last_devices()[flow_set[transfers]]
            for place in np.flatnonzero(last_devices >= fabric.num_devices)[:1].tolist():
                raise UsageError(
                    f"task {transfers[place]} names device {last_devices[place]}, but the fabric has devices 0 to "
                    f"{fabric.num_devices - 1} only."
                )
            laid = lay(self._flow_sets, fabric)
            duration_s[transfers] += laid.delay_s[flow_set[transfers]]
        elif len(transfers):
            raise UsageError(
                f"task {transfers[0]} is a transfer, and there is nothing to send it over: give build() a fabric."
            )
        later, earlier = np.array(self._later, dtype=np.int32), np.array(self._earlier, dtype=np.int32)
        num_successors = np.bincount(earlier, minlength=self.num_tasks)
        return Graph(
            duration_s=duration_s,
            resource=np.array(self._resource, dtype=np.int32),
            priority=np.array(self._priority, dtype=np.float64),
            label=np.array(self._label, dtype=np.int64),
            flow_set=flow_set,
            num_predecessors=np.bincount(later, minlength=self.num_tasks).astype(np.int32),
            first_successor=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(num_successors)]),
            successors=later[np.argsort(earlier, kind="stable")],
            resource_names=tuple(self._resource_names),
            capacity=np.array(self._capacity, dtype=np.int64),
            flows=laid.flows,
            link_bytes=laid.link_bytes,
        )

    def _add(self, duration_s: float, resource: int, priority: float, after: Iterable[int], label: int) -> int:
        task = len(self._duration_s)
        if not NOWHERE <= resource < len(self._capacity):
            raise UsageError(
                f"task {task}: there is no resource {resource}, only {len(self._capacity)} of them so far. Use the "
                "number that resource() returned, or NOWHERE."
            )
        if math.isnan(priority):
            raise UsageError(f"task {task}: priority must be a number, got {priority}.")
        num_edges = len(self._later)
        for earlier in after:
            if not 0 <= earlier < task:
                del self._later[num_edges:], self._earlier[num_edges:]
                raise UsageError(
                    f"task {task}: it cannot come after task {earlier}, which does not exist yet. Add that one first, "
                    "or use after() later."
                )
            self._later.append(task)
            self._earlier.append(earlier)
        self._duration_s.append(duration_s)
        self._resource.append(resource)
        self._priority.append(priority)
        self._label.append(label)
        self._flow_set.append(-1)
        return task


def _devices(task: int, name: str, devices: npt.ArrayLike) -> npt.NDArray[np.int64]:
    found = np.asarray(devices)
    if found.ndim != 1 or not (found.dtype.kind in "iu" or not len(found)):
        raise UsageError(f"task {task}: {name} must be a sequence of device numbers, got {one_line(devices, 80)}.")
    if len(found) and found.min() < 0:
        raise UsageError(f"task {task}: {name} must not be negative, got {found.min()}.")
    return found.astype(np.int64)
