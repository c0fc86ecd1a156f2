"""A replay of local updates: a replica per worker; rounds are begun and applied when their rule says so."""

from __future__ import annotations

import copy

import torch
from torch import nn

from benchmarks.elastic.log import JobLog, Unit
from benchmarks.elastic.replay import Replay, Replayed, copy_common, gathered
from benchmarks.elastic.worker import agreed, make_model


class LocalReplay(Replay):
    """One job, step by step."""

    def __init__(self, strategy: str, log: JobLog) -> None:
        super().__init__(strategy, log)
        self.rule = self.strategy.synchronization
        self.replicas: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
        self._units = list(log.units)
        self._sent: dict[int, dict[str, list[torch.Tensor]]] = {}
        """Of parts whose round has begun: how far each worker had come."""
        self._begun: dict[int, int] = {}
        self._means: dict[int, list[torch.Tensor]] = {}
        self._members = log.views.get(0, ())
        """Those of the last round."""
        self._joins = {step: (joined, source) for joined, source, step in log.joined.values()}

    def run(self) -> Replayed:
        """Make every step."""
        for step in range(max(self.log.digests, default=0)):
            workers = [worker for worker, steps in self.log.batches.items() if step in steps]
            for worker in workers:
                if worker not in self.replicas:
                    self._join(worker, step)  # before the source has made its step
            for worker in workers:
                self._inner_step(worker, step)
            self._rounds(step + 1)
            alive = next((worker for worker in self._members if worker in workers), None)
            if alive is not None:
                self.compare(step + 1, agreed((s for part in self.states[alive] for s in part), self.strategy))
        return self.outcome

    def _inner_step(self, worker: str, step: int) -> None:
        model, optimizer = self.replicas[worker]
        self.backward(model, self.samples(worker, step))
        optimizer.step()
        optimizer.zero_grad()

    def _join(self, worker: str, step: int) -> None:
        states = [[self.strategy.init(bucket) for bucket in plan.buckets] for plan in self.plans]
        self.states[worker] = states
        _, source = self._joins[step]
        if step > 0:
            self.replicas[worker] = _copied(*self.replicas[source])
            copy_common(self.states[source], states, self.strategy.resize())
            return
        self.replicas[worker] = make_model()
        with torch.no_grad():
            for plan, part in zip(self.plans, states, strict=True):
                values = gathered(plan, self.replicas[worker][0].get_parameter)
                for state, value in zip(part, values, strict=True):
                    state.flat[self.rule.anchor].copy_(value)

    def _rounds(self, num_steps: int) -> None:
        """Apply what is due, begin what is due."""
        for part, begun in list(self._begun.items()):
            if begun + self.rule.delay <= num_steps:
                self._apply(part)
        for part in self.rule.due(num_steps):
            self._begun[part] = num_steps
            self._sent[part] = {worker: self._change(worker, part) for worker in self.replicas}
            if not self.rule.delay:
                self._apply(part)
        while self._units and self._units[0].what == "what is in flight" and self._units[0].step == num_steps:
            unit = self._units.pop(0)
            for part in self._begun:
                if part not in self._means:
                    self._means[part] = self._mean(part, unit)
        while self._units and self._units[0].what == "what leaving ranks owe" and self._units[0].step == num_steps:
            self.hand_over(self._units.pop(0))

    def _change(self, worker: str, part: int) -> list[torch.Tensor]:
        """Anchor - parameters, as it is sent."""
        model, plan = self.replicas[worker][0], self.plans[part]
        values = gathered(plan, model.get_parameter)
        anchors = [state.flat[self.rule.anchor] for state in self.states[worker][part]]
        return [torch.sub(anchor, value) for anchor, value in zip(anchors, values, strict=True)]

    def _mean(self, part: int, unit: Unit) -> list[torch.Tensor]:
        self.forget(unit)
        flats = {worker: [flat.clone() for flat in self._sent[part][worker]] for worker in unit.members}
        for tensors in flats.values():
            for flat in tensors:
                flat *= 1.0 / len(unit.members)
        return self.exchange(flats, part, unit, self._begun[part] - 1)

    def _apply(self, part: int) -> None:
        unit = self._units.pop(0)
        assert unit.what == f"the round of part {part}", f"the log has {unit}, the rule a round of part {part}"
        mean = self._means.pop(part) if part in self._means else self._mean(part, unit)
        del self._begun[part], self._sent[part]
        with torch.no_grad():
            for worker in unit.members:
                self._take_in(worker, part, mean)
        self._members = unit.members

    def _take_in(self, worker: str, part: int, mean: list[torch.Tensor]) -> None:
        model, rule = self.replicas[worker][0], self.rule
        rate = float(self.replicas[worker][1].param_groups[0]["lr"])
        for state, flat in zip(self.states[worker][part], mean, strict=True):
            anchor = state.flat[rule.anchor]
            for tensor, place in state.bucket.segments():
                memory = {field: state.flat[field][place] for field in rule.fields}
                rule.outer(anchor[place], flat[place], memory, rate)
                parameter = model.get_parameter(tensor.name)
                agreed = anchor[place].view(parameter.shape)
                if rule.keep:
                    parameter.lerp_(agreed, 1 - rule.keep)
                else:
                    parameter.copy_(agreed)


def _copied(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A replica with the same parameters and optimizer state."""
    other, its = make_model()
    other.load_state_dict(model.state_dict())
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other, its
