"""Which strategies and models support a changing set of ranks; others are refused, with an alternative."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import AttachError
from laconic.runtime.elastic.settings import Elastic
from laconic.runtime.shards import is_sharded, num_holders_of, specs_of
from laconic.strategy import Strategy

_USE = 'Use for example "bsp / all_reduce / topk(0.01) + error_feedback / fusion" or "diloco / all_reduce"'


def refuse_unsupported(
    strategy: Strategy,
    model: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    elastic: Elastic,
    ranks_per_replica: int = 1,
) -> None:
    """Raise AttachError unless training under `strategy` can continue when replicas die, join or leave."""
    refuse_strategy(strategy, elastic)
    if isinstance(model, DistributedDataParallel):
        raise AttachError(
            "a model wrapped in DistributedDataParallel cannot be elastic: its group of ranks is fixed. Attach to the "
            "plain module (ddp.module)."
        )
    sharded = next((name for name, parameter in parameters.items() if is_sharded(parameter)), None)
    if sharded is not None and ranks_per_replica == 1:
        raise AttachError(
            f'parameter "{sharded}" is sharded, so no rank has all of the model: a part would be lost if a rank died. '
            "Start the script with laconic run --ranks-per-replica N: N processes then hold one copy of the model, and "
            "are replaced together."
        )
    if sharded is None and ranks_per_replica > 1:
        raise AttachError(
            f"--ranks-per-replica is {ranks_per_replica}, and no parameter is sharded: the ranks of a replica would "
            "train apart. Shard the model over the default process group (fully_shard or tensor parallelism), or leave "
            "--ranks-per-replica out."
        )
    for name, parameter in parameters.items() if ranks_per_replica > 1 else ():
        num_holders = num_holders_of(parameter)
        if num_holders not in (1, ranks_per_replica):
            raise AttachError(
                f'parameter "{name}" lies on a mesh of {num_holders} ranks, and --ranks-per-replica is '
                f"{ranks_per_replica}: other ranks would hold another copy of it. Give both the same number."
            )
    if sharded is not None and parameters[sharded].device.type != "cpu":
        _refuse_overlap(strategy, model, parameters)


def refuse_strategy(strategy: Strategy, elastic: Elastic) -> None:
    """Raise AttachError unless the strategy works with a changing set of ranks, on any model."""
    reason = _why_not(strategy, elastic)
    if reason is not None:
        raise AttachError(f'"{strategy}" cannot be elastic: {reason}.')


def _refuse_overlap(strategy: Strategy, model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise where exchanges between replicas would run beside collectives inside them.

    NCCL needs operations in the same order on all ranks of a GPU job, and elastic sessions start exchanges on a thread.
    """
    plans = strategy.plans([*reversed(specs_of(model, parameters).values())], 2)
    if strategy.synchronization.delay:
        usage = f'"{strategy.synchronization.name}" with an overlap. Use "diloco"'
    elif strategy.exchanges_gradients() and any(plan.launch != "after_backward" for plan in plans):
        usage = f'the schedule "{strategy.scheduling.name}". Use "sequential"'
    else:
        return
    raise AttachError(
        "on GPUs, an elastic job of sharded models cannot have exchanges between replicas during a pass, as with "
        f"{usage}."
    )


def _why_not(strategy: Strategy, elastic: Elastic) -> str | None:
    when, whom, order = strategy.synchronization, strategy.architecture, strategy.scheduling
    if whom.has_servers:
        return f"servers of {whom.name} hold the only copy of what they add up. {_USE}"
    if whom.holds_shards:
        return f"with {whom.name} no rank has all of the model. {_USE}"
    if whom.scope != "everyone":
        return f"{whom.name} keeps state for each pair of neighbours, whose ranks would change. {_USE}"
    if not when.barrier:
        return f"{when.name} has no point at which all ranks agree. {_USE}"
    if not when.elastic:
        return f"{when.name} keeps state on each rank that other ranks cannot continue from. {_USE}"
    if strategy.codec.traits.estimates_all:
        return (
            f"{strategy.compression} keeps the sum of all ranks' estimates on each of them, and that of a rank that "
            'dies would stay in it. Use "error_feedback"'
        )
    if order.defers or order.decoupled:
        return f'{order.name} makes updates before a step is known to count. Use the schedule "fusion"'
    if order.needs_timing or order.candidates > 1:
        return f'{order.name} plans by times that are measured among fixed ranks. Use the schedule "fusion"'
    return whom.fixed_ranks(elastic.min_ranks, elastic.max_ranks or 2 * elastic.min_ranks + 8)
