"""The board that lowerings draw on: who computes, what is under way, and what every task is called."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from laconic.cluster.fabric import Indices
from laconic.core.exchange import Move
from laconic.core.hosts import Hosts
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.simulator.engine import GraphBuilder
from laconic.simulator.network import LINK, Network, Passage
from laconic.simulator.network.contract import seconds
from laconic.simulator.network.flow import FlowNetwork
from laconic.strategy import Strategy
from laconic.workload import CodecCost, Workload

Kind = Literal["forward", "backward", "optimizer", "encode", "start-up", "exchange", "decode", "latency"]

_OWN = "own links"
"""Of ranks that send while others do not."""
_STARTING = "start-up"
"""What one exchange after the other passes before its bytes can move, where others' bytes move meanwhile."""
_AT_ONCE = 3
"""Exchanges that can be under way where start-up goes on beside others' bytes: Gloo works on two at a time, and a rank
that has done its part of one goes on to the next while others have not."""
_FEW = 4
"""Tasks to wait for that need no task of their own to stand for all of them."""


@dataclass(frozen=True)
class RankClass:
    """Ranks that do the same at the same time."""

    size: int
    slowdown: float = 1.0
    """By what its compute times are multiplied."""


class Label(NamedTuple):
    """What a task is."""

    kind: Kind
    step: int
    of: int = 0
    """The class of ranks, for compute; the number of the bucket, for what is exchanged."""
    where: str = ""
    """The part of the network."""
    nbytes: int = 0
    move: str = ""
    """Its kind and its algorithm."""
    moving_s: float = 0.0
    """How long bytes move, at its end."""


@dataclass(frozen=True)
class Inputs:
    """What is simulated."""

    strategy: Strategy
    """As it is once attached: it knows hosts and measured costs."""
    workload: Workload
    world_size: int
    network: Network
    classes: tuple[RankClass, ...]
    """Of all ranks, the fastest first."""
    codec: CodecCost | None
    """What encoding and decoding cost; None: nothing, or nobody knows."""
    hosts: Hosts = ()
    """Which ranks share a host; may be left out where nothing depends on it."""
    optimizer_s: float = 0.0
    """What the optimizer's step takes, when all gradients are there."""
    moment: Moment = field(default_factory=Moment)
    first_slowdown: float = 1.0
    """Of rank 0, whose times plans are made from."""
    devices: Indices | None = None
    """Where each rank runs, if what it sends shares links with other jobs; then the network must be a FlowNetwork."""

    @property
    def num_servers(self) -> int:
        """Servers beside workers; negative if they have hosts of their own; 0 if there are none."""
        servers = self.strategy.architecture.servers
        if servers is None:
            return 0
        count = servers.num_servers(self.world_size)
        return -count if servers.hosts else count

    def owners(self, buckets: Sequence[Bucket]) -> list[int]:
        """The server of each bucket; -1 where there are none."""
        servers = self.strategy.architecture.servers
        return [-1] * len(buckets) if servers is None else servers.owners(buckets, self.world_size)

    def exchanges(self) -> bool:
        """Whether there is anybody to exchange with; a server is, where rules act alone."""
        return self.world_size > 1 or (
            self.strategy.architecture.has_servers and self.strategy.synchronization.acts_alone
        )

    def seconds(self, move: Move) -> float:
        """How long a move takes by itself."""
        return seconds(self.network, move, self.world_size, self.num_servers)


class Which(NamedTuple):
    """One exchange of one bucket."""

    step: int
    number: int
    """Of the bucket."""
    bucket: Bucket


class Moved(NamedTuple):
    """A move that has been drawn."""

    ends: list[int]
    """What must end for it to have ended."""
    arrived: list[int]
    """What must end for a server to have got all of it; as `ends` where there is none."""


