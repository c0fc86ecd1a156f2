"""The board that lowerings draw on: who computes, what is under way, and what every task is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from laconic.architecture import ParameterServer
from laconic.cluster.fabric import Indices
from laconic.core.exchange import Move
from laconic.core.moment import Moment
from laconic.core.plan import Bucket, Plan
from laconic.simulator.engine import GraphBuilder
from laconic.simulator.network import LINK, Network
from laconic.simulator.network.contract import seconds
from laconic.simulator.network.flow import FlowNetwork
from laconic.strategy import Strategy
from laconic.workload import CodecCost, Workload

Kind = Literal["forward", "backward", "optimizer", "encode", "exchange", "decode", "latency"]

WINDOW = 8
"""Exchanges the runtime has open at a time."""


@dataclass(frozen=True)
class RankClass:
    """Ranks that do the same at the same time."""

    size: int
    slowdown: float = 1.0
    """By what its compute times are multiplied."""


@dataclass(frozen=True)
class Label:
    """What a task is."""

    kind: Kind
    step: int
    of: int = 0
    """The class of ranks, for compute; the number of the bucket, for what is exchanged."""
    where: str = ""
    """The part of the network."""
    nbytes: int = 0
    move: str = ""
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
    codec: CodecCost | None
    """What encoding and decoding cost; None: nothing, or nobody knows."""
    optimizer_s: float = 0.0
    """What the optimizer's step takes, when all gradients are there."""
    moment: Moment = field(default_factory=Moment)
    devices: Indices | None = None
    """Where each rank runs, if what it sends shares links with other jobs; then the network must be a FlowNetwork."""

    @property
    def num_servers(self) -> int:
        """Servers beside workers; negative if they have hosts of their own; 0 if there are none."""
        architecture = self.strategy.architecture
        if not isinstance(architecture, ParameterServer):
            return 0
        count = architecture.num_servers(self.world_size)
        return -count if architecture.hosts else count

    def moves(self, bucket: Bucket, *, halves: bool = False) -> tuple[Move, ...]:
        """What one exchange of `bucket` does on the network."""
        strategy = self.strategy
        return strategy.architecture.moves(bucket, strategy.compression, self.moment, halves=halves)

    def pair_moves(self, bucket: Bucket) -> tuple[Move, ...]:
        """What a rank does for one average of its own and one that it is asked for."""
        nbytes = self.strategy.architecture.pairwise_bytes(bucket, self.strategy.compression, self.moment)
        return (Move("send", (nbytes,)),)

    def code_s(self, kind: Kind, bucket: Bucket) -> float:
        """How long it takes to encode a bucket, or to decode what has arrived for it."""
        if self.codec is None:
            return 0.0
        if kind == "encode":
            return self.codec.encode_s(bucket.nbytes)
        kinds = [move.kind for move in self.moves(bucket)]
        # Payloads of all ranks, or a share of each and then the shares of the sum, or one.
        payloads = 2 if "scatter" in kinds else self.world_size if "gather" in kinds else 1
        return self.codec.decode_s(bucket.nbytes) * payloads

    def seconds(self, move: Move) -> float:
        """How long a move takes by itself."""
        return seconds(self.network, move, self.world_size, self.num_servers)


class Which(NamedTuple):
    """One exchange of one bucket."""

    step: int
    number: int
    """Of the bucket."""
    bucket: Bucket


