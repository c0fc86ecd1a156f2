"""attach(): connect a strategy to an ordinary model and optimizer."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.core.clock import Clock, WallClock
from laconic.core.event import DiscardEvents, Event, EventSink, EventTee, check_sink, log_of_environment
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.paced import PacedLink, PacedTransport, link_from_environment
from laconic.core.torch_distributed import TorchTransport
from laconic.core.transport import Transport
from laconic.errors import AttachError, UnsupportedGradient, warn_user
from laconic.membership.member import is_started_by_laconic, ranks_per_replica
from laconic.membership.view import ViewBroken
from laconic.runtime.bounded_loss.group import DatagramGroup
from laconic.runtime.change import AtWork, Chooser, Workplace, refuse_fixed
from laconic.runtime.collective_costs import settle, what_was_settled
from laconic.runtime.elastic.recovery import ElasticRecovery
from laconic.runtime.elastic.settings import Elastic
from laconic.runtime.elastic.start import become_member
from laconic.runtime.elastic.support import refuse_strategy
from laconic.runtime.engine import Engine
from laconic.runtime.equal_start import make_equal
from laconic.runtime.exchange_group import group_of_exchanges, ranks_of, told_to_group
from laconic.runtime.fsdp_parts import fsdp_parts
from laconic.runtime.hooks import optimizer_steps, parameter_hook
from laconic.runtime.hooks.async_outer import AsyncOuterHooks
from laconic.runtime.hooks.async_pairs import AsyncPairHooks
from laconic.runtime.hooks.async_server import AsyncServerHooks
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.hooks.ddp import DdpHooks, check_schedule
from laconic.runtime.hooks.deferred_updates import why_not_deferred
from laconic.runtime.hooks.fully_sharded import FullyShardedHooks
from laconic.runtime.hooks.gossip import GossipHooks
from laconic.runtime.hooks.gradients import GradientHooks
from laconic.runtime.hooks.local_updates import LocalUpdateHooks
from laconic.runtime.hooks.module_buffers import ModuleBuffers
from laconic.runtime.hooks.optimizer_steps import OptimizerSteps, unwrapped
from laconic.runtime.hooks.wrapping import refuse_wrapped_parts, watch_for_wrappers
from laconic.runtime.job import Job
from laconic.runtime.loss_scale import LossScale
from laconic.runtime.other_shards import Attaching, attached_alike
from laconic.runtime.servers.server_pool import ServerPool
from laconic.runtime.session import Session, announce, close_after
from laconic.runtime.shards import (
    check_made_after_sharding,
    check_shards,
    plain_name,
    reshard,
    whole_specs_of,
)
from laconic.runtime.stopwatch import Stopwatch
from laconic.strategy import Strategy, as_strategy

_TIMEOUT_S = 300.0


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy | str | Chooser,
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    transport: Transport | None = None,
    find_unused_parameters: bool | None = None,
    init_sync: bool = True,
    sync_optimizer: bool = False,
    timeout_s: float | None = None,
    total_steps: int | None = None,
    grad_scaler: GradScaler | None = None,
    elastic: Elastic | None = None,
    events: EventSink | None = None,
    clock: Clock | None = None,
) -> Session:
    """Attach `strategy` to `model` and `optimizer`; every rank of the group calls it, and the loop stays as it was.

    model: an ordinary module, one already wrapped in DistributedDataParallel, or one whose parameters are sharded
        (fully_shard, tensor parallelism) over a mesh that shares only this rank with process_group; with the
        architecture "sharded", over exactly the ranks of process_group.
    strategy: how ranks communicate, as text or as an object; "auto" measures the first steps and chooses: see Auto.
    optimizer: one, or all of them if several train the model (Muon and AdamW): each is called once a step.
    process_group: the ranks that train together, as a group or a mesh of one dimension; the default group if left out.
    transport: use this instead of torch.distributed, e.g. one of an InProcessCluster.
    find_unused_parameters: for strategies that exchange gradients. Left out, parameters may get no gradient in some
        step or on some rank. True also keeps the buckets that DDP has with that setting, so that results are equal to
        DDP's bit for bit. False promises that every parameter gets a gradient, and raises when the promise is broken. A
        model wrapped in DDP has its own setting.
    init_sync: True makes parameters and buffers equal to rank 0's first. False promises that they are equal already, as
        DDP's argument of this name does: a large model then starts at once behind a slow link.
    sync_optimizer: True makes the optimizer's state and settings equal to rank 0's, e.g. after local updates. False: a
        strategy that keeps replicas equal compares them and raises if they differ.
    timeout_s: how long any wait for other ranks may take before it raises an error that names them; 300 if left out.
        A transport given as `transport` has its own limit.
    total_steps: how many optimizer steps the whole training takes, for methods that begin or end after a share of it.
    grad_scaler: the loop's GradScaler, for strategies that keep residuals. laconic finds it at the first step; pass it
        to continue from a checkpoint, and with elastic, where ranks that join take over its scale.
    elastic: let training go on when ranks die, join or leave, in a script that `laconic run` has started: see Elastic.
        The script does not call init_process_group then.
    events: where to record steps and exchanges, e.g. an EventLog.

    Gradients are views of exchange buffers while attached, if the strategy exchanges gradients. Replicas that may
    differ (local SGD, gossip) continue from a checkpoint by loading model, optimizer and session after attaching.
    If attach raises, nothing of it is left on the model or the optimizer.
    """
    joins = elastic is not None and is_started_by_laconic()
    with attached_alike(_known_to_shards(model, joins)) as attaching, told_to_group(model, process_group) as refusing:
        if transport is not None or joins:
            refusing.pop_all()  # those ranks meet in another way
        chooser = strategy if isinstance(strategy, Chooser) else None
        chosen = _planned(_first(strategy, model, total_steps, elastic), total_steps)
        optimizers = _check_types(model, optimizer, timeout_s)
        _check_choices(model, chosen, find_unused_parameters, elastic)
        if transport is not None:
            _check_own_transport(process_group, timeout_s)
        process_group = group_of_exchanges(model, process_group)
        parameters = trainable_parameters(model)
        check_shards(model, parameters, chosen, None if transport is not None else ranks_of(process_group, joins))
        _check_model(model, optimizers, parameters, chosen)
        clock = clock or WallClock()
        cleanup = ExitStack()
        recovery = None
        if elastic is not None:
            given = {"process_group": process_group, "transport": transport}
            recovery = become_member(
                chosen,
                model,
                parameters,
                elastic,
                timeout_s=timeout_s or _TIMEOUT_S,
                grad_scaler=grad_scaler,
                given=given,
                init_sync=init_sync,
            )
        if recovery is not None:
            wire: Transport = recovery.transport
            cleanup.callback(recovery.abandon)
        else:
            attaching.checked(timeout_s=timeout_s or _TIMEOUT_S)
            link = link_from_environment(os.environ) if transport is None else None
            refusing.pop_all()
            wire = transport or _torch_transport(process_group, link, timeout_s or _TIMEOUT_S)
            if transport is None:
                cleanup.callback(wire.close)
        try:
            wire.acquire()
            cleanup.callback(wire.release)
            events = _all_sinks(events, cleanup)
            stopwatch = Stopwatch(clock, events, wire.rank)
            engine = Engine(wire, stopwatch, recoverable=() if recovery is None else (ViewBroken,))
            cleanup.callback(engine.stop)
            unused, scale = find_unused_parameters, LossScale(chosen, grad_scaler)
            job = Job(model, parameters, optimizers, chosen, wire, engine, clock, events, stopwatch, unused, scale)
            job.recovery, job.chosen_by = recovery, "" if chooser is None else str(chooser)
            session = _start(
                job, attaching, cleanup, recovery, elastic, init_sync=init_sync, sync_optimizer=sync_optimizer
            )
            _detach_at_exit(session)
            if chooser is not None:
                chooser.begin(session, total_steps)
            return session
        except BaseException as error:
            announce(wire, error, while_doing=" while attaching")
            close_after(error, cleanup)
            raise


def _detach_at_exit(session: Session) -> None:
    here = os.getpid()

    def end() -> None:
        if os.getpid() == here:  # a process forked from this one has its handlers, but not its connections
            session.end_with_process()

    atexit.register(end)
    session.call_on_detach(lambda: atexit.unregister(end))


def _start(
    job: Job,
    attaching: Attaching,
    cleanup: ExitStack,
    recovery: ElasticRecovery | None,
    elastic: Elastic | None,
    *,
    init_sync: bool,
    sync_optimizer: bool,
) -> Session:
    """Agree with the other ranks, then install the strategy's hooks; `cleanup` undoes every step taken so far."""
    transport, began_s = job.transport, job.clock.now()
    if recovery is None:
        make_equal(job, attaching, init_sync, sync_optimizer)
    device = next(iter(job.parameters.values())).device
    job.strategy = strategy = settle(job.strategy, transport, job.clock, device)
    parts = cleanup.enter_context(ExitStack())
    at_work = _put_to_work(job, parts)
    steps = OptimizerSteps(job, at_work.hooks)
    cleanup.callback(steps.detach)
    if recovery is not None and at_work.hooks is not None:
        recovery.begin(job, at_work.hooks, at_work.buffers)
        cleanup.callback(recovery.stop_engine)
        transport = job.transport
    about = {"strategy": str(strategy), "world_size": transport.world_size, "transport": transport.description}
    about |= what_was_settled(strategy)
    job.events.write(Event("attach", began_s, transport.rank, 0, job.clock.now() - began_s, {**about}))
    workplace = Workplace(
        steps, parts, lambda other: _check_suits(job.model, job.optimizers, job.parameters, other), _put_to_work
    )
    return Session(job, at_work, workplace, cleanup, recovery=recovery, elastic=elastic)


