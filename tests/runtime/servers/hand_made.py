"""Servers driven by hand: frames as a worker would send them, and what comes back, without sockets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from laconic.core.frames import ERROR, Frame
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.runtime.servers.parameter_store import ParameterStore
from laconic.runtime.servers.protocol import PUSH, REDUCE, Configuration
from laconic.runtime.servers.sum_server import SumServer
from laconic.strategy import Strategy

BUCKET = Bucket((TensorSpec("a", (3, 2), torch.float32), TensorSpec("b", (5,), torch.float32)))
SGD = {"lr": 0.5, "momentum": 0.0, "dampening": 0, "weight_decay": 0.0, "nesterov": False, "maximize": False}


@dataclass
class Answers:
    """What a server has answered, in order."""

    frames: list[Frame] = field(default_factory=list)

    def __call__(self, frame: Frame) -> None:
        self.frames.append(frame)

    def to(self, rank: int) -> list[Frame]:
        return [frame for frame in self.frames if frame.sender == rank]

    def errors(self) -> dict[int, str]:
        return {frame.sender: frame.note for frame in self.frames if frame.kind == ERROR}


def configuration(
    strategy: str, world_size: int, *, optimizer: str = "", groups: Sequence[dict[str, object]] = (), **rest: object
) -> Configuration:
    members = {"a": 0, "b": 0} | dict(rest.pop("group_of", {}))  # type: ignore[call-overload]
    return Configuration(
        strategy,
        world_size,
        0,
        {0: BUCKET},
        optimizer,
        tuple(groups),
        tuple(members.items()) if optimizer else (),
        **rest,  # type: ignore[arg-type]
    )


class ShelfByHand:
    """A store with one bucket, and pushes to it."""

    def __init__(
        self,
        strategy: str,
        world_size: int,
        *,
        optimizer: str = "SGD",
        groups: Sequence[dict[str, object]] = (SGD,),
        values: torch.Tensor | None = None,
        group_of: dict[str, int] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        parsed = Strategy.parse(strategy)
        assert not parsed.synchronization.barrier
        self.compression = parsed.compression
        self.groups = list(groups)
        self.answers = Answers()
        about = configuration(strategy, world_size, optimizer=optimizer, groups=groups, group_of=group_of or {})
        self.start = torch.arange(float(BUCKET.numel)) if values is None else values
        self.store = ParameterStore(
            0, about, parsed.compression, parsed.synchronization, self.start.clone(), now_s=now_s
        )
        self._states = [parsed.compression.init(BUCKET) for _ in range(world_size)]
        self._world_size = world_size

    def push(
        self, rank: int, gradient: torch.Tensor, step: int = 0, *, unused: Sequence[int] = (), note: str | None = None
    ) -> None:
        state = self._states[rank]
        state.moment = Moment(step, rank, self._world_size, step)
        payload = self.compression.encode(gradient.clone(), state)
        text = json.dumps({"step": step, "groups": self.groups, "unused": list(unused)})
        self.store.push(Frame(PUSH, rank, 0, 0, text if note is None else note, payload.tensors), self.answers)

    def values(self) -> torch.Tensor:
        return self.store.pull(0)


class AggregatorByHand:
    """An aggregator of one bucket, and parts of sums for it."""

    def __init__(self, strategy: str, world_size: int) -> None:
        self.compression = Strategy.parse(strategy).compression
        self.aggregator = SumServer(BUCKET, self.compression, world_size=world_size, server=0)
        self.answers = Answers()
        self._states = [self.compression.init(BUCKET) for _ in range(world_size)]
        self._world_size = world_size

    def add(self, rank: int, flat: torch.Tensor, step: int = 0) -> None:
        state = self._states[rank]
        state.moment = Moment(step, rank, self._world_size, step)
        self.add_tensors(rank, self.compression.encode(flat.clone(), state).tensors, step, decoded=True)

    def add_tensors(self, rank: int, tensors: Sequence[torch.Tensor], step: int = 0, *, decoded: bool = False) -> None:
        note = json.dumps({"step": step, "round": step, "decoded": decoded})
        self.aggregator.add(Frame(REDUCE, rank, 0, 0, note, tuple(tensors)), self.answers)
