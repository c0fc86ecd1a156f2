"""The task graph that lowerings build: compute, transfers, and a label for every task."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

from laconic.cluster.fabric import Indices
from laconic.core.exchange import Move
from laconic.core.hosts import Hosts
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.simulator.engine import GraphBuilder
from laconic.simulator.lowering.prices import Prices
from laconic.simulator.network import LINK, Network, Passage
from laconic.simulator.network.contract import seconds
from laconic.simulator.network.flow import FlowNetwork
from laconic.strategy import Strategy
from laconic.workload import CodecCost, Workload

Kind = Literal["forward", "backward", "optimizer", "encode", "start-up", "exchange", "decode", "latency"]

_OWN = "own links"
"""The links of ranks that send while others do not."""
_STARTING = "start-up"
"""The issue phase: one exchange at a time, while bytes of other exchanges move."""
_AT_ONCE = 3
"""Exchanges that can be in flight where start-up overlaps with the bytes of others: Gloo works on two at a time, and a
rank that has sent its own bytes of one starts the next while others have not."""
_FEW = 4
"""The number of dependencies up to which no task is added to represent them."""


@dataclass(frozen=True)
class RankClass:
    """Ranks that do the same at the same time."""

    size: int
    slowdown: float = 1.0
    """The factor on its compute times."""


class Label(NamedTuple):
    """The description of a task."""

    kind: Kind
    step: int
    of: int = 0
    """The class of ranks, for compute; the number of the bucket, for exchanges."""
    where: str = ""
    """The part of the network."""
    nbytes: int = 0
    move: str = ""
    """The kind of the move and its algorithm."""
    moving_s: float = 0.0
    """The time in which bytes move, at the end of the task."""
    launch_s: float = 0.0
    """Its additional delay if the device computes when it begins; see Passage."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a simulation."""

    strategy: Strategy
    """The strategy as attached, with hosts and measured costs."""
    workload: Workload
    world_size: int
    network: Network
    classes: tuple[RankClass, ...]
    """The classes of all ranks, the fastest first."""
    codec: CodecCost | None
    """Cost of encoding and decoding; None: nothing, or not measured."""
    hosts: Hosts = ()
    """Which ranks share a host; may be left out where nothing depends on it."""
    optimizer_s: float = 0.0
    """The time of the optimizer's step."""
    moment: Moment = field(default_factory=Moment)
    first_slowdown: float = 1.0
    """The slowdown of rank 0: plans are made from its times."""
    devices: Indices | None = None
    """The device of each rank, if its messages share links with other jobs; the network must then be a FlowNetwork."""
    start_s: float = 0.0
    """When the first step begins."""

    @property
    def num_servers(self) -> int:
        """The number of servers on workers' hosts; negative if they have hosts of their own; 0 if there are none."""
        servers = self.strategy.architecture.servers
        if servers is None:
            return 0
        count = servers.num_servers(self.world_size)
        return -count if servers.hosts else count

    @property
    def counted(self) -> list[int]:
        """The number of ranks of each class whose gradients are used: those of all ranks, or of the fastest ones."""
        sizes, rule = [ranks.size for ranks in self.classes], self.strategy.synchronization
        if not rule.takes_first:
            return sizes
        first = rule.num_first(self.world_size)
        faster = accumulate(sizes, initial=0)
        return [min(size, max(0, first - before)) for size, before in zip(sizes, faster, strict=False)]

    def owners(self, buckets: Sequence[Bucket]) -> list[int]:
        """The server of each bucket; -1 where there are no servers."""
        servers = self.strategy.architecture.servers
        return [-1] * len(buckets) if servers is None else servers.owners(buckets, self.world_size)

    def exchanges(self) -> bool:
        """Whether there is an exchange: among several ranks, or with a server."""
        return self.world_size > 1 or (
            self.strategy.architecture.has_servers and self.strategy.synchronization.acts_alone
        )

    def seconds(self, move: Move) -> float:
        """The duration of a move with nothing else in flight."""
        return seconds(self.network, move, self.world_size, self.num_servers)


class Which(NamedTuple):
    """One exchange of one bucket."""

    step: int
    number: int
    """The number of the bucket."""
    bucket: Bucket


