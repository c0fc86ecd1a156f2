"""How far replicas are apart, and the one model they stand for."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from laconic.core.exchange import Exchange
from laconic.runtime.job import Job
from laconic.runtime.shards import local


def consensus_distance(job: Job) -> float:
    """Root mean square distance of replicas from their mean, relative to the mean's norm; every rank calls it.

    sqrt(mean_i |x_i - m|^2) / |m|,   m = mean_i(x_i)

    Of a sharded model, of the pieces that live on the ranks of this group.
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


def average(job: Job) -> None:
    """Replace parameters, and buffers that are real numbers, by their mean over all ranks; every rank calls it.

    Other buffers (counters) become rank 0's.
    """
    if job.transport.world_size == 1 or job.strategy.architecture.holds_shards:
        return  # there is one model

    def mean_of_all() -> Exchange:
        for tensor in [*job.values.values(), *map(local, job.model.buffers())]:
            if not tensor.numel():
                continue
            if tensor.is_floating_point() or tensor.is_complex():
                total = (tensor.detach() / job.transport.world_size).contiguous()
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