def _put_to_work(job: Job, cleanup: ExitStack) -> AtWork:
    """Install the hooks of the job's strategy; `cleanup` removes them."""
    _warn(job)
    strategy = job.strategy
    if job.transport.world_size == 1 and not strategy.synchronization.acts_alone and job.recovery is None:
        return AtWork()
    pool = _make_server_pool(job)
    if pool is not None:
        cleanup.callback(pool.abandon)
    datagrams = _open_datagrams(job)
    if datagrams is not None:
        cleanup.callback(datagrams.close)
    hooks = _make_hooks(job, pool)
    cleanup.callback(hooks.detach)
    for parameter in () if strategy.architecture.holds_shards else job.parameters.values():
        if not parameter_hook.is_attached(parameter):
            cleanup.callback(parameter.register_post_accumulate_grad_hook(parameter_hook.Mark()).remove)
    cleanup.callback(watch_for_wrappers(job).remove)
    buffers: ModuleBuffers | None = None
    leaves_buffers = strategy.architecture.holds_shards or isinstance(job.model, DistributedDataParallel)
    if strategy.exchanges_gradients() and not leaves_buffers:
        buffers = ModuleBuffers(job)
        cleanup.callback(buffers.detach)
    return AtWork(hooks, buffers, pool, datagrams)