class Moved(NamedTuple):
    """The tasks of a move."""

    ends: list[int]
    """The tasks after which the move has ended."""
    arrived: list[int]
    """The tasks after which a server has received all of it; equal to `ends` where there is none."""


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
        """The last task of each of the latest exchanges."""
        self._parts: dict[str, int] = {}
        self._order = 0
        self.step_ends: list[list[int]] = []
        """For every step and class, its last task."""
        self.compute_tasks: list[int] = []
        self.prices = Prices()
        self._first = [self.builder.timed(inputs.start_s)] if inputs.start_s else []

    def _label(self, label: Label) -> int:
        self.labels.append(label)
        return len(self.labels) - 1

    @property
    def parts(self) -> dict[str, int]:
        """Parts of the network by name, with their resources."""
        return self._parts

    def _part(self, name: str) -> int:
        if name not in self._parts:
            self._parts[name] = self.builder.resource(name)
        return self._parts[name]

    def compute(self, kind: Kind, step: int, number: int, duration_s: float, after: Sequence[int]) -> int:
        """Add compute of one class of ranks."""
        slowdown = self.inputs.classes[number].slowdown
        task = self.builder.timed(
            duration_s * slowdown,
            resource=self._compute[number],
            after=after or self._first,
            label=self._label(Label(kind, step, number)),
        )
        self.compute_tasks.append(task)
        return task

    def code(self, kind: Kind, which: Which, rank_class: int, duration_s: float, after: Sequence[int]) -> list[int]:
        """Add compute on the communication thread of one class; returns the tasks after which it is done."""
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
        """Moves from now on come after all earlier ones where both wait for the same link."""
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

        portion: the part of it that is done. alone: the class that makes it, if the others make theirs at other times.
        held_by: the tasks that a server waits for before it answers.
        """
        inputs = self.inputs
        if inputs.devices is not None:
            return self._flows(which, move, after, inputs.devices, portion=portion, held_by=held_by)
        (step, number, _), name, ends, arrived = which, _name(move), list(after), None
        share = portion if alone is None else portion * inputs.classes[alone].size / inputs.world_size
        passages, prices = inputs.network.passages(move, inputs.world_size, inputs.num_servers), self.prices
        drawn = prices.drawn(move, passages)
        for index, passage in enumerate(passages):
            if passage.answer and arrived is None:
                arrived, ends = ends, [*ends, *held_by]
            if passage.issue_s:
                ends = [self._begin(which, move, passage, ends, portion)]
                prices.note(ends[0], (drawn, index, "issue_s"), portion)
            before, ends = ends, []
            if alone is not None and passage.rank_s:
                own = Label("exchange", step, number, _OWN, move.nbytes, name, passage.rank_s * portion)
                ends.append(self._hold(own, self._own[alone], before))
                prices.note(ends[-1], (drawn, index, "rank_s"), portion)
            moving = Label(
                "exchange", step, number, passage.where, move.nbytes, name, passage.busy_s * share, passage.launch_s
            )
            ends.append(self._hold(moving, self._part(passage.where), before, startup_s=passage.startup_s * portion))
            if passage.startup_s:
                prices.note(ends[-1], (drawn, index, "startup_s"), portion)
            prices.note(ends[-1], (drawn, index, "busy_s"), share)
            for place, (where, time_s) in enumerate(passage.beside):
                beside = Label("exchange", step, number, where, move.nbytes, name, time_s * share)
                ends.append(self._hold(beside, self._part(where), before))
                prices.note(ends[-1], (drawn, index, place), share)
            if passage.latency_s:
                waiting = self._label(Label("latency", step, number, passage.where, move.nbytes, name))
                ends = [self.builder.timed(passage.latency_s * portion, after=ends, label=waiting)]
                prices.note(ends[0], (drawn, index, "latency_s"), portion)
            if passage.issue_s:
                self._under_way.append(ends)
        # A network may not distinguish the two directions.
        return Moved([*ends, *held_by], ends) if arrived is None else Moved(ends, arrived)

    def _begin(self, which: Which, move: Move, passage: Passage, after: Sequence[int], portion: float) -> int:
        """Launch an exchange: one after the other, and only a limited number at a time."""
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
        """A move whose messages share links with those of other jobs; moves of the same job take turns."""
        network, ends, arrived = self.inputs.network, list(after), None
        self.prices.complete = False  # the duration of flows depends on all of them
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
