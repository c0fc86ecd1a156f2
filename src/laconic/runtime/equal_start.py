"""The start of a session: all ranks attach the same things and begin with the same values."""

from __future__ import annotations

import torch

from laconic.errors import AttachError
from laconic.runtime.agreement import broadcast_all, check_agreement, check_equal
from laconic.runtime.job import Job
from laconic.runtime.optimizer_state import broadcast_optimizer_state, check_optimizer_state, settings_of
from laconic.runtime.other_shards import Attaching
from laconic.runtime.shards import is_sharded, plain_name


def make_equal(job: Job, attaching: Attaching, init_sync: bool, sync_optimizer: bool) -> None:
    """Check that all ranks attach the same thing, then start all of them from rank 0's values."""
    shards = job.strategy.architecture.holds_shards
    if shards and (sync_optimizer or not init_sync):
        raise AttachError(
            f'init_sync and sync_optimizer have no effect with "{job.strategy.architecture}": each rank has shards of '
            "its own. Leave them out."
        )
    alone = job.transport.world_size == 1
    if not alone:
        check_agreement(job, init_sync=init_sync, sync_optimizer=sync_optimizer)
        by_gradients = job.strategy.exchanges_gradients() and job.strategy.synchronization.replicas_identical
        if by_gradients and not sync_optimizer and not shards:
            check_optimizer_state(job.transport, job.optimizers, job.parameters)
        if not init_sync:
            check_equal(job)
    attaching.agree(_alike(job, init_sync, sync_optimizer), timeout_s=job.transport.timeout_s)
    if alone or shards:
        return
    if sync_optimizer:
        for work in broadcast_optimizer_state(job.transport, job.optimizers, job.parameters):
            work.wait()
    if not init_sync:
        return
    tensors = [*job.model.parameters(), *job.model.buffers()]
    with torch.no_grad():
        for work in broadcast_all(job.transport, tensors, purpose="control", what="initial parameters and buffers"):
            work.wait()


def _alike(job: Job, init_sync: bool, sync_optimizer: bool) -> dict[str, str]:
    """What must be the same on the ranks with all shards, as text."""
    # Other ranks take over the settings of rank 0's optimizers.
    replaced = sync_optimizer and job.transport.rank > 0
    return {
        "strategy": job.chosen_by or str(job.strategy),
        "init_sync": str(init_sync),
        "sync_optimizer": str(sync_optimizer),
        "find_unused_parameters": str(job.find_unused_parameters),
        "parameters": "; ".join(_parameter(name, value) for name, value in job.model.named_parameters()),
        "optimizer settings": "" if replaced else "; ".join(settings_of(job.optimizers)),
    }


def _parameter(name: str, parameter: torch.Tensor) -> str:
    """The properties of a parameter that do not depend on the shard; a plain one may have any shape of its own."""
    shape = f" {tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}" if is_sharded(parameter) else ""
    return f"{plain_name(name)}{shape}{'' if parameter.requires_grad else ' frozen'}"
