"""One strategy in one setting: the time to torch DDP's loss, with its range, and its other costs.

    time = steps x step x (steps needed / steps of bsp)

The range is that of the steps needed, and of step times by the largest error that predictions had in the lab
(docs/results): 9.6% where links had been probed (plan_regret.md), 15.3% at rates beyond those (simulator.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from laconic.errors import LaconicError, one_line
from laconic.losses import LossCost, loss_cost
from laconic.planner.question import Question
from laconic.prices.codec_costs import known_codecs
from laconic.prices.memory import Memory, memory_of
from laconic.simulator import Prediction, Simulation, simulate
from laconic.simulator.network.analytic import AnalyticNetwork
from laconic.strategy import Strategy
from laconic.workload import Workload

PROBED_ERROR, FORMULA_ERROR = 0.096, 0.153
Standing = Literal["ranked", "limits", "unknown"]
"""ranked: may be the answer. limits: would break one of the limits. unknown: not enough is known about its loss."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The prediction for one strategy."""

    strategy: Strategy
    prediction: Prediction
    """The prediction of a step late in training."""
    step_s: float
    """The mean step time over all of training, which may begin with other steps."""
    seconds: float
    """The time to torch DDP's final loss; where the steps needed are unknown, DDP's number of steps is assumed."""
    seconds_low: float
    seconds_high: float
    loss: LossCost | None
    memory: Memory
    """The memory of one device."""
    standing: Standing
    reason: str = ""
    """Why it is not ranked."""
    islands: bool = False
    """Whether hosts are the workers and FSDP2 shards the model inside each."""

    @property
    def loses_nothing(self) -> bool:
        """Whether it computes what torch DDP computes."""
        return self.loss is not None and self.loss.known == "same"


class Judge:
    """Simulates strategies for one question and rates them."""

    def __init__(self, question: Question, drawn: dict[str, Simulation] | None = None, *, among: str = "") -> None:
        """drawn: a cache of simulations of the same question at other bandwidths; new ones are added.

        among: the kind of workers, where `drawn` holds simulations with other kinds as well.
        """
        self.question = question
        self._drawn = drawn
        self._among = among
        self._network = AnalyticNetwork(question.setting.cluster)
        self._workload = question.workload
        self._known: dict[str, Prediction | str] = {}

    def choice(self, strategy: Strategy) -> Choice | str:
        """The prediction for the strategy, or why it cannot run."""
        question = self.question
        found = self._prediction(strategy)
        if isinstance(found, str):
            return found
        loss, step_s = loss_cost(strategy, question.scale), found.step_s
        begins = beginning(strategy, question.steps)
        if begins is not None:
            share, first = begins
            early = self._prediction(first)
            step_s = step_s if isinstance(early, str) else share * early.step_s + (1 - share) * step_s
        error = PROBED_ERROR if question.setting.cluster.measured is not None else FORMULA_ERROR
        whole_s = question.steps * step_s
        ratio, low, high = (1.0, 1.0, 1.0) if loss is None else (loss.ratio, loss.ratio_low, loss.ratio_high)
        memory = memory_of(strategy, question.workload, question.setting.workers)
        standing, reason = self._standing(strategy, loss, memory)
        return Choice(
            strategy=strategy,
            prediction=found,
            step_s=step_s,
            seconds=whole_s * ratio,
            seconds_low=whole_s * low * (1 - error),
            seconds_high=whole_s * high * (1 + error),
            loss=loss,
            memory=memory,
            standing=standing,
            reason=reason,
        )

    def least_s(self, strategy: Strategy) -> float:
        """A lower bound of its time: its steps with free communication."""
        loss = loss_cost(strategy, self.question.scale)
        return self.question.steps * self.question.workload.compute_s * (1.0 if loss is None else loss.ratio)

    def _prediction(self, strategy: Strategy) -> Prediction | str:
        key = str(strategy)
        if key not in self._known:
            setting = self.question.setting
            self._workload = with_codecs(self._workload, [strategy], self.question)
            try:
                found = simulate(
                    strategy,
                    self._workload,
                    setting.cluster,
                    workers=setting.workers,
                    network=self._network,
                    like=None if self._drawn is None else self._drawn.get(self._among + key),
                )
                self._known[key] = found.prediction
                if self._drawn is not None:
                    self._drawn.setdefault(self._among + key, found)
            except LaconicError as exc:
                # If one strategy does not fit, others still may.
                self._known[key] = one_line(exc, 400)
        return self._known[key]

    def _standing(self, strategy: Strategy, loss: LossCost | None, memory: Memory) -> tuple[Standing, str]:
        limits = self.question.limits
        if limits.memory_bytes is not None and memory.total > limits.memory_bytes:
            return "limits", "memory"
        if loss is None:
            return "unknown", "its loss was not measured"
        if loss.known == "same":
            return "ranked", ""
        if not strategy.synchronization.barrier:
            return (
                "unknown",
                "how far replicas drift apart depends on the links, and its loss was measured on fast ones",
            )
        if limits.lossless:
            return "limits", "lossless"
        if loss.known == "parts":
            return "unknown", "only its parts were measured, each by itself"
        if not self.question.learns_text:
            return "unknown", "its loss was measured with language models only"
        if limits.max_loss_gap is not None and loss.gap > limits.max_loss_gap:
            return "limits", "loss"
        return "ranked", ""


def with_codecs(workload: Workload, strategies: Iterable[Strategy], question: Question) -> Workload:
    """The workload with the encoding costs of the question's device; costs measured with the model stay."""
    measured = {codec.compressor for codec in workload.codecs}
    wanted = [one for strategy in strategies for one in strategy.codecs()]
    added = known_codecs([code for code in wanted if str(code) not in measured], question.device)
    return replace(workload, codecs=(*workload.codecs, *added)) if added else workload


def beginning(strategy: Strategy, steps: int) -> tuple[float, Strategy] | None:
    """The share of early steps with another strategy, and that strategy."""
    rule = strategy.synchronization
    if rule.beginning:
        early = rule.planned(steps).warmup
        return min(1.0, early / steps), Strategy.parse(f"bsp / {strategy.architecture} / {rule.beginning}")
    if rule.warmup:
        return min(1.0, rule.warmup / steps), Strategy(architecture=strategy.architecture)
    for layer in strategy.compression.layers():
        if layer.name == "warmup":
            early = layer.settings()["steps"]
            assert isinstance(early, int), "declared as a count"
            return min(1.0, early / steps), Strategy(scheduling=strategy.scheduling)
    return None