class TaskGraph:
    """Tasks so far, with their labels."""

    def __init__(self, inputs: Inputs, builder: GraphBuilder | None = None) -> None:
        self.inputs = inputs
        self.builder = builder or GraphBuilder()
        self.labels: list[Label] = []
        self._compute = [self.builder.resource(f"compute {number}") for number in range(len(inputs.classes))]
        self._codec = [self.builder.resource(f"communication {number}") for number in range(len(inputs.classes))]
        self._own = [self.builder.resource(f"links of class {number}") for number in range(len(inputs.classes))]
        self._starting = self.builder.resource(_STARTING)
        self._under_way: deque[list[int]] = deque(maxlen=_AT_ONCE)
        """What ends with each of the last exchanges that had to be started."""
        self._parts: dict[str, int] = {}
        self._order = 0
        self.step_ends: list[list[int]] = []
        """For every step and class the task with which it ends."""
        self.compute_tasks: list[int] = []

    def _label(self, label: Label) -> int:
        self.labels.append(label)
        return len(self.labels) - 1

    @property
    def parts(self) -> dict[str, int]:
        """Parts of the network by name, with the resources that stand for them."""
        return self._parts

    def _part(self, name: str) -> int:
        if name not in self._parts:
            self._parts[name] = self.builder.resource(name)
        return self._parts[name]

    def compute(self, kind: Kind, step: int, number: int, duration_s: float, after: Sequence[int]) -> int:
        """Ranks of one class compute."""
        slowdown = self.inputs.classes[number].slowdown
        task = self.builder.timed(
            duration_s * slowdown,
            resource=self._compute[number],
            after=after,
            label=self._label(Label(kind, step, number)),
        )
        self.compute_tasks.append(task)
        return task

    def code(self, kind: Kind, which: Which, rank_class: int, duration_s: float, after: Sequence[int]) -> list[int]:
        """The communication thread of one class computes; gives what must end for it to have done so."""
        if not duration_s and len(after) <= _FEW:
            return list(after)
        task = self.builder.timed(
            duration_s * self.inputs.classes[rank_class].slowdown,
            resource=self._codec[rank_class],
            priority=self._order,
            after=after,
            label=self._label(Label(kind, which.step, which.number)),
        )
        return [task]

    def next_in_order(self) -> None:
        """What is moved from now on goes after all that was moved before, where both wait for the same link."""
        self._order += 1

    def move(
        self,
        which: Which,
        move: Move,
        after: Sequence[int],
        *,
        portion: float = 1.0,
        alone: int | None = None,
        held_by: Sequence[int] = (),
    ) -> Moved:
        """A move on the network.

        portion: how much of it is done. alone: the class that makes it, if the others make theirs at other times.
        held_by: what a server waits for before it answers.
        """
        inputs = self.inputs
        if inputs.devices is not None:
            return self._flows(which, move, after, inputs.devices, portion=portion, held_by=held_by)
        (step, number, _), name, ends, arrived = which, _name(move), list(after), None
        share = portion if alone is None else portion * inputs.classes[alone].size / inputs.world_size
        for passage in inputs.network.passages(move, inputs.world_size, inputs.num_servers):
            if passage.answer and arrived is None:
                arrived, ends = ends, [*ends, *held_by]
            if passage.issue_s:
                ends = [self._begin(which, move, passage, ends, portion)]
            before, ends = ends, []
            if alone is not None and passage.rank_s:
                own = Label("exchange", step, number, _OWN, move.nbytes, name, passage.rank_s * portion)
                ends.append(self._hold(own, self._own[alone], before))
            moving = Label("exchange", step, number, passage.where, move.nbytes, name, passage.busy_s * share)
            ends.append(self._hold(moving, self._part(passage.where), before, startup_s=passage.startup_s * portion))
            for where, time_s in passage.beside:
                beside = Label("exchange", step, number, where, move.nbytes, name, time_s * share)
                ends.append(self._hold(beside, self._part(where), before))
            if passage.latency_s:
                waiting = self._label(Label("latency", step, number, passage.where, move.nbytes, name))
                ends = [self.builder.timed(passage.latency_s * portion, after=ends, label=waiting)]
            if passage.issue_s:
                self._under_way.append(ends)
        # A network may not tell the way back from the way there.
        return Moved([*ends, *held_by], ends) if arrived is None else Moved(ends, arrived)

    def _begin(self, which: Which, move: Move, passage: Passage, after: Sequence[int], portion: float) -> int:
        """Start something, one after the other and only so many at a time."""
        earlier = self._under_way[0] if len(self._under_way) == _AT_ONCE else []
        label = Label("start-up", which.step, which.number, passage.where, move.nbytes, _name(move))
        return self.builder.timed(
            passage.issue_s * portion,
            resource=self._starting,
            priority=self._order,
            after=list(dict.fromkeys([*after, *earlier])),
            label=self._label(label),
        )

    def _hold(self, label: Label, resource: int, after: Sequence[int], *, startup_s: float = 0.0) -> int:
        """Hold links while bytes move over them."""
        return self.builder.timed(
            startup_s + label.moving_s,
            resource=resource,
            priority=self._order,
            after=after,
            label=self._label(label),
        )

    def _flows(
        self,
        which: Which,
        move: Move,
        after: Sequence[int],
        devices: Indices,
        *,
        portion: float,
        held_by: Sequence[int],
    ) -> Moved:
        """A move whose messages share links with those of other jobs; a job's own moves take turns."""
        network, ends, arrived = self.inputs.network, list(after), None
        assert isinstance(network, FlowNetwork), "only flows can share links"
        stages = network.stages(move, self.inputs.world_size, self.inputs.num_servers)
        ways = [(stage.sources, stage.destinations, stage, move.nbytes) for stage in stages]
        if move.kind == "serve":
            ways += [(stage.destinations, stage.sources, stage, move.answer_bytes) for stage in stages]
        for number, (sources, destinations, stage, nbytes) in enumerate(ways):
            if move.kind == "serve" and number == len(stages):
                arrived, ends = ends, [*ends, *held_by]
            label = Label("exchange", which.step, which.number, LINK, move.nbytes, _name(move))
            transfer = self.builder.transfer(
                devices[sources],
                devices[destinations],
                stage.shares * nbytes * portion,
                latency_s=stage.num_steps * network.message_s * portion,
                resource=self._part(LINK),
                priority=self._order,
                after=ends,
                label=self._label(label),
            )
            ends = [transfer]
        return Moved(ends, ends if arrived is None else arrived)


def _name(move: Move) -> str:
    return f"{move.kind} {move.algorithm}"
