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
"""The loss must fall to this share of its first value: only a little, because some methods begin slowly."""
_SLOWER = 0.1
_NOT_LEARNED = ": it does not fall"


def check(stage: Stage, strategy: Strategy) -> Outcome:
    """Train a small task, and compare the first loss with the last."""
    usual = _train(stage, strategy, 1.0)
    if usual.verdict == "passed" or not usual.words.endswith(_NOT_LEARNED):
        return usual
    # What is sent late arrives in bursts, for which the usual rate may be too large; a smaller one must do.
    slower = _train(stage, strategy, _SLOWER)
    words = f"{slower.words}, at {_SLOWER:g} of the usual learning rate"
    return passed(words) if slower.verdict == "passed" else failed(f"{usual.words}; {words}")


def _train(stage: Stage, strategy: Strategy, rate: float) -> Outcome:
    trainee = Trainee(stage, strategy)
    for group in trainee.optimizer.param_groups:
        group["lr"] *= rate
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
    # JSON has no infinity, and every rank must come to the same verdict.
    losses = stage.gather(after if math.isfinite(after) else 1e30)
    told = f"loss {before:.3f} -> {max(losses):.3f} in {_STEPS} steps"
    return passed(told) if max(losses) <= _ENOUGH * before else failed(f"{told}{_NOT_LEARNED}")
