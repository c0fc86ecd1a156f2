"""Everything observable of a running strategy, so that two strategies can be distinguished, or not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

import torch

from laconic.core.plan import Plan
from laconic.core.tensor import TensorSpec
from laconic.experiments.verification.stage import Stage
from laconic.experiments.verification.trainee import Size, Trainee, digest
from laconic.strategy import Strategy

_FACTOR = 100
"""Runs that are not reproducible must differ by this factor more than two equal runs do."""


@dataclass(frozen=True)
class Observation:
    """The observations of one run; the same on every rank."""

    parameters: list[str]
    """A digest of every rank's parameters at the end."""
    values: list[list[float]]
    """A few numbers that follow from every rank's parameters, to say how much two runs differ."""
    sent: list[int]
    """Payload bytes of every rank."""
    buckets: list[list[str]]
    """The buckets of the last step."""
    plan: str
    """A digest of the buckets of a model with very many parameters."""
    in_flight: int
    """The most buckets of that model that may be in flight at a time, where bytes in flight are limited; else 0."""
    slots: int
    """Slots in which an aggregator has formed sums; else 0."""
    staleness: int
    """The largest staleness of all ranks."""

    def as_fact(self) -> dict[str, object]:
        """Plain containers."""
        return asdict(self)


@dataclass(frozen=True)
class Conditions:
    """The conditions under which two strategies are compared."""

    world_size: int
    size: Size
    start: int
    steps: int
    in_turns: bool
    """One rank after the other, so that the result is reproducible without a barrier."""


def observe(stage: Stage, strategy: Strategy, under: Conditions) -> Observation:
    """Make some steps and observe everything."""
    trainee = Trainee(stage, strategy, under.size)
    steps = range(under.start, under.start + under.steps)
    with trainee.attach(under.start) as session:
        if under.in_turns:
            for step in steps:
                for rank in range(stage.world_size):
                    if rank == stage.rank:
                        trainee.train([step])
                    if not strategy.architecture.has_servers:
                        session.state_dict()  # returns when no pair averages any more
                    stage.meet()
        else:
            trainee.train(steps)
            session.state_dict()  # returns when nothing is in flight any more
        sent, slots, staleness = session.traffic.sent_bytes("payload"), session.slots, session.staleness
        buckets = [[tensor.name for tensor in bucket.tensors] for bucket in session.plan.buckets]
        stage.meet()
    return Observation(
        stage.gather(digest(trainee.parameters().values())),
        stage.gather([_fingerprint(value) for value in trainee.parameters().values()]),
        stage.gather(sent),
        buckets,
        *_large_plan(strategy, stage.world_size),
        slots,
        max(stage.gather(staleness)),
    )


def _fingerprint(value: torch.Tensor) -> float:
    flat = value.reshape(-1).double()
    return float((flat * torch.arange(flat.numel(), dtype=torch.float64).cos()).sum())


@lru_cache(maxsize=64)
def _large_plan(strategy: Strategy, world_size: int) -> tuple[str, int]:
    """A digest of the buckets of 4096 tensors of 32 KiB, and how many may be in flight: large limits show there."""
    tensors = [TensorSpec(f"layers.{number}.weight", (128, 64)) for number in range(4096)]
    plans = strategy.plans(tensors, world_size)
    buckets = digest([torch.tensor([len(bucket.tensors) for plan in plans for bucket in plan.buckets])])
    return buckets, max(map(most_in_flight, plans))


def most_in_flight(plan: Plan) -> int:
    """The most buckets of a plan that are in flight at a time; 0: bytes in flight are not limited."""
    if not plan.credit_bytes:
        return 0
    most, first, under_way = 0, 0, 0
    # The next one is launched while those in flight have fewer bytes than allowed.
    for number, bucket in enumerate(plan.buckets):
        while under_way >= plan.credit_bytes:
            under_way -= plan.buckets[first].nbytes
            first += 1
        under_way += bucket.nbytes
        most = max(most, number + 1 - first)
    return most


def noise(one: Observation, same: Observation) -> float:
    """How much two runs of the same strategy differ, relative to the values themselves."""
    return 0.0 if one.parameters == same.parameters else _distance(one, same)


def difference(one: Observation, other: Observation, floor: float) -> str | None:
    """The difference in words; None if there is none."""
    if one.sent != other.sent:
        return f"{one.sent[0]} payload bytes instead of {other.sent[0]}"
    if one.buckets != other.buckets or one.plan != other.plan:
        return "other buckets"
    if one.in_flight != other.in_flight:
        return f"{one.in_flight} exchange(s) of a large model in flight at a time instead of {other.in_flight}"
    if one.slots != other.slots:
        return f"sums formed in {one.slots} slots instead of {other.slots}"
    if one.parameters != other.parameters and _distance(one, other) > _FACTOR * floor:
        return "other parameters"
    if one.staleness != other.staleness and not floor:
        return f"staleness {one.staleness} instead of {other.staleness}"
    return None


def _distance(one: Observation, other: Observation) -> float:
    left, right = torch.tensor(one.values), torch.tensor(other.values)
    return ((left - right).abs().max() / left.abs().max().clamp_min(1e-12)).item()
