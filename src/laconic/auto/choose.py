"""The child process of `auto`: waits for measurements, asks the planner, and prints the strategy to use.

Of the planner's strategies, only those are considered that a session can change to and from, and under which the
optimizer's step stays unchanged. Replicas may train alone for some steps only where it is known how long training will
take, because they have to become one model after the last step.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic.auto.planning import Decision, Option
from laconic.cluster import Cluster
from laconic.cluster.link import usual_link
from laconic.cluster.place import Setting
from laconic.planner import Limits, Question, answer
from laconic.planner.candidates import DDP, first_candidates, other_forms
from laconic.planner.choice import Choice, Judge
from laconic.planner.question import USUAL_STEPS, rated_bps
from laconic.planner.words import verdict
from laconic.runtime.change import why_not_changed
from laconic.strategy import Strategy
from laconic.workload import Workload
from laconic.workload.devices import device

_NICE = 10
_TRUSTED = 0.25
"""Relative error that a predicted step may have: more than predictions on probed links ever had in the lab."""
_RANGE, _HALVINGS = 100.0, 12
"""Links may be this many times as fast or slow as probed; this many halvings find their rate to 0.1%."""
_FEWEST_ROUNDS = 4
"""The fewest rounds that must still be possible where replicas train alone."""
_MEMORY_SHARE = 0.8
"""Usable share of free memory: a change takes buffers of its own, and activations differ from step to step."""


def choose(given: Mapping[str, Any]) -> Decision:
    """The strategy for these findings."""
    question = read_question(given)
    if given["seen"] is not None:
        text, step_s = given["seen"]
        question = as_steps_say(question, Strategy.parse(text), step_s)
    among = candidates(question, given["given_up"], steps_left=given["steps_left"], free_bytes=given["free_bytes"])
    found = answer(question, among=among, shard=False)
    alone = not found.best.strategy.exchanges_gradients()
    others = [
        choice
        for choice in found.top
        if choice is not found.best
        and choice.strategy != found.baseline.strategy
        and alone == (not choice.strategy.exchanges_gradients())
    ]
    return Decision(
        best=_option(found.best),
        reason=verdict(found),
        ddp_step_s=found.baseline.step_s,
        others=tuple(map(_option, others)),
    )


def _option(choice: Choice) -> Option:
    return Option(str(choice.strategy), choice.step_s, 1.0 if choice.loss is None else choice.loss.ratio)


def candidates(
    question: Question, given_up: Sequence[str] = (), *, steps_left: int | None, free_bytes: int | None
) -> list[Strategy]:
    """Strategies that a session may change to and from with the script unchanged, except those in `given_up`."""
    texts = {str(one): one for one in (*first_candidates(question), *other_forms(DDP, question))}
    tensors = question.workload.tensors
    return [
        one
        for text, one in texts.items()
        if text not in given_up
        and suits(one, steps_left)
        and (free_bytes is None or one.state_bytes(tensors) <= _MEMORY_SHARE * free_bytes)
    ]


def suits(strategy: Strategy, steps_left: int | None) -> bool:
    """Whether a script that was written for DDP runs unchanged under this strategy, from any step on."""
    begins = any(layer.name == "warmup" for layer in strategy.compression.layers())
    if why_not_changed(strategy) or strategy.scheduling.defers or begins or strategy.synchronization.warmup:
        return False
    if strategy.exchanges_gradients():
        return True
    return steps_left is not None and _FEWEST_ROUNDS * strategy.synchronization.cycle <= steps_left


def read_question(given: Mapping[str, Any]) -> Question:
    """The question for the planner."""
    cluster, gap = Cluster.from_toml(given["cluster"]), given["max_loss_gap"]
    # On a device without measured encoding costs, no compressor that encodes is chosen.
    lossless = gap is None or not given["device"]
    return Question(
        workload=Workload.from_json(given["workload"]),
        setting=Setting(
            cluster=cluster, workers=cluster.num_devices, bandwidth_bps=usual_link(cluster.links).bandwidth_bps
        ),
        device=None if given["device"] in ("", "cpu") else device(given["device"]),
        learns_text=given["task"] == "text",
        steps=given["total_steps"] or USUAL_STEPS,
        limits=Limits(lossless=True) if lossless else Limits(max_loss_gap=gap),
    )


def as_steps_say(question: Question, strategy: Strategy, step_s: float) -> Question:
    """The question with links on which a step under `strategy` would take as long as it was measured to take.

    The links were probed for a short time and with small messages, so a token bucket or a busy processor may have
    distorted the result. Where the steps of training disagree with the probe, the rate of links is derived from them.
    """

    def predicted_s(asked: Question) -> float:
        found = Judge(asked).choice(strategy)
        return math.inf if isinstance(found, str) else found.step_s

    probed_s = predicted_s(question)
    if math.isinf(probed_s) or abs(probed_s / step_s - 1) <= _TRUSTED:
        return question
    probed_bps = rated_bps(question.setting, inside=question.is_one_host)
    slowest, fastest = probed_bps / _RANGE, probed_bps * _RANGE
    for _ in range(_HALVINGS):
        middle = math.sqrt(slowest * fastest)
        if predicted_s(question.at_bandwidth(middle)) > step_s:
            slowest = middle
        else:
            fastest = middle
    return question.at_bandwidth(fastest)


def main() -> None:
    """Read the file that is named on standard input, print one line; without a name, nothing is asked any more."""
    os.nice(_NICE)  # training comes first
    if name := sys.stdin.readline().rstrip("\n"):
        given = json.loads(Path(name).read_text(encoding="utf-8"))
        sys.stdout.write(choose(given).to_json() + "\n")


if __name__ == "__main__":
    main()
