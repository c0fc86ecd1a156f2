"""Hooks for local updates: replicas make local steps and exchange their changes after some optimizer steps."""

from __future__ import annotations

import dataclasses

import torch

from laconic.core.plan import Plan
from laconic.core.stateful import BucketState, ParameterState
from laconic.runtime.buckets import Buckets
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.hooks.optimizer_moments import OptimizerMoments
from laconic.runtime.hooks.optimizer_steps import skips_step
from laconic.runtime.hooks.rounds import Rounds
from laconic.runtime.job import Job
from laconic.synchronization import Synchronization


class LocalUpdateHooks(TrainingHooks):
    """Starts outer steps when they are due and applies their results."""

    def __init__(self, job: Job, rule: Synchronization) -> None:
        super().__init__(job)
        self._rule = rule
        self._rounds = Rounds(job)
        self._moments = OptimizerMoments(job)
        self._ends: dict[int, int] = {}
        self._last_round = job.step
        """Steps that were complete when the last round began."""
        self._began_s = job.clock.now()
        self._without_data = False
        # With neighbours the mean is over a few, which cannot be told who has run out of data; who has, has no loss.
        everyone = job.strategy.architecture.scope == "everyone"
        self.can_join = everyone and rule.deadline_s is None and not rule.asks_for_loss
        with torch.no_grad():
            for buckets in self._rounds.parts:
                self._copy_parameters(buckets, rule.anchor)

    def before_step(self, *, closure: bool) -> None:
        """Let the rule correct this replica's parameters."""
        job, rule = self._job, self._rule
        if not rule.corrects or any(map(skips_step, job.optimizers)):
            return
        rates = self._rates()
        with torch.no_grad():
            for buckets in self._rounds.parts:
                for index, state in enumerate(buckets.states):
                    kept = {field: buckets.views_of(index, state.flat[field]) for field in rule.remembered()}
                    for name, anchor in kept[rule.anchor].items():
                        memory = {field: kept[field][name] for field in rule.fields}
                        rule.correct(job.values[name], anchor, memory, rates.get(id(job.parameters[name]), 0.0))

    def _rates(self) -> dict[int, float]:
        """The learning rate of each parameter, by its identity."""
        return {id(p): float(group["lr"]) for group in self._job.param_groups for p in group["params"]}

    def after_step(self) -> None:
        """Apply what has arrived by now, start what is due."""
        num_made = self._job.step + 1 - self._last_round
        self._skip_to_deadline()
        num_steps = self._job.step + 1
        with torch.no_grad():
            for part, end in list(self._ends.items()):
                if end <= num_steps:  # earlier only on a rank without data, which counts no steps between rounds
                    self._apply(part)
            due = self._rule.due(num_steps)
            if not due:
                return
            loss = self._loss() if self._rule.asks_for_loss else None
            share = self._share(num_made)
            for part in due:
                self._start(part, after=num_steps, share=share)
                self._ends[part] = num_steps + self._rule.delay
                if not self._rule.delay:
                    self._apply(part)
            if loss is not None:
                self._follow(self._rule.after_round(num_steps, loss))
            self._last_round, self._began_s = num_steps, self._job.clock.now()

    def _loss(self) -> float:
        job = self._job
        return job.losses.mean_of_all(job.transport, job.engine, step=job.step, asked_by=self._rule.name)

    def _follow(self, rule: Synchronization) -> None:
        """Continue with a rule that has learned when the next round is due."""
        self._rule = rule
        self._job.strategy = dataclasses.replace(self._job.strategy, synchronization=rule)
        for state in self.bucket_states():
            rule.note(state)

    def _skip_to_deadline(self) -> None:
        """Skip the rest of a round whose time is up on this rank; all ranks end the round in the same step."""
        limit_s, job = self._rule.deadline_s, self._job
        if limit_s is not None and job.clock.now() - self._began_s >= limit_s:
            while not self._rule.due(job.step + 1):
                job.step += 1

    def _share(self, num_made: int) -> float:
        """The weight of this rank's change, by its number of steps where ranks may have made different numbers."""
        if self._rule.deadline_s is None:
            return self._job.share("round")
        return self._job.share_by_count(num_made, "the steps that each rank has made")

    def take_part(self) -> None:
        """Contribute the change since the last outer step to the next one, and zeros afterwards."""
        self._without_data = True
        self.after_step()
        self._without_data = False
        self._job.step += 1

    def _copy_parameters(self, buckets: Buckets, field: str) -> None:
        """Store the current parameters of these buckets as their anchor."""
        for index, state in enumerate(buckets.states):
            for name, view in buckets.views_of(index, state.flat[field]).items() if not state.bucket.moment else ():
                view.copy_(self._job.values[name])

    def _start(self, part: int, *, after: int, share: float) -> None:
        job, buckets = self._job, self._rounds.parts[part]
        if self._rule.departure:
            self._copy_parameters(buckets, self._rule.departure)
        for index, state in enumerate(buckets.states):
            if state.bucket.moment:
                self._moments.read(buckets.views_of(index, buckets.flats[index]))
                if self._without_data and share != job.strategy.architecture.share(job.transport.world_size):
                    buckets.flats[index].zero_()  # the mean is over the ranks with data
            else:
                for name, anchor in buckets.views_of(index, state.flat[self._rule.anchor]).items():
                    torch.sub(anchor, job.values[name], out=buckets.views[name])
            buckets.flats[index] *= share
        self._rounds.start(part, after=after)

    def _apply(self, part: int) -> None:
        del self._ends[part]
        self._rounds.finish(part)
        job, rule, buckets = self._job, self._rule, self._rounds.parts[part]
        rates = self._rates()
        for index, state in enumerate(buckets.states):
            if state.bucket.moment:
                self._moments.write(buckets.views_of(index, buckets.flats[index]))
                continue
            anchor = state.flat[rule.anchor]
            for tensor, place in buckets.plan.buckets[index].segments():
                change, parameter = buckets.flats[index][place], job.parameters[tensor.name]
                if not parameter.requires_grad and not bool(change.any()):
                    continue  # frozen while attached: an outer momentum must not move it
                memory = {field: state.flat[field][place] for field in rule.fields}
                rule.outer(anchor[place], change, memory, rates.get(id(parameter), 0.0))
            since = buckets.views_of(index, state.flat[rule.departure]) if rule.departure else {}
            for name, agreed in buckets.views_of(index, anchor).items():
                if rule.keep:
                    job.values[name].lerp_(agreed, 1 - rule.keep)
                elif name in since:
                    job.values[name].sub_(since[name]).add_(agreed)
                else:
                    job.values[name].copy_(agreed)

    def plan(self) -> Plan:
        return self._rounds.plan()

    def state(self) -> ParameterState:
        if self._rule.asks_for_loss:
            for state in self.bucket_states():
                for kept in state.whole[self._rule.losses_field].values():
                    kept.copy_(self._job.losses.numbers())
        return self._rounds.state()

    def bucket_states(self) -> list[BucketState]:
        return [state for buckets in self._rounds.parts for state in buckets.states]

    def load(self, saved: ParameterState, order: list[str], step: int) -> None:
        self._rounds.load(saved)
        if not any(self._rule.anchor in fields for fields in saved.values()):  # saved by one worker, which keeps none
            with torch.no_grad():
                for buckets in self._rounds.parts:
                    self._copy_parameters(buckets, self._rule.anchor)
        self._last_round = next((first for first in range(step, 0, -1) if self._rule.due(first)), 0)
        self._began_s = self._job.clock.now()
        if self._rule.asks_for_loss:
            first = self.bucket_states()[0]
            self._follow(self._rule.noted(first))
            self._job.losses.restore(next(iter(first.whole[self._rule.losses_field].values())))
        begun = {
            part: first for first in range(step - self._rule.delay + 1, step + 1) for part in self._rule.due(first)
        }
        self._ends = {
            part: first + self._rule.delay for part, first in begun.items() if first > 0 and self._rounds.is_open(part)
        }

    def wait(self) -> None:
        self._rounds.wait()

    def settle(self) -> None:
        """Apply the exchanges in flight."""
        with torch.no_grad():
            for part in list(self._ends):
                self._apply(part)