def _first(
    strategy: Strategy | str | Chooser, model: nn.Module, total_steps: int | None, elastic: Elastic | None
) -> Strategy:
    """The strategy to begin with."""
    if not isinstance(strategy, Chooser):
        return as_strategy(strategy)
    refuse_fixed(model, f'"{strategy}"', elastic=elastic is not None)
    return strategy.first(total_steps)


def _known_to_shards(model: object, joins: bool) -> dict[str, nn.Parameter]:
    """The parameters about whose shards ranks agree; none where replicas join one by one."""
    if not isinstance(model, nn.Module):
        return {}
    reshard(model)
    return {} if joins else dict(model.named_parameters())


def _all_sinks(given: EventSink | None, cleanup: ExitStack) -> EventSink:
    """The sink of the script, and the log that an environment variable names; the lab sets that variable."""
    if given is not None:
        check_sink(given)
    log = log_of_environment(os.environ)
    if log is None:
        return given or DiscardEvents()
    cleanup.callback(log.close)
    return log if given is None else EventTee(given, log)


def _planned(strategy: Strategy, total_steps: int | None) -> Strategy:
    if total_steps is None:
        return strategy
    if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps < 1:
        raise AttachError(f"total_steps must be a whole number >= 1, got {total_steps!r}.")
    return strategy.planned(total_steps)


def _torch_transport(group: dist.ProcessGroup | None, link: PacedLink | None, timeout_s: float) -> Transport:
    """The transport over torch.distributed, paced if LACONIC_PACE is set; the lab sets it on some machines."""
    if is_started_by_laconic() and (ranks_per_replica() > 1 or not dist.is_initialized()):
        raise AttachError(
            "this script was started by laconic run, whose processes meet in an elastic session only: write "
            "laconic.attach(..., elastic=laconic.Elastic()). Start a script for a fixed set of ranks with torchrun."
        )
    torch_transport = TorchTransport(group, timeout_s=timeout_s)
    return torch_transport if link is None else PacedTransport(torch_transport, link, timeout_s=timeout_s)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that get gradients, each once, under their names without any wrapper."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {plain_name(name): parameter for name, parameter in inner.named_parameters() if parameter.requires_grad}


