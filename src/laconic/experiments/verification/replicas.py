"""Replicas are equal when the strategy promises it; otherwise they come closer, and their mean is preserved."""

from __future__ import annotations

import time
from typing import TypeVar

import torch

from laconic.experiments.verification.course import course, with_length
from laconic.experiments.verification.outcome import Outcome, failed, not_applicable, passed
from laconic.experiments.verification.stage import Stage
from laconic.experiments.verification.trainee import Trainee, digest
from laconic.runtime import Session
from laconic.runtime.hooks.rounds import PENDING
from laconic.strategy import Strategy
from laconic.synchronization import Synchronization

Seen = TypeVar("Seen")
_TOLERANCE = 1e-5
"""Rounding error of a mean of float32 values after many additions, relative to the largest."""
_SMALLER = 0.5
"""The remaining share of the distance between replicas once they have mixed enough."""
_MOST_ROUNDS = 600
_LEAST_ROUNDS = 3
_BREATH_S = 0.005
"""Pause between steps that only wait for others to average in the background."""


def check(stage: Stage, strategy: Strategy) -> Outcome:
    """Compare replicas where the strategy promises that they are equal."""
    if strategy.architecture.scope == "neighbours":
        return _come_closer(stage, strategy)
    if not strategy.synchronization.barrier:
        return _get_what_servers_hold(stage, strategy)
    if strategy.synchronization.quantity == "change":
        return _equal_after_rounds(stage, strategy, strategy.synchronization)
    if strategy.synchronization.replicas_identical or strategy.synchronization.interval > 1:
        return _equal_after_steps(stage, strategy, with_length(strategy).synchronization)
    return not_applicable(f"{strategy.synchronization.name} does not say when replicas are equal")


def _equal_after_steps(stage: Stage, strategy: Strategy, rule: Synchronization) -> Outcome:
    trainee = Trainee(stage, strategy)
    watched = course(strategy, trainee.specs(), stage.world_size)
    seen: list[str] = []
    with trainee.attach(watched.start):
        for step in watched.steps:
            trainee.train([step])
            seen.append(digest(trainee.parameters().values()))
    all_seen = stage.gather(seen)
    together = [step for step in watched.steps if rule.replicas_identical or step < rule.warmup or rule.returns(step)]
    apart = [step for step, found in zip(watched.steps, _by_step(all_seen), strict=True) if len(set(found)) > 1]
    if wrong := [step for step in apart if step in together]:
        return failed(f"parameters of {stage.world_size} ranks differ after step {wrong[0]}")
    if len(set(seen)) < len(seen):
        return failed("a step has left the parameters as they were")
    steps = f"each of {len(seen)} steps" if rule.replicas_identical else f"{len(together)} of {len(seen)} steps"
    return passed(f"parameters bit-identical on {stage.world_size} ranks after {steps}")


def _equal_after_rounds(stage: Stage, strategy: Strategy, rule: Synchronization) -> Outcome:
    trainee = Trainee(stage, strategy)
    watched = course(strategy, trainee.specs(), stage.world_size)
    parts = [[tensor.name for tensor in part] for part in rule.parts(trainee.specs())[: rule.num_parts]]
    seen: list[list[str]] = []
    anchors: list[str] = []
    with trainee.attach(watched.start) as session:
        for step in watched.steps:
            trainee.train([step])
            seen.append([digest(trainee.parameters()[name] for name in part) for part in parts])
            anchors.append(digest(fields[rule.anchor] for fields in _state(session).values()))
    all_seen = _by_step(stage.gather(seen))
    all_anchors = _by_step(stage.gather(anchors))
    at_once = not rule.delay and not rule.keep
    rounds, apart = 0, 0
    for step, found, agreed in zip(watched.steps, all_seen, all_anchors, strict=True):
        if len(set(agreed)) > 1:
            return failed(f"what ranks last agreed on ({rule.anchor}) differs after step {step}")
        apart += any(replica != found[0] for replica in found)
        for part in rule.due(step + 1):
            rounds += 1
            if at_once and part < rule.num_parts and len({replica[part] for replica in found}) > 1:
                return failed(f"parameters differ after step {step}, which ended with an outer step")
    if len(set(anchors)) < 2:
        return failed(f"what ranks last agreed on ({rule.anchor}) never changed in {len(anchors)} steps")
    what = "parameters, and what was agreed on," if at_once else "what was agreed on"
    return passed(f"{what} bit-identical after {rounds} outer steps; replicas apart after {apart} of {len(seen)} steps")


