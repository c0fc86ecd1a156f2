"""A state saved in the middle of training and loaded into new objects continues training.

With a barrier, the next steps are bit-identical, or equal except for rounding where rounding depends on buckets.
Without a barrier the order of updates is not reproducible, so the loaded state is compared with the saved one, field by
field.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from laconic.core.plan import Plan
from laconic.experiments.verification.course import course
from laconic.experiments.verification.outcome import Outcome, failed, passed
from laconic.experiments.verification.stage import Stage
from laconic.experiments.verification.trainee import Trainee, digest
from laconic.runtime import Session
from laconic.strategy import Strategy

_AFTER = 3
"""Steps made after loading."""


def check(stage: Stage, strategy: Strategy) -> Outcome:
    """Save and load in the middle of training, and compare the steps that follow."""
    return _continues(stage, strategy) if strategy.synchronization.barrier else _is_the_same(stage, strategy)


@dataclass(frozen=True)
class _Saved:
    """Everything a rank writes to disk."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    session: dict[str, Any]

    @classmethod
    def of(cls, trainee: Trainee, session: Session) -> _Saved:
        # First the session: exchanges in flight may still change parameters.
        about = session.state_dict()
        return cls(copy.deepcopy(trainee.model.state_dict()), copy.deepcopy(trainee.optimizer.state_dict()), about)

    def into(self, trainee: Trainee, session: Session) -> None:
        trainee.model.load_state_dict(copy.deepcopy(self.model))
        trainee.optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        session.load_state_dict(copy.deepcopy(self.session))

    def leaves(self) -> dict[str, object]:
        found = {"model": self.model, "optimizer": self.optimizer, "session": self.session}
        return dict(_leaves("", found))


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{path}/{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _leaves(f"{path}/{index}", inner)
    else:
        yield path.lstrip("/"), digest([value]) if isinstance(value, torch.Tensor) else value


def _continues(stage: Stage, strategy: Strategy) -> Outcome:
    trainee = Trainee(stage, strategy)
    watched = course(strategy, trainee.specs(), stage.world_size)
    points = _points(strategy, watched.steps)
    last = max(points) + _AFTER
    saved: dict[int, _Saved] = {}
    right: dict[int, list[torch.Tensor]] = {}
    plans: dict[int, Plan] = {}
    rounds_by_bucket = strategy.architecture.rounds_by_bucket or strategy.codec.traits.rounds_by_place
    rounded = False
    with trainee.attach(watched.start) as session:
        for step in range(watched.start, last):
            plans[step] = session.plan
            trainee.train([step])
            right[step] = _copied(trainee)
            if step + 1 in points:
                saved[step + 1] = _Saved.of(trainee, session)
        stage.meet()
    for point in points:
        again = Trainee(stage, strategy)
        wrong: int | None = None
        same = _equal
        with again.attach() as session:
            saved[point].into(again, session)
            for step in range(point, point + _AFTER):
                if rounds_by_bucket and session.plan != plans[step]:
                    # A schedule that measures makes its buckets anew after loading.
                    same, rounded = _close, True
                again.train([step])
                if wrong is None and not same(_copied(again), right[step]):
                    wrong = step
            stage.meet()
        for rank, step in enumerate(stage.gather(wrong)):
            if step is not None:
                return failed(
                    f"saved after {point} steps and loaded: step {step} of rank {rank} gives other parameters"
                )
    where = " and ".join(f"{point} ({words})" for point, words in points.items())
    how = "the same except for rounding, as buckets were made anew" if rounded else "bit-identical"
    return passed(f"saved after {where} steps and loaded: the next {_AFTER} steps {how}")


def _copied(trainee: Trainee) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainee.parameters().values()]


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return digest(some) == digest(others)


def _close(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether nothing but rounding is different."""
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(some, others, strict=True))


def _points(strategy: Strategy, steps: range) -> dict[int, str]:
    """The steps after which to save, with the reason for each."""
    rule = strategy.synchronization
    if rule.quantity != "change":
        return {steps.start + 3: "between two exchanges"}
    rounds = [count for count in range(steps.start + 1, steps.stop + 1) if rule.due(count)]
    if rule.delay:
        # The exchange has begun and takes effect later.
        begun = rounds[len(rounds) // 2]
        return {begun: "a fragment in flight", begun + rule.delay - 1: "just before it is applied"}
    return {rounds[-1] - 1: "a step before an outer step", rounds[-1]: "right after one"}


def _is_the_same(stage: Stage, strategy: Strategy) -> Outcome:
    trainee = Trainee(stage, strategy)
    watched = course(strategy, trainee.specs(), stage.world_size)
    with trainee.attach(watched.start) as session:
        trainee.train(watched.steps)
        stage.meet()
        saved = _Saved.of(trainee, session)
        stage.meet()
    again = Trainee(stage, strategy)
    with again.attach() as session:
        saved.into(again, session)
        stage.meet()
        found = _Saved.of(again, session).leaves()
        stage.meet()
        again.train([watched.steps[-1] + 1])
        stage.meet()
    wanted = saved.leaves()
    wrong = next((key for key in {**wanted, **found} if wanted.get(key) != found.get(key)), None)
    for rank, key in enumerate(stage.gather(wrong)):
        if key is not None:
            return failed(f"saved and loaded on rank {rank}: {key} is not what it was")
    return passed(f"saved and loaded: all {len(wanted)} values as they were on every rank, and training continues")
