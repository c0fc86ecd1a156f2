"""The start of a session: all ranks attach the same things and begin with the same values."""

from __future__ import annotations

import torch

from laconic.errors import AttachError
from laconic.runtime.agreement import broadcast_all, check_agreement, check_equal
from laconic.runtime.job import Job
from laconic.runtime.optimizer_state import broadcast_optimizer_state, check_optimizer_state
from laconic.runtime.other_shards import attached_alike


def make_equal(job: Job, init_sync: bool, sync_optimizer: bool) -> None:
    """Check that all ranks attach the same thing, then start all of them from rank 0's values."""
    shards = job.strategy.architecture.holds_shards
    if shards and (sync_optimizer or not init_sync):
        raise AttachError(
            f'init_sync and sync_optimizer have no effect with "{job.strategy.architecture}": each rank has shards of '
            "its own. Leave them out."
        )
    if job.transport.world_size == 1:
        return
    said = f"strategy {job.chosen_by or job.strategy}, init_sync={init_sync}, sync_optimizer={sync_optimizer}"
    # Under `sharded`, the ranks with the other shards are the group itself.
    with attached_alike({} if shards else job.parameters, said, timeout_s=job.transport.timeout_s):
        check_agreement(job, init_sync=init_sync, sync_optimizer=sync_optimizer)
        by_gradients = job.strategy.exchanges_gradients() and job.strategy.synchronization.replicas_identical
        if by_gradients and not sync_optimizer and not shards:
            check_optimizer_state(job.transport, job.optimizers, job.parameters)
        if not init_sync:
            check_equal(job)
    if shards:
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
