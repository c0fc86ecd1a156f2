"""How a process joins an elastic job: as a worker of `laconic run`, or in the fixed set of ranks of torchrun."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from laconic.core.paced import PACE_VARIABLE
from laconic.errors import AttachError, warn_user
from laconic.membership.group import CONNECTED_S
from laconic.membership.member import Member, is_started_by_laconic, ranks_per_replica
from laconic.runtime.elastic.carried_scaler import CarriedScaler
from laconic.runtime.elastic.division import Reader
from laconic.runtime.elastic.recovery import ElasticRecovery
from laconic.runtime.elastic.replica import ReplicaRanks
from laconic.runtime.elastic.settings import Elastic
from laconic.runtime.elastic.support import refuse_unsupported
from laconic.runtime.elastic.warm_up import warm_up
from laconic.runtime.fsdp_parts import place_among_averaged
from laconic.strategy import Strategy


def become_member(
    strategy: Strategy,
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    elastic: Elastic,
    *,
    timeout_s: float,
    grad_scaler: GradScaler | None,
    given: Mapping[str, object],
    init_sync: bool,
) -> ElasticRecovery | None:
    """Wait until this worker is in a view; return None if another launcher has started a fixed set of ranks.

    given: other arguments of attach, which must be None.
    """
    count = ranks_per_replica() if is_started_by_laconic() else 1
    refuse_unsupported(strategy, model, parameters, elastic, count)
    for name, value in given.items():
        if value is not None:
            raise AttachError(
                f"give elastic or {name}, not both: with elastic, ranks meet through the launcher's store."
            )
    if not init_sync:
        raise AttachError(
            "init_sync=False has no effect with elastic: ranks that join take over the others' state. Leave it out."
        )
    if PACE_VARIABLE in os.environ:
        raise AttachError("elastic does not work on paced links yet. Use shaped ones (laconic lab --links shaped).")
    device = next(iter(parameters.values())).device
    if not is_started_by_laconic():
        _use_fixed_ranks(elastic, "nccl" if device.type == "cuda" else "gloo")
        return None
    if dist.is_initialized() and count == 1:
        raise AttachError(
            "the script has called init_process_group(), whose ranks are fixed. Remove that call: with elastic and "
            "laconic run, attach makes a process group for each set of ranks."
        )
    warm_up(strategy, model, parameters)
    carried = [*elastic.carry, *([] if grad_scaler is None else [CarriedScaler(grad_scaler)])]
    reader = Reader(*place_among_averaged(model))
    # The ranks of a replica may wait for each other while one of them connects, whatever timeout_s is.
    replica = ReplicaRanks.of_this_process(count, timeout_s=timeout_s + CONNECTED_S)
    return ElasticRecovery(
        Member(timeout_s=timeout_s),
        elastic,
        strategy,
        carried,
        cuda=device.type == "cuda",
        knows_scaler=grad_scaler is not None,
        replica=replica,
        reader=reader,
    )


def _use_fixed_ranks(elastic: Elastic, backend: str) -> None:
    """Under torchrun the set of ranks is fixed until its agent starts all of them anew."""
    warn_user(
        "elastic has no launcher here: this script was not started by laconic run, so a rank that dies ends this "
        "attempt for all ranks. torchrun --max-restarts starts all of them anew; save checkpoints and load them."
    )
    if elastic.balance:
        raise AttachError("elastic.balance needs laconic run, where ranks agree on their speeds after every step.")
    if not dist.is_initialized():
        dist.init_process_group(backend)
    if dist.get_world_size() < elastic.min_ranks:
        raise AttachError(f"elastic.min_ranks is {elastic.min_ranks}, and there are {dist.get_world_size()} ranks.")
