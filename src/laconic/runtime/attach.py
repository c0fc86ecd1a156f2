"""attach(): put a strategy to work on an ordinary model and optimizer."""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.architecture import ParameterServer
from laconic.core.clock import Clock, WallClock
from laconic.core.event import DiscardEvents, Event, EventSink
from laconic.core.paced import PacedTransport, link_from_environment
from laconic.core.tensor import TensorSpec
from laconic.core.torch_distributed import TorchTransport
from laconic.core.transport import Transport
from laconic.errors import AttachError, LaconicWarning, UnsupportedGradient, one_line
from laconic.runtime.agreement import broadcast_all, check_agreement, check_equal
from laconic.runtime.collective_costs import settle, what_was_settled
from laconic.runtime.engine import Engine
from laconic.runtime.hooks import gradients, optimizer_steps
from laconic.runtime.hooks.async_pairs import AsyncPairHooks
from laconic.runtime.hooks.async_server import AsyncServerHooks
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.hooks.ddp import DdpHooks, check_schedule
from laconic.runtime.hooks.gossip import GossipHooks
from laconic.runtime.hooks.gradients import GradientHooks
from laconic.runtime.hooks.local_updates import LocalUpdateHooks
from laconic.runtime.hooks.module_buffers import ModuleBuffers
from laconic.runtime.job import Job
from laconic.runtime.optimizer_state import broadcast_optimizer_state, check_optimizer_state
from laconic.runtime.servers.server_pool import ServerPool
from laconic.runtime.session import Session
from laconic.runtime.stopwatch import Stopwatch
from laconic.strategy import Strategy, as_strategy
from laconic.synchronization import LocalUpdates

_TIMEOUT_S = 300.0


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy | str,
    *,
    process_group: dist.ProcessGroup | None = None,
    transport: Transport | None = None,
    find_unused_parameters: bool | None = None,
    init_sync: bool = True,
    sync_optimizer: bool = False,
    timeout_s: float | None = None,
    events: EventSink | None = None,
    clock: Clock | None = None,
) -> Session:
    """Attach `strategy` to `model` and `optimizer`; every rank of the group calls it, and the loop stays as it was.

    model: an ordinary module, or one already wrapped in DistributedDataParallel.
    process_group: the ranks that train together; the default group if left out.
    transport: use this instead of torch.distributed, e.g. one of an InProcessCluster.
    find_unused_parameters: for strategies that exchange gradients. True, the default, allows parameters to get no
        gradient in some step or on some rank. False promises that all get one, saves a look at the result per step (on
        a GPU: an exchange of one byte per parameter), and raises when broken. A model wrapped in DDP has its own
        setting.
    init_sync: True makes parameters and buffers equal to rank 0's before anything else. False promises that they are
        already, as DDP's argument of this name does: a large model then starts at once behind a slow link.
    sync_optimizer: True makes the optimizer's state and settings equal to rank 0's, e.g. after local updates. False: a
        strategy that keeps replicas equal compares them and raises if they differ.
    timeout_s: how long any wait for other ranks may take before it raises an error that names them; 300 if left out.
        A transport given as `transport` has its own.
    events: where to record steps and exchanges, e.g. an EventLog.

    Gradients are views of exchange buffers while attached, if the strategy exchanges gradients. Replicas that may
    differ (local SGD, gossip) continue from a checkpoint by loading model, optimizer and session after attaching.
    """
    chosen = as_strategy(strategy)
    _check_types(model, optimizer, timeout_s)
    _check_choices(model, chosen, find_unused_parameters)
    if transport is not None and process_group is not None:
        raise AttachError("give process_group or transport, not both.")
    if transport is not None and timeout_s is not None:
        raise AttachError("timeout_s has no effect on a transport of your own; set the time limit where you make it.")
    parameters = trainable_parameters(model)
    _check_model(model, optimizer, parameters, chosen)
    if isinstance(model, DistributedDataParallel):
        check_schedule(model, chosen.scheduling)
        process_group = process_group or model.process_group
    clock = clock or WallClock()
    events = events or DiscardEvents()
    wire = transport or _torch_transport(process_group, timeout_s or _TIMEOUT_S)
    wire.acquire()
    stopwatch = Stopwatch(clock, events, wire.rank)
    engine = Engine(wire, stopwatch)
    pool: ServerPool | None = None
    try:
        unused = find_unused_parameters is not False
        job = Job(model, parameters, optimizer, chosen, wire, engine, clock, events, stopwatch, unused)
        began_s = clock.now()
        _make_equal(job, init_sync, sync_optimizer)
        job.strategy = chosen = settle(chosen, wire, clock, next(iter(parameters.values())).device)
        hooks: TrainingHooks | None = None
        buffers: ModuleBuffers | None = None
        if wire.world_size > 1 or chosen.synchronization.acts_alone:
            pool = _make_server_pool(job)
            hooks = _make_hooks(job, pool)
            if chosen.exchanges_gradients() and not isinstance(model, DistributedDataParallel):
                buffers = ModuleBuffers(job)
        about = {"strategy": str(chosen), "world_size": wire.world_size, "transport": wire.description}
        about |= what_was_settled(chosen)
        if wire.rank == 0:
            _warn_of_losses(chosen)
        events.write(Event("attach", began_s, wire.rank, 0, clock.now() - began_s, {**about}))
        return Session(job, hooks, buffers, pool, owns_transport=transport is None)
    except BaseException as error:
        if pool is not None:
            pool.abandon()
        wire.announce_failure(f"raised {type(error).__name__} while attaching: {one_line(error)}")
        engine.stop()
        wire.release()
        if transport is None:
            wire.close()
        raise


