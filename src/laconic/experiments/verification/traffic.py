"""Ranks send the number of bytes that formulas predict, for every exchange that began in the observed steps."""

from __future__ import annotations

from laconic.core.moment import Moment
from laconic.core.plan import Plan
from laconic.experiments.verification.course import Course, course, opening
from laconic.experiments.verification.outcome import Outcome, failed, passed
from laconic.experiments.verification.stage import Stage
from laconic.experiments.verification.trainee import Trainee
from laconic.runtime import Session
from laconic.strategy import Strategy


def check(stage: Stage, strategy: Strategy) -> Outcome:
    """Compare the bytes that ranks send with the formulas of the strategy."""
    trainee = Trainee(stage, strategy)
    specs = trainee.specs()
    first = opening(strategy, specs, stage.world_size)
    told: list[str] = []
    for watched in [*([first] if first else []), course(strategy, specs, stage.world_size)]:
        outcome = _watch(stage, strategy, watched)
        if outcome.verdict != "passed":
            return outcome
        told.append(outcome.words)
    return passed("; then ".join(told))


def _watch(stage: Stage, strategy: Strategy, watched: Course) -> Outcome:
    trainee = Trainee(stage, strategy)
    predicted = 0
    with trainee.attach(watched.start) as session:
        plans = _plans(trainee, session)
        for step in watched.steps:
            # A new plan is made once the order of gradients is known.
            predicted += _predicted(trainee, session, plans if len(plans) > 1 else [session.plan], step)
            trainee.train([step])
        session.state_dict()  # returns when everything in flight has been sent
        counted = session.traffic.sent_bytes("payload")
        stage.meet()
    all_counted, all_predicted = stage.gather(counted), stage.gather(predicted)
    steps = f"{watched.count} steps"
    if not strategy.synchronization.barrier and not strategy.architecture.has_servers:
        # Which replica starts an exchange depends on timing, so a single rank may send more than its share.
        all_counted, all_predicted = [sum(all_counted)], [sum(all_predicted)]
        steps += " of all ranks together"
    for rank, (sent, expected) in enumerate(zip(all_counted, all_predicted, strict=True)):
        if sent > expected or (strategy.exact() and sent != expected) or (expected and not sent):
            who = f"rank {rank} sent" if len(all_counted) > 1 else "ranks sent"
            limit = "" if strategy.exact() else "between 1 and "
            return failed(f"{who} {sent} payload bytes in {steps}, predicted are {limit}{expected}")
    sent, expected = all_counted[0], all_predicted[0]
    if strategy.exact():
        return passed(f"{sent} payload bytes sent in {steps} as predicted")
    return passed(f"{sent} payload bytes sent in {steps}, at most {expected} predicted")


def _plans(trainee: Trainee, session: Session) -> list[Plan]:
    """One plan for each fragment of the model."""
    return session.strategy.plans(trainee.specs(), session.world_size)


def _predicted(trainee: Trainee, session: Session, plans: list[Plan], step: int) -> int:
    """Bytes of the exchanges that begin with this step."""
    strategy, rule = session.strategy, session.strategy.synchronization
    moment = _moment(session, step)
    if rule.quantity != "change" and strategy.architecture.scope == "everyone":
        return sum(strategy.plan_bytes(plan, moment) for plan in plans) if rule.due(step + 1) else 0
    # Parameters are sent after the step, or before it where nothing is sent during the backward pass.
    waits = strategy.mixes_parameters() and rule.barrier and plans[0].launch == "after_backward"
    num_steps = step if waits else step + 1
    due = rule.due(num_steps) if num_steps else []
    return sum(strategy.plan_bytes(plans[part], _moment(session, num_steps - 1)) for part in due)


def _moment(session: Session, step: int) -> Moment:
    return Moment(step, session.rank, session.world_size, session.strategy.synchronization.round_number(step))