def _check_own_transport(process_group: object, timeout_s: float | None) -> None:
    """Raise where an argument would have no effect on a transport that the user has made."""
    if process_group is not None:
        raise AttachError("give process_group or transport, not both.")
    if timeout_s is not None:
        raise AttachError("timeout_s has no effect on a transport of your own; set the time limit where you make it.")


def _check_choices(
    model: nn.Module, strategy: Strategy, find_unused_parameters: bool | None, elastic: Elastic | None
) -> None:
    """Raise where a choice would have no effect on this model or in this runtime."""
    if elastic is not None:
        # Before the checks of shards, whose advice is for jobs that are not elastic.
        refuse_strategy(strategy, elastic)
    if isinstance(model, DistributedDataParallel) and strategy.synchronization.quantity == "momentum":
        raise AttachError(
            f"{strategy.synchronization.name} changes the optimizer's momentum, and the model is wrapped in "
            "DistributedDataParallel. Attach to the plain module (ddp.module)."
        )
    if strategy.architecture.holds_shards and find_unused_parameters is not None:
        raise AttachError(
            f'find_unused_parameters has no effect with "{strategy.architecture}": FSDP decides that. Leave it out.'
        )
    if isinstance(model, DistributedDataParallel) and find_unused_parameters is not None:
        raise AttachError(
            "find_unused_parameters has no effect on a model wrapped in DistributedDataParallel; pass it to DDP."
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
    """Start the servers of this strategy, if it has any."""
    servers = job.strategy.architecture.servers
    if servers is None:
        return None
    rule = job.strategy.synchronization
    if rule.takes_first:
        rule.num_first(job.transport.world_size)  # raises where there are too few workers
    pool = ServerPool(job, servers)
    job.servers = pool.client
    if job.strategy.exchanges_gradients():
        job.replan_servers = pool.replan
    return pool


def _open_datagrams(job: Job) -> DatagramGroup | None:
    """The datagram group of this strategy, if the strategy averages only the rows that arrive."""
    bound = job.strategy.architecture.loss_bound
    # One rank that makes outer steps by itself has nobody to send to.
    group = None if bound is None or job.transport.world_size == 1 else DatagramGroup(job, bound)
    job.partial_means = group
    return group


def _make_hooks(job: Job, pool: ServerPool | None) -> TrainingHooks:
    """The hooks through which this strategy works."""
    if isinstance(job.model, DistributedDataParallel):
        return DdpHooks(job, job.model)
    if job.strategy.architecture.holds_shards:
        return FullyShardedHooks(job)
    rule = job.strategy.synchronization
    if job.strategy.mixes_parameters():
        return GossipHooks(job) if rule.barrier else AsyncPairHooks(job)
    if pool is not None and not rule.barrier:
        return AsyncServerHooks(job, pool) if rule.optimizer_on_servers else AsyncOuterHooks(job, pool)
    if rule.quantity == "change":
        return LocalUpdateHooks(job, rule)
    return GradientHooks(job)


def _check_types(
    model: object, optimizer: Optimizer | Sequence[Optimizer], timeout_s: float | None
) -> tuple[Optimizer, ...]:
    """The optimizers, unwrapped where a wrapper is not an optimizer itself."""
    if not isinstance(model, nn.Module):
        raise AttachError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = tuple(unwrapped(one) for one in given)
    if not optimizers or len({id(one) for one in optimizers}) < len(optimizers):
        raise AttachError(f"optimizer must be one optimizer, or several different ones, got {len(optimizers)}.")
    if any(isinstance(one, torch.optim.LBFGS) for one in optimizers):
        raise AttachError(
            "LBFGS decides by the loss of its own rank how often to evaluate, so ranks would diverge. Use another "
            "optimizer, or give every rank the same loss in a loop of your own."
        )
    if timeout_s is not None and not timeout_s > 0:
        raise AttachError(f"timeout_s must be > 0, got {timeout_s}.")
    return optimizers


def _check_model(
    model: nn.Module, optimizers: Sequence[Optimizer], parameters: dict[str, nn.Parameter], strategy: Strategy
) -> None:
    refuse_wrapped_parts(model)
    if not parameters:
        raise AttachError("the model has no trainable parameter: nothing would be exchanged. Unfreeze some first.")
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise AttachError(f'parameter "{name}" has no shape yet (a lazy module). Run one forward pass first.')
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise AttachError(
                f'"{plain_name(name)}" is on the meta device and has no values yet. Call model.to_empty(device=...), '
                "then initialize the model or load a checkpoint, make the optimizer, and attach."
            )
    if not strategy.architecture.holds_shards:  # sharded checks for other sessions itself
        if any(map(optimizer_steps.is_attached, optimizers)):
            raise AttachError("this optimizer is already attached; call session.detach() first.")
        if any(map(parameter_hook.is_attached, parameters.values())):
            raise AttachError("this model is already attached; call session.detach() first.")
    check_made_after_sharding(optimizers, parameters)
    for optimizer in optimizers:
        optimizer_steps.check_parameters(optimizer, {id(parameter) for parameter in parameters.values()})
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise UnsupportedGradient(
                f'layer "{name}" has sparse=True; sparse gradients are not exchanged. Build it with sparse=False.'
            )
    _check_suits(model, optimizers, parameters, strategy)
    if isinstance(model, DistributedDataParallel):
        check_schedule(model, strategy.scheduling)


def _check_suits(
    model: nn.Module, optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter], strategy: Strategy
) -> None:
    """Raise if this strategy cannot work on this model with these optimizers."""
    _check_all_are_trained(optimizers, parameters, strategy)
    # Whole tensors even where they are sharded, so that all ranks come to the same answer.
    tensors = whole_specs_of(parameters)
    if strategy.architecture.holds_shards:
        tensors = [tensor for part in fsdp_parts(model) for tensor in part.gradients(parameters)]
    traits = strategy.compression.traits
    for tensor in tensors:
        if tensor.dtype not in traits.dtypes:
            raise UnsupportedGradient(
                f'compression {strategy.compression} cannot carry parameter "{tensor.name}" of {tensor.dtype}; it '
                f'takes {", ".join(str(dtype).removeprefix("torch.") for dtype in traits.dtypes)}. Use "none".'
            )
    facts = OptimizerFacts.of(*optimizers)
    strategy.synchronization.check(tensors, facts)
    strategy.compression.check(tensors, facts)


