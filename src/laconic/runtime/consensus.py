"""The distance between replicas, and their mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from laconic.core.exchange import Exchange
from laconic.runtime.job import Job
from laconic.runtime.shards import local


def consensus_distance(job: Job) -> float:
    """Root mean square distance of replicas from their mean, relative to the mean's norm; every rank calls it.

    sqrt(mean_i |x_i - m|^2) / |m|,   m = mean_i(x_i)

    For a sharded model it covers the pieces on the ranks of this group.
    """
    if job.transport.world_size == 1 or job.strategy.architecture.holds_shards:
        return 0.0
    sums = torch.zeros(2, dtype=torch.float64)

    def measure() -> Exchange:
        for parameter in job.values.values():
            mine = parameter.detach().to(torch.float64)
            mean = mine / job.transport.world_size
            yield job.transport.all_reduce(mean, purpose="control", what="the mean of replicas")
            sums[0] += (mine - mean).square().sum().item()
            sums[1] += mean.square().sum().item()
        apart = sums[:1].to(job.transport.control_device)
        yield job.transport.all_reduce(apart, purpose="control", what="distances of replicas")
        sums[0] = apart.item() / job.transport.world_size

    _call(job, "distance of replicas", measure)
    apart, norm = sums.tolist()
    return math.sqrt(apart / norm) if norm else math.sqrt(apart)


def average(job: Job, owed: Mapping[str, torch.Tensor] | None = None) -> None:
    """Replace parameters, and buffers that are real numbers, by their mean over all ranks; every rank calls it.

        x <- mean_i(x_i) - sum_i(owed_i)

    Other buffers (counters) become rank 0's. owed: by parameter, changes of this rank that it has not applied or sent
    yet, divided by the number of ranks, as exchanges have them.
    """
    if job.strategy.architecture.holds_shards or (job.transport.world_size == 1 and not owed):
        return  # there is one model
    debts = {} if owed is None else owed

    def mean_of_all() -> Exchange:
        for name, tensor in [*job.values.items(), *((None, local(buffer)) for buffer in job.model.buffers())]:
            if not tensor.numel():
                continue
            if tensor.is_floating_point() or tensor.is_complex():
                total = (tensor.detach() / job.transport.world_size).contiguous()
                if name is not None and name in debts:
                    total -= debts[name].view_as(total)
                yield job.transport.all_reduce(total, purpose="control", what="the mean of replicas")
                tensor.copy_(total)
            else:
                first = tensor.detach().contiguous().view(-1).view(torch.uint8).clone()
                yield job.transport.broadcast(first, source=0, purpose="control", what="counters of rank 0")
                tensor.copy_(first.view(tensor.dtype).view(tensor.shape))

    _call(job, "mean of replicas", mean_of_all)


def _call(job: Job, what: str, start: Callable[[], Exchange]) -> None:
    device = next(iter(job.parameters.values())).device
    with torch.no_grad():
        job.engine.call(what, start, step=job.step, device=device)
