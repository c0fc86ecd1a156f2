"""The replay of a job of sharded models: one whole model, and the exchanges of every shard between replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.elastic.log import JobLog, Unit
from benchmarks.elastic.replay import Replay, Replayed, gathered
from benchmarks.elastic.sharded_worker import RANKS_PER_REPLICA, joined, make_model, make_optimizer
from benchmarks.elastic.worker import BATCH, digest
from laconic.core.tensor import TensorSpec
from laconic.runtime.shards import OUTERMOST

_PARTS = {"0": "0", "2": "2", "4": OUTERMOST}
"""For each layer, the part that fully_shard() was called with last."""


class _OfPosition(Replay):
    """What the ranks at one position of every replica exchange: the same shards."""

    def __init__(self, strategy: str, log: JobLog, position: int) -> None:
        self.position = position
        super().__init__(strategy, log, _specs(position))

    def alike(self, members: Sequence[str]) -> tuple[str, ...]:
        """The members at this position."""
        return tuple(members[self.position :: RANKS_PER_REPLICA])


def replay_sharded(strategy: str, log: JobLog) -> Replayed:
    """Do what the log of averaged gradients says."""
    torch.set_num_threads(1)
    positions = [_OfPosition(strategy, log, position) for position in range(RANKS_PER_REPLICA)]
    samples = positions[0]  # it counts those of all
    model = make_model()
    optimizer = make_optimizer(model)
    for unit in log.units:
        if unit.what == "what leaving ranks owe":
            for one in positions:
                one.hand_over(_of(one, unit))
            continue
        counts, gradients = _gradients(samples, model, unit)
        total = sum(counts.values()) // RANKS_PER_REPLICA
        samples.outcome.skipped += BATCH - total
        for one in positions:
            part = _of(one, unit)
            one.admit(part)
            (plan,) = one.plans
            flats = {}
            for worker in part.members:
                shards = {name: _shard(value, one.position) for name, value in gradients[worker].items()}
                flats[worker] = gathered(plan, shards.get)
                for flat in flats[worker]:
                    flat *= counts[worker] / total
            mean = one.exchange(flats, 0, part, unit.step)
            for bucket, flat in zip(plan.buckets, mean, strict=True):
                for tensor, where in bucket.segments():
                    parameter = model.get_parameter(tensor.name)
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    shard = _shard(parameter.grad, one.position)
                    shard.copy_(flat[where].view(shard.shape))
        optimizer.step()
        fields = [optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
        tensors = [*model.parameters(), *fields]
        step = unit.step + 1
        if step in log.digests:
            of_ranks = [digest(_shard(t, position) for t in tensors) for position in range(RANKS_PER_REPLICA)]
            samples.outcome.num_compared += 1
            samples.outcome.num_differing += joined(of_ranks) != log.digests[step]
    return samples.outcome


def _gradients(
    run: Replay, model: torch.nn.Module, unit: Unit
) -> tuple[dict[str, int], dict[str, dict[str, torch.Tensor]]]:
    """For every member, its replica's number of samples, and the gradients that FSDP averages in it."""
    counts: dict[str, int] = {}
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for first in range(0, len(unit.members), RANKS_PER_REPLICA):
        workers = unit.members[first : first + RANKS_PER_REPLICA]
        sums: dict[str, torch.Tensor] = {}
        number = 0
        for worker in workers:
            samples = run.samples(worker, unit.step)
            number += len(samples)
            model.zero_grad()
            run.backward(model, samples)
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, "every parameter is used"
                # With two ranks, the order of the sum does not matter.
                sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad
        mean = {name: value / RANKS_PER_REPLICA for name, value in sums.items()}
        counts |= dict.fromkeys(workers, number)
        gradients |= dict.fromkeys(workers, mean)
    model.zero_grad()
    return counts, gradients


def _of(run: _OfPosition, unit: Unit) -> Unit:
    return replace(unit, members=run.alike(unit.members))


def _shard(whole: torch.Tensor, position: int) -> torch.Tensor:
    """The rows that FSDP2 gives to one rank."""
    parts = whole.detach().chunk(RANKS_PER_REPLICA)
    return parts[position] if position < len(parts) else whole.detach()[:0]


def _specs(position: int) -> list[TensorSpec]:
    found = []
    for name, parameter in make_model().named_parameters():
        shape = tuple(_shard(parameter, position).shape)
        whole_bytes = parameter.numel() * parameter.dtype.itemsize
        part = _PARTS[name.partition(".")[0]]
        found.append(
            TensorSpec(name, shape, parameter.dtype, parameter.device, whole_bytes=whole_bytes, ready_with=part)
        )
    return found
