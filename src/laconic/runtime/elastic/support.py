"""Which strategies and models support a changing set of ranks; others are refused, with an alternative."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import AttachError
from laconic.runtime.elastic.settings import Elastic
from laconic.runtime.shards import is_sharded
from laconic.strategy import Strategy

_USE = 'Use for example "bsp / all_reduce / topk(0.01) + error_feedback / fusion" or "diloco / all_reduce"'


def refuse_unsupported(
    strategy: Strategy, model: nn.Module, parameters: Mapping[str, torch.Tensor], elastic: Elastic
) -> None:
    """Raise AttachError unless training under `strategy` can continue when ranks die, join or leave."""
    reason = _why_not(strategy, elastic)
    if reason is not None:
        raise AttachError(f'"{strategy}" cannot be elastic: {reason}.')
    if isinstance(model, DistributedDataParallel):
        raise AttachError(
            "a model wrapped in DistributedDataParallel cannot be elastic: its group of ranks is fixed. Attach to the "
            "plain module (ddp.module)."
        )
    sharded = next((name for name, parameter in parameters.items() if is_sharded(parameter)), None)
    if sharded is not None:
        raise AttachError(
            f'parameter "{sharded}" is sharded, so no rank has all of the model: a part would be lost if a rank died. '
            "Attach an unsharded model, or leave elastic out."
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