class Drawing:
    """Tasks so far, with their labels."""

    def __init__(self, inputs: Inputs, builder: GraphBuilder | None = None) -> None:
        self.inputs = inputs
        self.builder = builder or GraphBuilder()
        self.labels: list[Label] = []
        self._compute = [self.builder.resource(f"compute {number}") for number in range(len(inputs.classes))]
        self._codec = [self.builder.resource(f"communication {number}") for number in range(len(inputs.classes))]
        self._numbers = range(len(inputs.classes))
        self._parts: dict[str, int] = {}
        self._order = 0
        self.step_ends: list[list[int]] = []
        """For every step and class the task with which it ends."""
        self.compute_tasks: list[int] = []

    def _label(self, label: Label) -> int:
        self.labels.append(label)
        return len(self.labels) - 1

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

    def part(self, name: str) -> int:
        """The resource that stands for a part of the network."""
        if name not in self._parts:
            self._parts[name] = self.builder.resource(name)
        return self._parts[name]

    @property
    def parts(self) -> dict[str, int]:
        """Parts of the network by name, with the resources that stand for them."""
        return self._parts

    def next_in_order(self) -> None:
        """What is moved from now on goes after all that was moved before, where both wait for the same link."""
        self._order += 1

    def encode(self, which: Which, ready: Sequence[Sequence[int]], after: Sequence[int]) -> list[int]:
        """Each class encodes a bucket when it is ready there; gives what must end for all to have done so."""
        self.next_in_order()
        each = (self._code("encode", which, number, [*ready[number], *after]) for number in self._numbers)
        return [task for tasks in each for task in tasks]

    def decode(self, which: Which, after: Sequence[int]) -> list[list[int]]:
        """Each class decodes what has arrived; gives for each what must end for it to have done so."""
        return [self._code("decode", which, number, after) for number in self._numbers]

    def code_alone(self, kind: Kind, which: Which, rank_class: int, after: Sequence[int]) -> list[int]:
        """One class encodes or decodes a bucket, whatever the others do."""
        if kind == "encode":
            self.next_in_order()
        return self._code(kind, which, rank_class, after)

    def _code(self, kind: Kind, which: Which, rank_class: int, after: Sequence[int]) -> list[int]:
        time_s = self.inputs.code_s(kind, which.bucket)
        if not time_s:
            return list(after)
        label = self._label(Label(kind, which.step, which.number))
        resource = self._codec[rank_class]
        return [self.builder.timed(time_s, resource=resource, priority=self._order, after=after, label=label)]

    def move(self, which: Which, move: Move, after: Sequence[int], *, share: float = 1.0) -> list[int]:
        """A move on the network; share: how many of all ranks take part. Gives what must end for it to have ended."""
        inputs = self.inputs
        if inputs.devices is not None:
            return self._flows(which, move, after, inputs.devices)
        ends = list(after)
        name = f"{move.kind} {move.algorithm}"
        for passage in inputs.network.passages(move, inputs.world_size, inputs.num_servers):
            where, moving_s = passage.where, passage.busy_s * share
            label = Label("exchange", which.step, which.number, where, move.nbytes, name, moving_s)
            ends = [
                self.builder.timed(
                    passage.startup_s + moving_s,
                    resource=self.part(where),
                    priority=self._order,
                    after=ends,
                    label=self._label(label),
                )
            ]
            if passage.latency_s:
                waiting = Label("latency", which.step, which.number, where, move.nbytes, name)
                ends = [self.builder.timed(passage.latency_s, after=ends, label=self._label(waiting))]
        return ends

    def _flows(self, which: Which, move: Move, after: Sequence[int], devices: Indices) -> list[int]:
        """A move whose messages share links with those of other jobs; a job's own moves take turns."""
        network, ends = self.inputs.network, list(after)
        assert isinstance(network, FlowNetwork), "only flows can share links"
        stages = network.stages(move, self.inputs.world_size, self.inputs.num_servers)
        ways = [(stage, move.nbytes) for stage in stages]
        if move.kind == "serve":
            ways += [(stage, move.answer_bytes) for stage in stages]
        for stage, nbytes in ways:
            label = Label("exchange", which.step, which.number, LINK, move.nbytes, f"{move.kind} {move.algorithm}")
            transfer = self.builder.transfer(
                devices[stage.sources],
                devices[stage.destinations],
                stage.shares * nbytes,
                latency_s=stage.num_steps * network.message_s,
                resource=self.part(LINK),
                priority=self._order,
                after=ends,
                label=self._label(label),
            )
            ends = [transfer]
        return ends


class Submission:
    """What the communication thread has open: exchanges start in order, and only while there is room for them."""

    def __init__(self, plan: Plan) -> None:
        self._credit = plan.credit_bytes
        self._open: list[tuple[int, list[int]]] = []
        self._bytes = 0

    def room(self) -> list[int]:
        """What must have ended before the next exchange may start."""
        needed: list[int] = []
        while self._open and self._full():
            nbytes, ends = self._open.pop(0)
            self._bytes -= nbytes
            needed = ends  # exchanges are waited for in order: this one being done, those before it are
        return needed

    def _full(self) -> bool:
        return self._bytes >= self._credit if self._credit else len(self._open) >= WINDOW

    def opened(self, nbytes: int, ends: list[int]) -> None:
        """An exchange of so many bytes, which ends with these tasks."""
        self._open.append((nbytes, ends))
        self._bytes += nbytes