def _check_all_are_trained(
    optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter], strategy: Strategy
) -> None:
    """Raise where an optimizer that the strategy does not know would change a parameter."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    trained = [id(parameter) for group in groups for parameter in group["params"]]
    if len(set(trained)) < len(trained):
        raise AttachError(
            "a parameter is in two optimizers, or twice in one, and would be updated twice. Put each parameter in one "
            "optimizer, once."
        )
    left_out = [name for name, parameter in parameters.items() if id(parameter) not in set(trained)]
    if left_out and not strategy.exchanges_gradients():
        raise AttachError(
            f'parameter "{left_out[0]}" and {len(left_out) - 1} more need gradients but are in no optimizer given. '
            f'"{strategy.synchronization}" exchanges parameters when optimizer.step() has been called, so it must know '
            "every optimizer: attach(model, [a, b], ...). Freeze what is not trained: parameter.requires_grad_(False)."
        )


def _warn(job: Job) -> None:
    """Warn about choices that are probably not intended; on every rank, and before any hook is installed."""
    _warn_of_losses(job.strategy)
    if job.strategy.scheduling.defers and job.transport.world_size > 1:
        reason = why_not_deferred(job.optimizers, job.parameters)
        job.updates_in_parts = reason is None
        if reason is not None:
            warn_user(
                f'"{job.strategy.scheduling.name}" updates layers one by one during the next forward pass, but the '
                f"optimizer's step cannot be made in parts ({reason}). So optimizer.step() waits for all gradients: "
                'the result is right, and nothing overlaps with the next forward pass. Use the schedule "fusion".'
            )


def _warn_of_losses(strategy: Strategy) -> None:
    """Warn where a method that relies on error feedback has a compressor without any."""
    whom = strategy.architecture
    if strategy.synchronization.remembers_unsent or whom.compensates or whom.adds_differences:
        return
    if strategy.compression.traits.wants_error_feedback:
        wants = next(layer for layer in strategy.compression.layers() if layer.own_traits.wants_error_feedback)
        warn_user(
            f'compression "{strategy.compression}" drops what it does not send: {wants.name} relies on sending that '
            'later and may otherwise train worse, or not at all. Add "+ error_feedback".'
        )
