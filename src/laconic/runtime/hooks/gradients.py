"""An ordinary module: a hook on every trainable parameter, called when its gradient has been accumulated.

Gradients are copied once, scaled by 1/n, into the flat tensor of their bucket; when a bucket is complete its
parameters' .grad become views of it, so the sum arrives without another copy. When the backward pass ends, buckets
that are not complete are filled (a parameter without a gradient contributes zero), everything outstanding is awaited,
and .grad is the mean - before clipping, unscaling or the optimizer see it. A schedule that defers awaits nothing: .grad
is then something that waits when it is touched (lazy_gradient.py), and updates are made later (deferred_updates.py).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.core.plan import Plan
from laconic.core.stateful import ParameterState
from laconic.errors import CommunicationError, UnsupportedGradient
from laconic.runtime.buckets import Buckets
from laconic.runtime.engine import Task
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.hooks.deferred_updates import DeferredUpdates
from laconic.runtime.hooks.gradient_views import GradientViews
from laconic.runtime.hooks.lazy_gradient import LazyGradient
from laconic.runtime.hooks.planning import Planning
from laconic.runtime.hooks.wrapping import refuse_optimizer_in_backward
from laconic.runtime.job import Job
from laconic.runtime.shards import gradient_of, is_sharded, local
from laconic.runtime.usage import Usage


class ParameterHook:
    """The hook on one parameter; a class, so that an attached parameter can be recognised.

    Hooks of the user may change a gradient, so this one is kept the last.
    """

    __slots__ = ("_hooks", "_key", "_name")

    def __init__(self, hooks: GradientHooks, name: str) -> None:
        self._hooks = hooks
        self._name = name
        self._key = -1

    def put_on(self, parameter: nn.Parameter) -> RemovableHandle:
        """Register it, behind those that are there."""
        handle = parameter.register_post_accumulate_grad_hook(self)
        self._key = handle.id
        return handle

    def __call__(self, parameter: torch.Tensor) -> None:
        """Pass the gradient on."""
        hooks: dict[int, object] = parameter._post_accumulate_grad_hooks  # pyrefly: ignore[missing-attribute]
        last = next(reversed(hooks)) == self._key
        # FSDP calls them itself, one after the other, and the order must not change meanwhile.
        if not last and not is_sharded(parameter):
            hooks[self._key] = hooks.pop(self._key)
        self._hooks.gradient_ready(self._name, parameter, others_follow=not last)


class GradientHooks(TrainingHooks):
    """Hooks on the parameters of a module that nothing else synchronizes."""

    can_join: ClassVar[bool] = True

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._views = GradientViews(job.parameters, job.strategy.architecture.share(job.transport.world_size))
        self._lock = threading.Lock()  # autograd runs one thread per device
        self._planning = Planning(job)
        self._usage = None if job.find_unused_parameters is False else Usage(job)
        self._used = dict.fromkeys(job.parameters, False)
        self._passes = 0
        self._new_plan: Plan | None = None
        # Servers have been told of this one already.
        servers = job.strategy.architecture.has_servers
        self._buckets = self._allocate(job.fixed_plans()[0] if servers else self._planning.first_plan(), {})
        self._deferred = DeferredUpdates(job) if job.strategy.scheduling.defers else None
        self._graphs: dict[int, weakref.ref[object]] = {}
        self._late: list[tuple[int, str]] = []
        self._used_before: set[str] = set()
        self._filled: dict[str, int] = {}  # and where the gradient lay that was taken
        self._missing: list[int] = []
        self._next = 0
        self._tasks: list[Task] = []
        self._held_back: list[Task] = []
        self._open = False
        self._without_data = False
        self._handles = [ParameterHook(self, name).put_on(parameter) for name, parameter in job.parameters.items()]

    def _allocate(self, plan: Plan, saved: ParameterState) -> Buckets:
        buckets = Buckets(plan, self._job.strategy, self._views.layouts, saved)
        self._views.use(buckets)
        return buckets

    def plan(self) -> Plan:
        """See TrainingHooks."""
        return self._new_plan or self._buckets.plan

    def state(self) -> ParameterState:
        """See TrainingHooks."""
        self.settle()
        return self._buckets.state_by_parameter()

    def order(self) -> list[str]:
        """See TrainingHooks."""
        return list(self._planning.order)

    def load(self, saved: ParameterState, order: list[str], step: int) -> None:
        """See TrainingHooks."""
        self.settle()
        if order:
            self._new_plan = self._planning.follow(order)
        self._adopt_plan(saved)

    def _adopt_plan(self, saved: ParameterState) -> None:
        plan, self._new_plan = self.plan(), None
        del self._buckets  # before the new ones are made: both would not always fit
        self._buckets = self._allocate(plan, saved)
        if self._job.replan_servers is not None:
            self._job.replan_servers(plan.buckets)

    def take_part(self) -> None:
        """See TrainingHooks; a backward pass that found no parameter."""
        self._without_data = True
        self._used = dict.fromkeys(self._used, False)
        for parameter in self._job.parameters.values():
            parameter.grad = None
        self._begin()
        self._finish_pass()
        for parameter in self._job.parameters.values():
            parameter.grad = None
        self._passes = 0
        self._without_data = False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """See TrainingHooks."""
        before, self._job.accumulating = self._job.accumulating, True
        try:
            yield
        finally:
            self._job.accumulating = before

    # -- during the backward pass ------------------------------------------------------------------------------

    def gradient_ready(self, name: str, parameter: torch.Tensor, *, others_follow: bool) -> None:
        """Take over one gradient; called by autograd once it has been accumulated.

        others_follow: hooks of the user will still run on it, so it is taken when autograd next comes here.
        """
        with self._lock:
            graph = torch._C._current_graph_task_id()
            if graph not in self._graphs and self._has_failed():
                self._start_over()
            if self._job.accumulating:
                self._used[name] |= parameter.grad is not None
                return
            self._job.engine.check()
            if graph not in self._graphs:
                self._enter_pass(graph)
            if self._late:
                self._take_late(threading.get_ident())
            if others_follow:
                self._late.append((threading.get_ident(), name))
            else:
                self._take(name, _arrived(gradient_of(parameter)))

    def _take_late(self, thread: int | None = None) -> None:
        """Take what had hooks to run: on the thread that ran them, where they are done by now, or at the end."""
        due = [name for ident, name in self._late if thread in (None, ident)]
        self._late = [entry for entry in self._late if entry[1] not in due]
        for name in due:
            self._take(name, self._own_gradient(name))

    def _take(self, name: str, gradient: torch.Tensor | None) -> None:
        refuse_optimizer_in_backward(name, self._job.parameters[name])
        if gradient is None:
            return  # a function of the user said that there is none: not used, as far as we are concerned
        self._used[name] = True
        self._refuse_odd(name, gradient)
        if name in self._filled:
            self._refuse_second(name, gradient)
        if self._deferred is not None:
            self._deferred.check(name)
        self._planning.ready(name)
        self._fill(name, gradient)
        self._launch(ended=False)

    def _refuse_odd(self, name: str, gradient: torch.Tensor) -> None:
        view = self._buckets.views[name]
        if self._deferred is not None and self._views.is_relaid(name):
            raise UnsupportedGradient(
                f'parameter "{name}" has changed its memory format since it was attached, and '
                f"{self._job.strategy.scheduling.name} would hand out gradients in the old one. Detach before "
                "model.to(memory_format=...), then attach again."
            )
        if gradient.dtype != view.dtype or gradient.shape != view.shape or gradient.device != view.device:
            raise UnsupportedGradient(
                f'parameter "{name}" has become {tuple(gradient.shape)} {gradient.dtype} on {gradient.device} since it '
                f"was attached as {tuple(view.shape)} {view.dtype} on {view.device}. Detach before changing a model, "
                "then attach again."
            )
        if gradient.layout != torch.strided:
            raise UnsupportedGradient(
                f'parameter "{name}" has a sparse gradient ({gradient.layout}); only dense ones are exchanged. '
                "Build the layer with sparse=False."
            )
        if gradient.requires_grad:
            raise UnsupportedGradient(
                f'the gradient of parameter "{name}" is itself differentiable (create_graph=True); averaging would '
                "cut that graph. Use torch.autograd.grad for the inner derivative."
            )

    def _refuse_second(self, name: str, gradient: torch.Tensor) -> None:
        # Before its bucket leaves, a gradient that grew can be copied again - unless it grew inside the bucket.
        sent = min(self._buckets.buckets_of[name]) < self._next
        if sent or self._views.lies_in_a_bucket(name, gradient):
            raise CommunicationError(
                f'parameter "{name}" got a second gradient after the first had been taken: the previous backward pass '
                "was interrupted, or the parameter is used in several re-entrant checkpoints. After an interrupted "
                "pass detach and attach again; otherwise pass use_reentrant=False to torch.utils.checkpoint."
            )

    def _enter_pass(self, graph: int) -> None:
        """Begin the pass, unless it has begun, and make sure to hear of its end."""
        if not self._open:
            self._begin()
        # A re-entrant checkpoint runs a backward pass inside the backward pass; each has an end of its own.
        end = self._backward_ended
        self._graphs[graph] = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _has_failed(self) -> bool:
        """Whether the pass that is open will never end: autograd has let go of what it was to call then."""
        return self._open and bool(self._graphs) and all(end() is None for end in self._graphs.values())

    def _start_over(self) -> None:
        """The pass that is open has failed, and the loop goes on with another batch."""
        if self._next > 0:
            raise CommunicationError(
                f"the last backward pass of step {self._job.step} was interrupted after a part of its gradients had "
                "been sent, which cannot be taken back. Detach and attach again."
            )
        for name in sorted(self._filled):
            gradient = self._piece(name)
            # This rank's alone, and scaled already if it lies in a bucket: nothing may be added to it.
            if gradient is not None and gradient.data_ptr() == self._filled[name] and bool(gradient.any()):
                raise CommunicationError(
                    f'the last backward pass of step {self._job.step} was interrupted, and the gradient of "{name}" '
                    "still holds a part of it. Call optimizer.zero_grad() after skipping a batch."
                )
        for name in self._used:
            self._used[name] = name in self._used_before and self._job.parameters[name].grad is not None
        self._planning.start_over()
        self._clear_pass()

    def _begin(self) -> None:
        if self._deferred is not None:
            self._deferred.begin()
            self._planning.exchanged(self._held_back)
            self._held_back = []
        self._views.clear()
        if self._new_plan is not None:
            # Only now: zero_grad() has usually let go of the old buckets' memory by the next backward pass.
            self._adopt_plan(self._buckets.state_by_parameter())
        self._views.scale = self._job.strategy.architecture.share(self._job.announce("backward pass").divisor)
        ratio = self._job.loss_scale.begin_pass()
        if ratio is not None:
            self._buckets.rescale(ratio)
        self._open = True
        self._used_before = {name for name, used in self._used.items() if used}
        self._clear_pass()

    def _clear_pass(self) -> None:
        self._filled.clear()
        self._graphs.clear()
        self._late.clear()
        self._views.clear()
        self._missing = [len(bucket.tensors) for bucket in self._buckets.plan.buckets]
        self._next = 0
        self._tasks = []

    def _fill(self, name: str, gradient: torch.Tensor | None) -> None:
        self._views.fill(name, gradient)
        if name not in self._filled:
            if gradient is not None and is_sharded(self._job.parameters[name]):
                gradient = self._piece(name)  # where a sum of summands was taken, the summand is what may be left
            self._filled[name] = 0 if gradient is None else gradient.data_ptr()
            for bucket in self._buckets.buckets_of[name]:
                self._missing[bucket] -= 1

    def _launch(self, *, ended: bool) -> None:
        """Submit the buckets that are complete, in planned order."""
        buckets = self._buckets.plan.buckets
        if self._buckets.plan.launch == "after_backward" and not ended:
            return
        while self._next < len(buckets) and self._missing[self._next] == 0:
            owners = [tensor.owner for tensor in buckets[self._next].tensors]
            self._views.flush(owners)
            for owner in owners:
                if self._used[owner]:
                    self._views.hand_out(owner)
            last = self._next == len(buckets) - 1 and not self._buckets.plan.halves
            self._tasks.append(self._job.engine.submit(self._job.bucket_task(self._buckets, self._next, last=last)))
            self._next += 1
            if self._next == len(buckets) and self._buckets.plan.halves:
                self._submit_second_halves()

    def _submit_second_halves(self) -> None:
        """Ask for the second halves, those of the first layers first."""
        for task in reversed(self._tasks):
            self._job.engine.submit_second_half(task, last=task is self._tasks[0])

    # -- at its end --------------------------------------------------------------------------------------------

    def _backward_ended(self) -> None:
        self._graphs.pop(torch._C._current_graph_task_id(), None)
        if not self._open:
            return
        with self._lock:
            self._take_late(threading.get_ident())
        if torch._C._current_autograd_node() is not None and (
            self._graphs or len(self._filled) < len(self._job.parameters)
        ):
            return  # the end of a re-entrant checkpoint's pass, not of the whole
        self._finish_pass()

    def _finish_pass(self) -> None:
        job = self._job
        with torch.no_grad():
            with self._lock:
                self._take_late()
            unfilled = [name for name in job.parameters if name not in self._filled]
            unused = [name for name in unfilled if not self._used[name]]
            if unused and self._usage is None and not self._without_data:
                raise CommunicationError(
                    f"{len(unused)} parameters got no gradient in step {job.step} on rank {job.transport.rank} "
                    f"({', '.join(unused[:3])}{', ...' if len(unused) > 3 else ''}), and find_unused_parameters=False "
                    "promises that all do. Attach with find_unused_parameters=True."
                )
            own = {name: self._own_gradient(name) for name in unfilled}
            # They may lie in the bucket, where the exchange will overwrite them.
            kept = {name: gradient.clone() for name in unused if (gradient := own[name]) is not None}
            # What travels in no bucket holds nobody up, so nobody can be told of it in time; nobody needs it either.
            missing = any(self._travels(name) for name in unused)
            if self._usage is not None:
                self._usage.pass_ended(missing=missing)
            for name, gradient in own.items():
                self._fill(name, gradient)
            self._launch(ended=True)
            tasks = list(self._tasks)
            deferred = self._buckets.plan.deferred
            if not deferred:
                self._await_exchange()
            nowhere: set[str] = set()
            if self._usage is not None:
                nobody = self._usage.used_by_nobody(self._used, tasks, missing=missing)
                nobody |= {name for name in unused if not self._travels(name)}
                nowhere = {name for name in nobody if name in kept or not self._is_owed(name)}
            for name in unused:
                if name not in nowhere:
                    self._views.hand_out(name)
                elif name in kept:
                    self._views.give_back(name, kept[name])
            self._views.copy_out()
            if deferred:
                self._hold_back(nowhere)
            self._new_plan = self._planning.pass_ended() or self._new_plan
        self._used = dict.fromkeys(self._used, False)
        self._passes += 1
        self._open = False

    def _piece(self, name: str) -> torch.Tensor | None:
        """What lies in .grad here, be it a summand or all."""
        gradient = self._job.parameters[name].grad
        return None if gradient is None else local(gradient)

    def _own_gradient(self, name: str) -> torch.Tensor | None:
        return _arrived(gradient_of(self._job.parameters[name]))

    def _travels(self, name: str) -> bool:
        """Whether it shares a bucket that has any elements."""
        return any(self._buckets.flats[index].numel() for index in self._buckets.buckets_of[name])

    def _is_owed(self, name: str) -> bool:
        """Whether something that compression had held back has arrived for a parameter nobody used."""
        if is_sharded(self._job.parameters[name]):
            # All shards must say the same, whatever arrived for each.
            return any(self._buckets.states[index].per_element() for index in self._buckets.buckets_of[name])
        return bool(self._buckets.views[name].any())

    def _await_exchange(self) -> None:
        job = self._job
        device = self._tasks[-1].device if self._tasks else torch.device("cpu")
        began = job.stopwatch.mark(device)
        for task in self._tasks:  # each: a later one may be done before an earlier one
            job.engine.wait(task)
        self._tasks = []
        job.stopwatch.note("wait", job.step, began, job.stopwatch.mark(device))

    def _hold_back(self, nowhere: set[str]) -> None:
        """Let the outcome come when it comes."""
        assert self._deferred is not None
        tasks, self._tasks = self._tasks, []
        self._held_back = tasks
        of = self._buckets.buckets_of
        held = {name: [tasks[index] for index in of[name]] for name in self._job.parameters if name not in nowhere}
        self._deferred.hold(self._buckets.plan, self._planning.order, held, self._buckets.views)

    # -- around the optimizer's step ---------------------------------------------------------------------------

    def before_step(self, *, closure: bool) -> None:
        """See TrainingHooks."""
        if self._open:
            raise CommunicationError(
                f"the backward pass of step {self._job.step} has not exchanged all gradients: it was interrupted, or "
                "all parameters are inside re-entrant checkpoints and some got no gradient. Detach and attach again, "
                "or pass use_reentrant=False to torch.utils.checkpoint."
            )
        if closure:
            return  # the passes are still to come
        self._refuse_unexchanged()
        if self._passes == 0 and all(parameter.grad is None for parameter in self._job.parameters.values()):
            # The others may have had a pass: take part with nothing, or they would meet our next one.
            self._begin()
            self._finish_pass()

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """See TrainingHooks."""
        if self._deferred is not None:
            self._deferred.before_optimizer(optimizer)

    def after_step(self) -> None:
        """See TrainingHooks."""
        self._refuse_unexchanged()
        self._passes = 0
        if self._deferred is not None:
            self._deferred.after_step()

    def _refuse_unexchanged(self) -> None:
        if any(self._used.values()):
            raise CommunicationError(
                f"step {self._job.step} would apply gradients that were only accumulated on this rank. Run the last "
                "backward pass of a step outside session.accumulate()."
            )
        if self._passes == 0:
            for name, parameter in self._job.parameters.items():
                gradient = gradient_of(parameter)
                if gradient is None or isinstance(gradient, LazyGradient):
                    continue
                if not self._views.was_handed_out(name, gradient):
                    raise CommunicationError(
                        f'step {self._job.step} would apply a gradient of parameter "{name}" that was never exchanged: '
                        "no backward pass has run since the last step. Compute gradients with backward(), or clear "
                        "them with optimizer.zero_grad()."
                    )

    def remember(self, field: str, values: Mapping[str, torch.Tensor]) -> None:
        """See TrainingHooks."""
        with torch.no_grad():
            self._buckets.write(field, values)

    def wait(self) -> None:
        """See TrainingHooks."""
        if self._deferred is not None:
            self._deferred.wait_all()

    def settle(self) -> None:
        """See TrainingHooks."""
        self.finish_updates()
        self.wait()

    def finish_updates(self) -> None:
        """See TrainingHooks."""
        if self._deferred is not None:
            self._deferred.flush()

    def detach(self) -> None:
        """See TrainingHooks."""
        for handle in self._handles:
            handle.remove()
        if self._deferred is not None:
            self._deferred.detach()
        for parameter in self._job.parameters.values():
            if isinstance(parameter.grad, LazyGradient):
                parameter.grad = parameter.grad.without_waiting()
        self._views.release()


def _arrived(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient as it is when it is there."""
    return gradient.arrived() if isinstance(gradient, LazyGradient) else gradient


def is_attached(parameter: nn.Parameter) -> bool:
    """Whether a session has its hook on this parameter."""
    hooks: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(hook, ParameterHook) for hook in hooks.values())