def _come_closer(stage: Stage, strategy: Strategy) -> Outcome:
    trainee = Trainee(stage, strategy)
    watched = course(strategy, trainee.specs(), stage.world_size)
    rule = strategy.synchronization
    with trainee.attach(watched.start) as session:
        trainee.train(watched.steps)
        # Local steps would drive replicas apart again; without them, only mixing is left.
        trainee.rest()
        before = distance = session.consensus_distance()
        rounds = rule.lasting_rounds
        _mix(trainee, rounds)
        mean = _mean(stage, trainee, session)
        while distance > _SMALLER * before and rounds < _MOST_ROUNDS:
            _mix(trainee, _LEAST_ROUNDS)
            rounds += _LEAST_ROUNDS
            distance = session.consensus_distance()
        drift = (_mean(stage, trainee, session) - mean).abs().max().item() / mean.abs().max().item()
    if before == 0.0:
        return failed("replicas were equal before they could mix: they do not train on their own")
    told = f"distance of replicas {before:.2e} -> {distance:.2e} in {rounds} rounds"
    if distance > _SMALLER * before:
        return failed(f"{told}: they do not come closer")
    # Every round may round every value once.
    rounding = _TOLERANCE + rounds * 2**-24
    if not drift <= rounding:
        return failed(f"{told}, but their mean moved by {drift:.1e} of its size; {rounding:.0e} is rounding")
    return passed(f"{told}; mean kept to {drift:.1e}")


def _mix(trainee: Trainee, rounds: int) -> None:
    """Rounds of a replica that makes no updates of its own."""
    rule = trainee.strategy.synchronization
    for _ in range(rounds * rule.interval):
        trainee.optimizer.step()
        if not rule.barrier:
            time.sleep(_BREATH_S)


def _get_what_servers_hold(stage: Stage, strategy: Strategy) -> Outcome:
    trainee = Trainee(stage, strategy)
    watched = course(strategy, trainee.specs(), stage.world_size)
    rule = strategy.synchronization
    # Changes of parameters must all have been sent.
    last = next(step for step in reversed(watched.steps) if rule.due(step + 1))
    with trainee.attach(watched.start) as session:
        trainee.train(range(watched.start, last + 1))
        session.average()
        averaged, found = trainee.flat(), stage.gather(digest(trainee.parameters().values()))
        if rule.optimizer_on_servers:
            # A step of length zero fetches the servers' parameters, and changes nothing else.
            trainee.rest()
            trainee.train([last + 1])
            held = trainee.flat()
        else:
            state = _state(session)  # for which ranks have taken the servers' parameters
            held = torch.cat([state[name][rule.anchor].reshape(-1) for name in trainee.parameters()])
        moved = (held - averaged).abs().max().item() / averaged.abs().max().item()
    if len(set(found)) > 1:
        return failed(f"parameters of {stage.world_size} ranks differ after average()")
    most = max(stage.gather(moved))
    if not most <= _TOLERANCE:
        return failed(f"after average() ranks hold something else than the servers, by {most:.1e} of its size")
    return passed(f"after average() bit-identical on {stage.world_size} ranks, and what servers hold (to {most:.0e})")


def _mean(stage: Stage, trainee: Trainee, session: Session) -> torch.Tensor:
    """The mean that mixing preserves, over replicas once everything in flight has arrived."""
    state, weights = _state(session), trainee.strategy.architecture.weight_field
    held: list[torch.Tensor] = []
    for name, parameter in trainee.parameters().items():
        fields = state.get(name, {})
        value = fields.get(PENDING, parameter).double()
        held.append((value * fields[weights] if weights is not None else value).reshape(-1))
    return stage.total(torch.cat(held)) / stage.world_size


def _state(session: Session) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = session.state_dict()["ranks"][str(session.rank)]
    return found


def _by_step(gathered: list[list[Seen]]) -> list[tuple[Seen, ...]]:
    """One entry per step: the observations of each rank after it."""
    return list(zip(*gathered, strict=True))
