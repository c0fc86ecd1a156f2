"""Changes the strategy of a session between two steps.

Transport, communication thread, optimizer hooks, counters and events stay; what the old strategy has put on the model
is taken off, and the new one starts as if it had just been attached. Nothing that a rank has computed is lost:

    averaged gradients          each rank's next gradients include those still to be sent, so the sum over ranks
                                is the same and nothing is sent twice
    replicas that train alone   x <- mean_i(x_i) - sum_i(changes still owed), uncompressed; where gradients are averaged
                                next, the optimizer's state becomes that of rank 0

The momentum of outer steps ends with the strategy that made them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.core.stateful import CARRIED, ParameterState
from laconic.errors import AttachError
from laconic.runtime.bounded_loss.group import DatagramGroup
from laconic.runtime.collective_costs import settle
from laconic.runtime.consensus import average
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.hooks.module_buffers import ModuleBuffers
from laconic.runtime.hooks.optimizer_steps import OptimizerSteps
from laconic.runtime.job import Job
from laconic.runtime.optimizer_state import broadcast_optimizer_state
from laconic.runtime.servers.server_pool import ServerPool
from laconic.runtime.shards import is_sharded
from laconic.strategy import Strategy

if TYPE_CHECKING:
    from laconic.runtime.session import Session


class Chooser(ABC):
    """Chooses the strategy of a session during training; attach() takes one in place of a strategy.

    Ranks must agree on its text.
    """

    @abstractmethod
    def first(self, total_steps: int | None) -> Strategy:
        """The strategy of the first steps; raises if it cannot choose with what attach() was given."""

    @abstractmethod
    def begin(self, session: Session, total_steps: int | None) -> None:
        """Called when the session is attached: observe it, and change its strategy when that pays."""


@dataclass(frozen=True)
class AtWork:
    """The hooks that a strategy has installed on a model."""

    hooks: TrainingHooks | None = None
    buffers: ModuleBuffers | None = None
    pool: ServerPool | None = None
    datagrams: DatagramGroup | None = None


@dataclass(frozen=True)
class Workplace:
    """Installs strategies on a model and removes them again."""

    steps: OptimizerSteps
    parts: ExitStack
    """Removes the hooks of the current strategy."""
    check: Callable[[Strategy], None]
    """Raises if a strategy cannot work on this model."""
    put_to_work: Callable[[Job, ExitStack], AtWork]


def change(job: Job, at_work: AtWork, workplace: Workplace, strategy: Strategy) -> AtWork:
    """Change to `strategy`; all ranks call it with nothing in flight. If it raises, no hook is left on the model."""
    assert at_work.pool is None, "strategies with servers are not changed"
    carried = ParameterState()
    if job.strategy.exchanges_gradients():
        carried = {name: {CARRIED: owed} for name, owed in _owed(job.strategy, at_work.hooks).items()}
    elif at_work.hooks is not None:
        _reunite(job, at_work.hooks, optimizers=strategy.exchanges_gradients())
    workplace.parts.close()
    device = next(iter(job.parameters.values())).device
    job.strategy = settle(strategy, job.transport, job.clock, device)
    job.loss_scale.follow(strategy, carries=bool(carried))
    made = workplace.put_to_work(job, workplace.parts)
    workplace.steps.follow(made.hooks)
    if carried and made.hooks is not None:
        made.hooks.load(carried, [], job.step)
    return made


def check_change(job: Job, at_work: AtWork, strategy: Strategy, workplace: Workplace) -> None:
    """Raise unless `strategy` can take over from the one at work; nothing has changed then."""
    refuse_fixed(job.model, "change_strategy()", elastic=job.recovery is not None)
    for which in (job.strategy, strategy):
        reason = why_not_changed(which)
        if reason:
            raise AttachError(
                f'the strategy of a session cannot change from "{job.strategy}" to "{strategy}": {reason}'
            )
    if job.accumulating:
        raise AttachError("change_strategy() was called inside session.accumulate(). Call it after optimizer.step().")
    if job.strategy.exchanges_gradients() != strategy.exchanges_gradients() and job.loss_scale.has_scaler:
        raise AttachError(
            f'the strategy of a session cannot change from "{job.strategy}" to "{strategy}" while a GradScaler is in '
            "use: where replicas train alone, its scale differs between ranks. Train in bfloat16 without a GradScaler."
        )
    if not strategy.exchanges_gradients() and owes_gradients(job.strategy, at_work.hooks):
        raise AttachError(
            f'"{job.strategy}" still has gradients to send, and "{strategy}" sends none. Change to "{Strategy()}" '
            "first: its next step sends them."
        )
    workplace.check(strategy)


def owes_gradients(strategy: Strategy, hooks: TrainingHooks | None = None) -> bool:
    """Whether gradients wait for the next exchange; hooks: those of this strategy, which may have taken over some."""
    if not strategy.exchanges_gradients():
        return False
    carried = hooks is not None and any(CARRIED in fields for fields in hooks.state().values())
    return carried or bool(strategy.owed_fields())


def refuse_fixed(model: nn.Module, what: str, *, elastic: bool) -> None:
    """Raise where the strategy of a session cannot change."""
    if elastic:
        raise AttachError(
            f"{what} has no effect on ranks that join later: with elastic= the strategy of a session is fixed. "
            "Leave elastic out, or attach with a fixed strategy."
        )
    if isinstance(model, DistributedDataParallel):
        raise AttachError(
            f"{what} does not work on a model wrapped in DistributedDataParallel. Attach to the plain module "
            "(ddp.module): laconic averages its gradients."
        )
    if any(map(is_sharded, model.parameters())):
        raise AttachError(
            f"{what} does not work on a sharded model (fully_shard, tensor parallelism). Attach with a fixed strategy; "
            "laconic plan says which."
        )


def why_not_changed(strategy: Strategy) -> str:
    """Why a session cannot change to this strategy or from it, in a sentence; empty if it can."""
    rule, whom = strategy.synchronization, strategy.architecture
    if rule.lazy or rule.asks_for_loss:
        return f'"{rule}" decides by what it has seen before, which no other strategy can take over.'
    if whom.has_servers or whom.holds_shards:
        return f'"{whom}" keeps a part of the model or of its state elsewhere.'
    if not rule.barrier or whom.scope != "everyone":
        return f'under "{rule} / {whom}" there is no step after which all replicas have heard of each other.'
    if rule.quantity == "momentum" or not rule.keeps_scale:
        return f'"{rule}" takes the place of the optimizer\'s momentum, which no other strategy can take over.'
    kept = {field for field, resize in strategy.resize().items() if resize == "sum"} - strategy.owed_fields()
    if kept:
        return f'"{strategy.compression}" keeps {", ".join(sorted(kept))}, which no other strategy can take over.'
    return ""


def _reunite(job: Job, hooks: TrainingHooks, *, optimizers: bool) -> None:
    """Average replicas that have trained alone and, with `optimizers`, make the optimizers' state that of rank 0."""
    hooks.settle()
    average(job, _owed(job.strategy, hooks))
    if optimizers and job.transport.world_size > 1:
        with torch.no_grad():
            job.engine.call(
                "the optimizer's state of rank 0",
                lambda: broadcast_optimizer_state(job.transport, job.optimizers, job.parameters),
                step=job.step,
                device=next(iter(job.parameters.values())).device,
            )


def _owed(strategy: Strategy, hooks: TrainingHooks | None) -> dict[str, torch.Tensor]:
    """The values of each parameter that this rank has still to send: gradients, or changes of parameters."""
    if hooks is None:
        return {}
    owed, found = strategy.owed_fields() | {CARRIED}, dict[str, torch.Tensor]()
    for name, fields in hooks.state().items():
        parts = [value for field, value in fields.items() if field in owed]
        if parts:
            total = parts[0].detach().clone()
            for part in parts[1:]:
                total = total + part
            found[name] = total
    return found
