"""Replicas that train alone and now and then exchange how far they have come: after the optimizer's step."""

from __future__ import annotations

from typing import ClassVar

import torch

from laconic.core.plan import Plan
from laconic.core.stateful import ParameterState
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.hooks.rounds import Rounds
from laconic.runtime.job import Job
from laconic.synchronization import Synchronization


class LocalUpdateHooks(TrainingHooks):
    """Starts rounds when they are due and applies their outcome."""

    can_join: ClassVar[bool] = True

    def __init__(self, job: Job, rule: Synchronization) -> None:
        super().__init__(job)
        self._rule = rule
        self._rounds = Rounds(job)
        self._ends: dict[int, int] = {}
        with torch.no_grad():
            for buckets in self._rounds.parts:
                for index, state in enumerate(buckets.states):
                    for name, view in buckets.views_of(index, state.flat[rule.anchor]).items():
                        view.copy_(job.values[name])

    def after_step(self) -> None:
        """Apply what has arrived by now, start what is due."""
        num_steps = self._job.step + 1
        with torch.no_grad():
            for part, end in list(self._ends.items()):
                if end <= num_steps:  # earlier only on a rank without data, which counts no steps between rounds
                    self._apply(part)
            due = self._rule.due(num_steps)
            if not due:
                return
            share = self._job.strategy.architecture.share(self._job.announce("round").divisor)
            for part in due:
                self._start(part, after=num_steps, share=share)
                self._ends[part] = num_steps + self._rule.delay
                if not self._rule.delay:
                    self._apply(part)

    def take_part(self) -> None:
        """See TrainingHooks; how far this rank came after the last round counts in the next one, then nothing."""
        self.after_step()
        self._job.step += 1

    def _start(self, part: int, *, after: int, share: float) -> None:
        buckets = self._rounds.parts[part]
        for index, state in enumerate(buckets.states):
            for name, anchor in buckets.views_of(index, state.flat[self._rule.anchor]).items():
                torch.sub(anchor, self._job.values[name], out=buckets.views[name])
            buckets.flats[index] *= share
        self._rounds.start(part, after=after)

    def _apply(self, part: int) -> None:
        del self._ends[part]
        self._rounds.finish(part)
        job, rule, buckets = self._job, self._rule, self._rounds.parts[part]
        rates = {id(p): float(group["lr"]) for group in job.param_groups for p in group["params"]}
        for index, state in enumerate(buckets.states):
            anchor = state.flat[rule.anchor]
            for tensor, place in buckets.plan.buckets[index].segments():
                memory = {field: state.flat[field][place] for field in rule.fields}
                rate = rates.get(id(job.parameters[tensor.name]), 0.0)
                rule.outer(anchor[place], buckets.flats[index][place], memory, rate)
            for name, agreed in buckets.views_of(index, anchor).items():
                if rule.keep:
                    job.values[name].lerp_(agreed, 1 - rule.keep)
                else:
                    job.values[name].copy_(agreed)

    def plan(self) -> Plan:
        """See TrainingHooks."""
        return self._rounds.plan()

    def state(self) -> ParameterState:
        """See TrainingHooks."""
        return self._rounds.state()

    def load(self, saved: ParameterState, order: list[str], step: int) -> None:
        """See TrainingHooks."""
        self._rounds.load(saved)
        begun = {
            part: first for first in range(step - self._rule.delay + 1, step + 1) for part in self._rule.due(first)
        }
        self._ends = {
            part: first + self._rule.delay for part, first in begun.items() if first > 0 and self._rounds.is_open(part)
        }

    def wait(self) -> None:
        """See TrainingHooks."""
        self._rounds.wait()

    def settle(self) -> None:
        """See TrainingHooks; what is on its way is applied."""
        with torch.no_grad():
            for part in list(self._ends):
                self._apply(part)