def _torch_transport(group: dist.ProcessGroup | None, timeout_s: float) -> Transport:
    """The transport over torch.distributed; held back where LACONIC_PACE says so, as the lab does on some machines."""
    link = link_from_environment(os.environ)
    torch_transport = TorchTransport(group, timeout_s=timeout_s)
    return torch_transport if link is None else PacedTransport(torch_transport, link, timeout_s=timeout_s)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that get gradients, each once, under the name they have without any wrapper."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in inner.named_parameters()
        if parameter.requires_grad
    }


def _check_choices(model: nn.Module, strategy: Strategy, find_unused_parameters: bool | None) -> None:
    """Raise where a choice would have no effect on this model or in this runtime."""
    if isinstance(model, DistributedDataParallel) and find_unused_parameters is not None:
        raise AttachError(
            "find_unused_parameters has no effect on a model wrapped in DistributedDataParallel; give it to that."
        )
    if strategy.exchanges_gradients() and not strategy.architecture.has_servers:
        return
    if isinstance(model, DistributedDataParallel):
        raise AttachError(
            "the model is wrapped in DistributedDataParallel, which averages gradients in every step; strategy "
            f'"{strategy}" cannot work that way. Attach to the plain module (ddp.module).'
        )
    if find_unused_parameters is not None and not strategy.exchanges_gradients():
        raise AttachError(
            f'find_unused_parameters has no effect with strategy "{strategy}": it exchanges no gradients. Leave it out.'
        )


def _make_server_pool(job: Job) -> ServerPool | None:
    """The servers of this strategy, if it has any."""
    architecture = job.strategy.architecture
    if not isinstance(architecture, ParameterServer):
        return None
    pool = ServerPool(job, architecture)
    job.servers = pool.client
    if job.strategy.exchanges_gradients():
        job.replan_servers = pool.replan
    return pool


def _make_hooks(job: Job, pool: ServerPool | None) -> TrainingHooks:
    """The place where PyTorch lets this strategy in."""
    if isinstance(job.model, DistributedDataParallel):
        return DdpHooks(job, job.model)
    rule = job.strategy.synchronization
    if job.strategy.architecture.scope == "neighbours":
        return GossipHooks(job) if rule.barrier else AsyncPairHooks(job)
    if pool is not None and not rule.barrier:
        return AsyncServerHooks(job, pool)
    if isinstance(rule, LocalUpdates):
        return LocalUpdateHooks(job, rule)
    return GradientHooks(job)


def _check_types(model: object, optimizer: object, timeout_s: float | None) -> None:
    if not isinstance(model, nn.Module):
        raise AttachError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if not isinstance(optimizer, Optimizer):
        raise AttachError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise AttachError(
            "LBFGS decides by the loss of its own rank how often to evaluate, so ranks would part ways. Use another "
            "optimizer, or give every rank the same loss in a loop of your own."
        )
    if timeout_s is not None and not timeout_s > 0:
        raise AttachError(f"timeout_s must be > 0, got {timeout_s}.")


def _check_model(
    model: nn.Module, optimizer: Optimizer, parameters: dict[str, nn.Parameter], strategy: Strategy
) -> None:
    if not parameters:
        raise AttachError("the model has no trainable parameter: nothing would be exchanged. Unfreeze some first.")
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise AttachError(f'parameter "{name}" has no shape yet (a lazy module). Run one forward pass first.')
    if optimizer_steps.is_attached(optimizer):
        raise AttachError("this optimizer is already attached; call session.detach() first.")
    if any(map(gradients.is_attached, parameters.values())):
        raise AttachError("this model is already attached; call session.detach() first.")
    optimizer_steps.check_optimizer(optimizer, {id(parameter) for parameter in parameters.values()})
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise UnsupportedGradient(
                f'layer "{name}" has sparse=True; sparse gradients are not exchanged. Build it with sparse=False.'
            )
    for name, parameter in parameters.items():
        if parameter.dtype not in strategy.compression.dtypes:
            raise UnsupportedGradient(
                f'compression {strategy.compression} cannot carry parameter "{name}" of {parameter.dtype}; it takes '
                f'{", ".join(str(dtype).removeprefix("torch.") for dtype in strategy.compression.dtypes)}. Use "none".'
            )
    strategy.compression.check([TensorSpec.of(name, parameter) for name, parameter in parameters.items()])


def _warn_of_losses(strategy: Strategy) -> None:
    """Say so where a method that needs its losses sent later has nothing that does."""
    layers = list(strategy.compression.layers())
    wants = next((layer for layer in layers if layer.wants_error_feedback), None)
    if strategy.synchronization.remembers_unsent or strategy.architecture.compensates:
        return
    if wants is not None and not any(layer.keeps_residual for layer in layers):
        warnings.warn(
            f'compression "{strategy.compression}" forgets what it does not send: {wants.name} is made to have that '
            'sent later and may train worse, or not at all, without. Add "+ error_feedback".',
            LaconicWarning,
            stacklevel=3,
        )


def _make_equal(job: Job, init_sync: bool, sync_optimizer: bool) -> None:
    """Check that all ranks attach the same thing, then start all of them from rank 0's values."""
    if job.transport.world_size == 1:
        return
    check_agreement(job, init_sync=init_sync, sync_optimizer=sync_optimizer)
    if sync_optimizer:
        for work in broadcast_optimizer_state(job.transport, [job.optimizer], job.parameters):
            work.wait()
    elif job.strategy.exchanges_gradients() and job.strategy.synchronization.replicas_identical:
        check_optimizer_state(job.transport, [job.optimizer], job.parameters)
    if not init_sync:
        check_equal(job)
        return
    tensors = [*job.model.parameters(), *job.model.buffers()]
    with torch.no_grad():
        for work in broadcast_all(job.transport, tensors, purpose="control", what="initial parameters and buffers"):
            work.wait()
