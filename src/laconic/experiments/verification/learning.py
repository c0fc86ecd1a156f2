"""The loss falls on a small task, and parameters stay finite."""

from __future__ import annotations

import math

from laconic.experiments.verification.course import course
from laconic.experiments.verification.outcome import Outcome, failed, passed
from laconic.experiments.verification.stage import Stage
from laconic.experiments.verification.trainee import Trainee
from laconic.strategy import Strategy

_STEPS = 24
_ENOUGH = 0.97
"""What the loss must have fallen to, as a share of what it was: little, because some methods begin slowly."""


def check(stage: Stage, strategy: Strategy) -> Outcome:
    """See the module."""
    trainee = Trainee(stage, strategy)
    start = course(strategy, trainee.specs(), stage.world_size).start
    before = trainee.held_out_loss()
    with trainee.attach(start) as session:
        trainee.train(range(start, start + _STEPS))
        session.average()
        stage.meet()
    after = trainee.held_out_loss()
    finite = bool(trainee.flat().isfinite().all())
    if not all(stage.gather(finite)):
        return failed(f"after {_STEPS} steps a parameter is not finite")
    # JSON has no infinity, and every rank has to come to the same verdict.
    losses = stage.gather(after if math.isfinite(after) else 1e30)
    told = f"loss {before:.3f} -> {max(losses):.3f} in {_STEPS} steps"
    return passed(told) if max(losses) <= _ENOUGH * before else failed(f"{told}: it does not fall")
