"""What a job did, done once more in one process from its log: every digest must come out the same.

Here are no views, no deaths and no undoing: each unit is made once, by the ranks that completed it, on one replica
(bsp) or on one per worker (local updates). So a residual that was not restored, a sample that was used twice, or a
joiner with a wrong state would show.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.elastic.log import JobLog, Unit
from benchmarks.elastic.worker import BATCH, SAMPLES, SEED, Samples, digest, make_model
from laconic.core.exchange import Wire
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Plan
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.runtime.averaging import Averaging
from laconic.runtime.elastic.batches import order_of
from laconic.strategy import Strategy


@dataclass
class Replayed:
    """How a replay went."""

    num_compared: int = 0
    num_differing: int = 0
    used_twice: int = 0
    """Samples that were used twice in one epoch."""
    skipped: int = 0
    """Samples that belonged to a rank that died in their step, so they are missing from it."""


class Replay:
    """One job, unit by unit."""

    def __init__(self, strategy: str, log: JobLog, specs: Sequence[TensorSpec] = ()) -> None:
        """specs: of what each worker exchanges; default: of whole parameters."""
        self.strategy = Strategy.parse(strategy)
        self.log = log
        self.data = Samples()
        if not specs:
            model, _ = make_model()
            specs = [TensorSpec.of(name, parameter) for name, parameter in model.named_parameters()]
        self.names = [spec.name for spec in specs]
        self.plans = self.strategy.plans([*reversed(specs)], 1)
        self.states: dict[str, list[list[BucketState]]] = {}
        self.outcome = Replayed()
        self._used: dict[int, set[int]] = {}
        self._view = -1

    def samples(self, worker: str, step: int) -> list[int]:
        """Those of a worker in a step, noted as used."""
        epoch, begin, count = self.log.batches[worker][step]
        mine = order_of(SAMPLES, epoch, seed=SEED, shuffled=True)[begin : begin + count]
        used = self._used.setdefault(epoch, set())
        self.outcome.used_twice += len(used & set(mine))
        used |= set(mine)
        return mine

    def backward(self, model: nn.Module, samples: list[int]) -> None:
        """Leave the gradients of a mean over these samples."""
        inputs, targets = self.data.inputs[samples], self.data.targets[samples]
        nn.functional.cross_entropy(model(inputs), targets).backward()

    def admit(self, unit: Unit) -> None:
        """Give workers that are new in the view of this unit what the others have in common; forget what is reset."""
        kinds = self.strategy.resize()
        fresh = [[self.strategy.init(bucket) for bucket in plan.buckets] for plan in self.plans]
        self.forget(unit)
        for worker in unit.members:
            if worker not in self.states:
                known = next((self.states[name] for name in unit.members if name in self.states), None)
                self.states[worker] = copy.deepcopy(fresh)
                if known is not None:
                    copy_common(known, self.states[worker], kinds)

    def forget(self, unit: Unit) -> None:
        """What is remembered for one set of ranks only begins anew in another view."""
        if unit.view == self._view:
            return
        self._view = unit.view
        kinds = self.strategy.resize()
        for states in self.states.values():
            for state in (state for part in states for state in part):
                begin = self.strategy.init(state.bucket)
                for field in state.flat:
                    if kinds.get(field) == "reset":
                        state.flat[field].copy_(begin.flat[field])

    def hand_over(self, unit: Unit) -> None:
        """What leaving ranks owe goes to the first that stays."""
        leaving, kinds = self.log.leaving[unit.view], self.strategy.resize()
        taker = next((name for name in unit.members if name not in leaving), None)
        for name in leaving:
            if taker is None or name not in self.states or taker not in self.states:
                continue
            for mine, theirs in zip(self.states[taker], self.states[name], strict=True):
                for state, other in zip(mine, theirs, strict=True):
                    for field in state.flat:
                        if kinds.get(field) == "sum":
                            state.flat[field] += other.flat[field]

    def exchange(self, flats: dict[str, list[torch.Tensor]], part: int, unit: Unit, step: int) -> list[torch.Tensor]:
        """The mean of what the members of a unit have; every member must come to the same."""
        members, plan = unit.members, self.plans[part]
        first = sum(len(other.buckets) for other in self.plans[:part])
        round_number = self.strategy.synchronization.round_number(step)

        def work(transport: InProcessTransport) -> None:
            worker = members[transport.rank]
            moment = Moment(step, transport.rank, len(members), round_number, 0.0)
            for index, flat in enumerate(flats[worker]):
                state = self.states[worker][part][index]
                state.moment = moment
                self._drive(flat, state, Wire(transport, "a bucket", first + index))

        InProcessCluster(len(members), timeout_s=60).run(work)
        outcome = flats[members[0]]
        for worker in members[1:]:
            same = all(torch.equal(a, b) for a, b in zip(outcome, flats[worker], strict=True))
            assert same, f"replayed unit {unit.number}: members come to different means"
        assert len(outcome) == len(plan.buckets)
        return outcome

    def _drive(self, flat: torch.Tensor, state: BucketState, wire: Wire) -> None:
        with torch.no_grad():
            for work in self.strategy.synchronization.around(flat, state, Averaging(self.strategy, state, wire)):
                work.wait()

    def compare(self, step: int, tensors: Sequence[torch.Tensor]) -> None:
        """Compare with the digest after `step` steps, if the job wrote one."""
        if step in self.log.digests:
            self.outcome.num_compared += 1
            self.outcome.num_differing += digest(tensors) != self.log.digests[step]


def replay(strategy: str, log: JobLog) -> Replayed:
    """Do what the log says."""
    torch.set_num_threads(1)
    from benchmarks.elastic.replay_local import LocalReplay

    if not Strategy.parse(strategy).exchanges_gradients():
        return LocalReplay(strategy, log).run()
    run = Replay(strategy, log)
    _gradients(run)
    return run.outcome


def _gradients(run: Replay) -> None:
    model, optimizer = make_model()
    (plan,) = run.plans
    for unit in run.log.units:
        if unit.what == "what leaving ranks owe":
            run.hand_over(unit)
            continue
        run.admit(unit)
        counts, flats = {}, {}
        for worker in unit.members:
            samples = run.samples(worker, unit.step)
            counts[worker] = len(samples)
            model.zero_grad()
            run.backward(model, samples)
            flats[worker] = gathered(plan, lambda name: model.get_parameter(name).grad)
        run.outcome.skipped += BATCH - sum(counts.values())
        for worker, tensors in flats.items():
            for flat in tensors:
                flat *= counts[worker] / sum(counts.values())
        mean = run.exchange(flats, 0, unit, unit.step)
        for bucket, flat in zip(plan.buckets, mean, strict=True):
            for tensor, place in bucket.segments():
                parameter = model.get_parameter(tensor.name)
                parameter.grad = flat[place].view(parameter.shape).clone()
        optimizer.step()
        fields = (optimizer.state[p] for p in model.parameters())
        state = [values[key] for values in fields for key in ("exp_avg", "exp_avg_sq", "step")]
        run.compare(unit.step + 1, [*model.parameters(), *state])


def gathered(plan: Plan, value: Callable[[str], torch.Tensor | None]) -> list[torch.Tensor]:
    """One flat tensor per bucket; parameters without a value count as zero."""
    flats = []
    for bucket in plan.buckets:
        flat = torch.zeros(bucket.numel, dtype=bucket.dtype)
        for tensor, place in bucket.segments():
            found = value(tensor.name)
            if found is not None:
                flat[place].copy_(found.detach().reshape(-1))
        flats.append(flat)
    return flats


def copy_common(
    source: Sequence[Sequence[BucketState]], target: Sequence[Sequence[BucketState]], kinds: Mapping[str, str]
) -> None:
    """Copy the fields of which all ranks hold the same."""
    for mine, theirs in zip(target, source, strict=True):
        for state, other in zip(mine, theirs, strict=True):
            for field in state.flat:
                if kinds.get(field) == "copy":
                    state.flat[field].copy_(other.flat[field])
            for field in other.whole:
                if kinds.get(field) == "copy":
                    state.whole[field] = {key: value.clone() for key, value in other.whole[field].items()}
