"""An ordinary module: a hook on every trainable parameter, called when its gradient has been accumulated.

Gradients are copied once, scaled by 1/n, into the flat tensor of their bucket; when a bucket is complete its
parameters' .grad become views of it, so the sum arrives without another copy. When the backward pass ends, buckets
that are not complete are filled (a parameter without a gradient contributes zero), everything outstanding is awaited,
and .grad is the mean - before clipping, unscaling or the optimizer see it. A schedule that defers awaits nothing: .grad
is then something that waits when it is touched (lazy.py), and updates are made later (deferral.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from laconic.core.plan import Plan
from laconic.core.stateful import ParameterState
from laconic.errors import CommunicationError, UnsupportedGradient
from laconic.runtime.buckets import Buckets
from laconic.runtime.engine import Task
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.hooks.deferred_updates import Deferral
from laconic.runtime.hooks.lazy_gradient import LazyGradient
from laconic.runtime.hooks.planning import Planning
from laconic.runtime.job import Job
from laconic.runtime.usage import unused_everywhere


class ParameterHook:
    """The hook on one parameter; a class, so that an attached parameter can be recognised."""

    __slots__ = ("hooks", "name")

    def __init__(self, hooks: GradientHooks, name: str) -> None:
        self.hooks = hooks
        self.name = name

    def __call__(self, parameter: torch.Tensor) -> None:
        """Pass the gradient on."""
        self.hooks.gradient_ready(self.name, parameter)


class GradientHooks(TrainingHooks):
    """Hooks on the parameters of a module that nothing else synchronizes."""

    can_join: ClassVar[bool] = True

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._scale = job.strategy.architecture.share(job.transport.world_size)
        self._lock = threading.Lock()  # autograd runs one thread per device
        self._planning = Planning(job)
        self._used = dict.fromkeys(job.parameters, False)
        self._passes = 0
        self._new_plan: Plan | None = None
        # Servers have been told of this one already.
        servers = job.strategy.architecture.has_servers
        self._buckets = self._allocate(job.fixed_plans()[0] if servers else self._planning.first_plan(), {})
        self._deferral = Deferral(job) if job.strategy.scheduling.defers else None
        self._graphs: set[int] = set()
        self._filled: set[str] = set()
        self._missing: list[int] = []
        self._next = 0
        self._tasks: list[Task] = []
        self._held_back: list[Task] = []
        self._open = False
        self._without_data = False
        self._handles = [
            parameter.register_post_accumulate_grad_hook(ParameterHook(self, name))
            for name, parameter in job.parameters.items()
        ]

    def _allocate(self, plan: Plan, saved: ParameterState) -> Buckets:
        return Buckets(plan, self._job.strategy, self._job.parameters, saved)

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

    def gradient_ready(self, name: str, parameter: torch.Tensor) -> None:
        """Take over one gradient; called by autograd once it has been accumulated."""
        gradient = parameter.grad
        assert gradient is not None
        with self._lock:
            if isinstance(gradient, LazyGradient):
                gradient = gradient.arrived()
            self._used[name] = True
            if self._job.accumulating:
                return
            self._job.engine.check()
            self._refuse_odd(name, gradient)
            if not self._open:
                self._begin()
            self._call_back_at_the_end()
            if name in self._filled:
                self._refuse_second(name, gradient)
            if self._deferral is not None:
                self._deferral.check(name)
            self._planning.ready(name)
            self._fill(name, gradient)
            self._launch(ended=False)

    def _refuse_odd(self, name: str, gradient: torch.Tensor) -> None:
        view = self._buckets.views[name]
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
        if sent or _same_memory(gradient, self._buckets.views[name]):
            raise CommunicationError(
                f'parameter "{name}" got a second gradient after the first had been taken: the previous backward pass '
                "was interrupted, or the parameter is used in several re-entrant checkpoints. After an interrupted "
                "pass detach and attach again; otherwise pass use_reentrant=False to torch.utils.checkpoint."
            )

    def _begin(self) -> None:
        if self._deferral is not None:
            self._deferral.begin()
            self._planning.exchanged(self._held_back)
            self._held_back = []
        if self._new_plan is not None:
            # Only now: zero_grad() has usually let go of the old buckets' memory by the next backward pass.
            self._adopt_plan(self._buckets.state_by_parameter())
        self._scale = self._job.strategy.architecture.share(self._job.announce("backward pass").divisor)
        self._open = True
        self._filled.clear()
        self._graphs.clear()
        self._missing = [len(bucket.tensors) for bucket in self._buckets.plan.buckets]
        self._next = 0
        self._tasks = []

    def _call_back_at_the_end(self) -> None:
        # A re-entrant checkpoint runs a backward pass inside the backward pass; each has an end of its own.
        graph = torch._C._current_graph_task_id()
        if graph not in self._graphs:
            self._graphs.add(graph)
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _fill(self, name: str, gradient: torch.Tensor | None) -> None:
        view = self._buckets.views[name]
        if gradient is None:
            view.zero_()
        elif _same_memory(gradient, view):
            view.mul_(self._scale)
        else:
            torch.mul(gradient, self._scale, out=view)
        if name not in self._filled:
            self._filled.add(name)
            for bucket in self._buckets.buckets_of[name]:
                self._missing[bucket] -= 1

    def _launch(self, *, ended: bool) -> None:
        """Submit the buckets that are complete, in planned order."""
        buckets = self._buckets.plan.buckets
        if self._buckets.plan.launch == "after_backward" and not ended:
            return
        while self._next < len(buckets) and self._missing[self._next] == 0:
            for tensor in buckets[self._next].tensors:
                if self._used[tensor.owner]:
                    self._job.parameters[tensor.owner].grad = self._buckets.views[tensor.owner]
            last = self._next == len(buckets) - 1 and not self._buckets.plan.halves
            self._tasks.append(self._job.engine.submit(self._job.bucket_task(self._buckets, self._next, last=last)))
            self._next += 1
            if self._next == len(buckets) and self._buckets.plan.halves:
                self._carry_on()

    def _carry_on(self) -> None:
        """Ask for the second halves, those of the first layers first."""
        for task in reversed(self._tasks):
            self._job.engine.submit(
                Task(task.what, task.start, last=task is self._tasks[0], step=task.step, continues=task)
            )

    # -- at its end --------------------------------------------------------------------------------------------

    def _backward_ended(self) -> None:
        self._graphs.discard(torch._C._current_graph_task_id())
        if not self._open:
            return
        if torch._C._current_autograd_node() is not None and (
            self._graphs or len(self._filled) < len(self._job.parameters)
        ):
            return  # the end of a re-entrant checkpoint's pass, not of the whole
        self._finish_pass()

    def _finish_pass(self) -> None:
        job = self._job
        with torch.no_grad():
            unfilled = [name for name in job.parameters if name not in self._filled]
            unused = [name for name in unfilled if not self._used[name]]
            if unused and not job.find_unused_parameters and not self._without_data:
                raise CommunicationError(
                    f"{len(unused)} parameters got no gradient in step {job.step} on rank {job.transport.rank} "
                    f"({', '.join(unused[:3])}{', ...' if len(unused) > 3 else ''}), and find_unused_parameters=False "
                    "promises that all do. Attach with find_unused_parameters=True."
                )
            for name in unfilled:
                self._fill(name, job.parameters[name].grad)
            self._launch(ended=True)
            deferred = self._buckets.plan.deferred
            if not deferred:
                self._await_exchange()
            nowhere = set(unused)
            if job.find_unused_parameters:
                nowhere = unused_everywhere(
                    self._used, self._buckets, job.transport, job.engine, step=job.step, ask=deferred
                )
                for name in unused:
                    if name not in nowhere:
                        job.parameters[name].grad = self._buckets.views[name]
            if deferred:
                self._hold_back(nowhere)
            self._new_plan = self._planning.pass_ended() or self._new_plan
        self._used = dict.fromkeys(self._used, False)
        self._passes += 1
        self._open = False

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
        assert self._deferral is not None
        tasks, self._tasks = self._tasks, []
        self._held_back = tasks
        of = self._buckets.buckets_of
        held = {name: [tasks[index] for index in of[name]] for name in self._job.parameters if name not in nowhere}
        self._deferral.hold(held, self._buckets.views)

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

        if self._deferral is not None:
            self._deferral.before_step()

    def after_step(self) -> None:
        """See TrainingHooks."""
        self._refuse_unexchanged()
        self._passes = 0
        if self._deferral is not None:
            self._deferral.after_step()

    def _refuse_unexchanged(self) -> None:
        if any(self._used.values()):
            raise CommunicationError(
                f"step {self._job.step} would apply gradients that were only accumulated on this rank. Run the last "
                "backward pass of a step outside session.accumulate()."
            )
        if self._passes == 0:
            for name, parameter in self._job.parameters.items():
                gradient = parameter.grad
                if gradient is None or isinstance(gradient, LazyGradient):
                    continue
                if not _same_memory(gradient, self._buckets.views[name]):
                    raise CommunicationError(
                        f'step {self._job.step} would apply a gradient of parameter "{name}" that was never exchanged: '
                        "no backward pass has run since the last step. Compute gradients with backward(), or clear "
                        "them with optimizer.zero_grad()."
                    )

    def wait(self) -> None:
        """See TrainingHooks."""
        if self._deferral is not None:
            self._deferral.wait_all()

    def settle(self) -> None:
        """See TrainingHooks."""
        if self._deferral is not None:
            self._deferral.flush()
            self._deferral.wait_all()

    def detach(self) -> None:
        """See TrainingHooks."""
        for handle in self._handles:
            handle.remove()
        if self._deferral is not None:
            self._deferral.detach()
        for parameter in self._job.parameters.values():
            if isinstance(parameter.grad, LazyGradient):
                parameter.grad = parameter.grad.arrived()
            # A gradient that shared memory with a bucket becomes an ordinary tensor again.
            if parameter.grad is not None and parameter.grad._base is not None:
                parameter.grad = parameter.grad.clone()


def _same_memory(gradient: torch.Tensor, view: torch.Tensor) -> bool:
    return gradient.data_ptr() == view.data_ptr() and gradient.untyped_storage().data_ptr() != 0


def is_attached(parameter: nn.Parameter) -> bool:
    """Whether a session has its hook on this parameter."""
    hooks: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(hook, ParameterHook) for hook in hooks.values())
