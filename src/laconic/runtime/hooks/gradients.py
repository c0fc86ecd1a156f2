"""Hooks for an ordinary module: one on every trainable parameter, called when its gradient has been accumulated.

Gradients are copied once, scaled by 1/n, into the flat tensor of their bucket; when a bucket is complete its
parameters' .grad become views of it, so the sum arrives without another copy. When the backward pass ends, buckets
that are not complete are filled with zeros, all exchanges in flight are awaited, and .grad is the mean before clipping,
unscaling or the optimizer use it. A schedule that defers does not wait: .grad is then a tensor that waits when an
operation uses it (lazy_gradient.py), and updates are deferred (deferred_updates.py).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from laconic.core.plan import Plan
from laconic.core.stateful import BucketState, ParameterState
from laconic.errors import warn_user
from laconic.runtime.buckets import Buckets
from laconic.runtime.engine import Task
from laconic.runtime.hooks import refused_gradients as refused
from laconic.runtime.hooks.contract import TrainingHooks
from laconic.runtime.hooks.deferred_updates import DeferredUpdates
from laconic.runtime.hooks.gradient_views import GradientViews
from laconic.runtime.hooks.lazy_gradient import LazyGradient
from laconic.runtime.hooks.parameter_hook import ParameterHook
from laconic.runtime.hooks.planning import Planning
from laconic.runtime.hooks.sending import Sending
from laconic.runtime.hooks.wrapping import refuse_optimizer_in_backward
from laconic.runtime.job import Job
from laconic.runtime.shards import gradient_of, is_sharded, local
from laconic.runtime.usage import Usage


class GradientHooks(TrainingHooks):
    """Hooks on the parameters of a module that nothing else synchronizes."""

    can_join = True

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._views = GradientViews(job.parameters, job.strategy.architecture.share(job.transport.world_size))
        self._lock = threading.Lock()  # autograd runs one thread per device
        self._planning = Planning(job)
        self._usage = None if job.find_unused_parameters is False else Usage(job)
        self._used = dict.fromkeys(job.parameters, False)
        self._passes = 0
        self._warned = False
        self._new_plan: Plan | None = None
        # Servers know this plan already.
        servers = job.strategy.architecture.has_servers
        self._buckets = self._allocate(job.fixed_plans()[0] if servers else self._planning.first_plan(), {})
        self._deferred = DeferredUpdates(job) if job.strategy.scheduling.defers else None
        self._graphs: dict[int, weakref.ref[object]] = {}
        self._late: list[tuple[int, str]] = []
        self._used_before: set[str] = set()
        self._sending = Sending(job, self._views)
        self._held_back: list[Task] = []
        self._open = False
        self._without_data = False
        self._may_add_to = True
        """Whether the next pass may add to what .grad holds now."""
        self._handles = [ParameterHook(self, name).put_on(parameter) for name, parameter in job.parameters.items()]

    def _allocate(self, plan: Plan, saved: ParameterState) -> Buckets:
        buckets = Buckets(plan, self._job.strategy, self._views.layouts, saved)
        self._views.use(buckets)
        sharded = [name for name, parameter in self._job.parameters.items() if is_sharded(parameter)]
        self._has_silent_shards = not all(_travels(name, buckets) for name in sharded)
        """Whether a shard here has no elements and blocks no exchange, so that its use cannot be announced in time."""
        return buckets

    def plan(self) -> Plan:
        return self._new_plan or self._buckets.plan

    def state(self) -> ParameterState:
        self.settle()
        return self._buckets.state_by_parameter()

    def bucket_states(self) -> list[BucketState]:
        return self._buckets.states

    def order(self) -> list[str]:
        return list(self._planning.order)

    def load(self, saved: ParameterState, order: list[str], step: int) -> None:
        self.settle()
        if order:
            self._new_plan = self._planning.follow(order)
        self._adopt_plan(saved)

    def _adopt_plan(self, saved: ParameterState) -> None:
        plan, self._new_plan = self.plan(), None
        self._sending.release()
        del self._buckets  # freed before the new ones are allocated: both might not fit
        self._buckets = self._allocate(plan, saved)
        if self._job.replan_servers is not None:
            self._job.replan_servers(plan.buckets)

    def take_part(self) -> None:
        """Exchange zeros, as after a backward pass without any gradient."""
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
        before, self._job.accumulating = self._job.accumulating, True
        try:
            yield
        finally:
            self._job.accumulating = before

    # -- during the backward pass ------------------------------------------------------------------------------

    def gradient_ready(self, name: str, parameter: torch.Tensor, *, others_follow: bool) -> None:
        """Take over one gradient; called by autograd once it has been accumulated.

        others_follow: hooks of the user will still run on it, so it is taken at the next call from autograd.
        """
        with self._lock:
            graph = torch._C._current_graph_task_id()
            if graph not in self._graphs and self._has_failed():
                self._start_over()
            if not self._may_add_to:
                self._refuse_added_to_result(name)
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

    def _refuse_added_to_result(self, arrived: str) -> None:
        """Raise if .grad holds a result that is no gradient; arrived: the parameter that was added to already."""
        self._may_add_to = True
        job, owned = self._job, {id(p) for group in self._job.param_groups for p in group["params"]}
        others = [name for name, parameter in job.parameters.items() if name != arrived and id(parameter) in owned]
        holds = self._views.first_result(others)
        if holds is not None:
            raise refused.added_to_result(holds, job.step, job.strategy)

    def _take_late(self, thread: int | None = None) -> None:
        """Take gradients that had other hooks to run: those of this thread, whose hooks are done, or all at the end."""
        due = [name for ident, name in self._late if thread in (None, ident)]
        self._late = [entry for entry in self._late if entry[1] not in due]
        for name in due:
            self._take(name, self._own_gradient(name))

    def _take(self, name: str, gradient: torch.Tensor | None) -> None:
        refuse_optimizer_in_backward(name, self._job.parameters[name])
        if gradient is None:
            return  # a custom autograd function returned None: counts as unused
        self._used[name] = True
        self._refuse_odd(name, gradient)
        if self._deferred is not None:
            self._deferred.check(name)
        self._planning.ready(name)
        self._fill(name, gradient)
        self._sending.launch(self._used, ended=False)

    def _refuse_odd(self, name: str, gradient: torch.Tensor) -> None:
        if self._deferred is not None and self._views.is_relaid(name):
            raise refused.new_memory_format(name, self._job.strategy.scheduling.name)
        refused.refuse_changed(name, gradient, self._buckets.views[name])
        refused.refuse_special(name, gradient)
        # Until its bucket is sent, a gradient that grew can be copied again, unless it grew inside the bucket.
        if name in self._sending.taken and (
            self._sending.has_left(name) or self._views.lies_in_a_bucket(name, gradient)
        ):
            raise refused.second_gradient(name)

    def _enter_pass(self, graph: int) -> None:
        """Begin the pass, unless it has begun, and register a callback for its end."""
        if not self._open:
            self._begin()
        # A re-entrant checkpoint runs a backward pass inside the backward pass; each has an end of its own.
        end = self._backward_ended
        self._graphs[graph] = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _has_failed(self) -> bool:
        """Whether the open pass will never end: autograd has dropped its callback."""
        return self._open and bool(self._graphs) and all(end() is None for end in self._graphs.values())

    def _start_over(self) -> None:
        """The open pass has failed, and the loop continues with another batch."""
        if self._sending.begun:
            raise refused.sent_in_part(self._job.step)
        for name, lay_at in sorted(self._sending.taken.items()):
            gradient = self._piece(name)
            # This gradient is local, and already scaled if it lies in a bucket: nothing may be added to it.
            if gradient is not None and gradient.data_ptr() == lay_at and bool(gradient.any()):
                raise refused.left_over(name, self._job.step)
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
            # Only now: zero_grad() has usually freed the old buckets' memory by the next backward pass.
            self._adopt_plan(self._buckets.state_by_parameter())
        self._views.scale = self._job.share("backward pass")
        ratio = self._job.loss_scale.begin_pass()
        if ratio is not None:
            self._buckets.rescale(ratio)
        self._open = True
        self._used_before = {name for name, used in self._used.items() if used}
        self._clear_pass()

    def _clear_pass(self) -> None:
        self._graphs.clear()
        self._late.clear()
        self._views.clear()
        self._sending.begin(self._buckets)

    def _fill(self, name: str, gradient: torch.Tensor | None) -> None:
        lay = gradient
        if gradient is not None and is_sharded(self._job.parameters[name]):
            lay = self._piece(name)  # after a partial sum was reduced, .grad may still hold the partial
        self._sending.fill(name, gradient, 0 if lay is None else lay.data_ptr())

    # -- at its end --------------------------------------------------------------------------------------------

    def _backward_ended(self) -> None:
        self._graphs.pop(torch._C._current_graph_task_id(), None)
        if not self._open:
            return
        with self._lock:
            self._take_late(threading.get_ident())
        if torch._C._current_autograd_node() is not None and (
            self._graphs or len(self._sending.taken) < len(self._job.parameters)
        ):
            return  # the end of a re-entrant checkpoint's pass, not of the outer one
        self._finish_pass()

    def _finish_pass(self) -> None:
        job = self._job
        with torch.no_grad():
            with self._lock:
                self._take_late()
            unfilled = [name for name in job.parameters if name not in self._sending.taken]
            unused = [name for name in unfilled if not self._used[name]]
            if unused and self._usage is None and not self._without_data:
                raise refused.unused(unused, job.step, job.transport.rank)
            own = {name: self._own_gradient(name) for name in unfilled}
            # They may lie in the bucket, where the exchange will overwrite them.
            kept = {name: gradient.clone() for name in unused if (gradient := own[name]) is not None}
            # A parameter without elements needs no gradient. A shard without elements does: the other shards have one.
            missing = any(_travels(name, self._buckets) or is_sharded(job.parameters[name]) for name in unused)
            # In a local step no other rank can be asked.
            usage = self._usage if job.strategy.synchronization.due(job.step + 1) else None
            if usage is not None:
                usage.pass_ended(missing=missing, must_ask=self._has_silent_shards)
            for name, gradient in own.items():
                self._fill(name, gradient)
            self._sending.launch(self._used, ended=True)
            tasks = list(self._sending.tasks)
            deferred = self._buckets.plan.deferred

            def exchanged() -> set[str]:
                """Wait for the means; return the parameters that no rank used."""
                if not deferred:
                    self._sending.wait()
                return set() if usage is None else usage.used_by_nobody(self._used, tasks, missing=missing)

            nobody = job.together("the gradients", exchanged, tasks, flags=tuple(self._used.values()))
            if not deferred:
                self._sending.ended()
            nowhere: set[str] = set()
            if usage is not None:
                nobody |= usage.used_by_no_voter(self._used)
                nobody |= {
                    name
                    for name in unused
                    if not _travels(name, self._buckets) and not is_sharded(job.parameters[name])
                }
                nowhere = {name for name in nobody if name in kept or self._is_frozen(name) or not self._is_owed(name)}
            elif not job.strategy.synchronization.due(job.step + 1):
                nowhere = set(filter(self._is_frozen, unused))
            for name in unused:
                if name not in nowhere:
                    self._views.hand_out(name)
                elif name in kept:
                    self._views.give_back(name, kept[name])
            self._views.copy_out()
            if deferred:
                self._hold_back(tasks, nowhere)
            self._new_plan = self._planning.pass_ended() or self._new_plan
        self._used = dict.fromkeys(self._used, False)
        self._passes += 1
        job.passes += 1
        self._open = False
        self._may_add_to = job.strategy.results_add_up()

    def _piece(self, name: str) -> torch.Tensor | None:
        """The local part of .grad, which may be a partial sum."""
        gradient = self._job.parameters[name].grad
        return None if gradient is None else local(gradient)

    def _own_gradient(self, name: str) -> torch.Tensor | None:
        return _arrived(gradient_of(self._job.parameters[name]))

    def _is_frozen(self, name: str) -> bool:
        """Whether it was frozen while attached: then a residual or a momentum must not move it."""
        return not self._job.parameters[name].requires_grad

    def _is_owed(self, name: str) -> bool:
        """Whether a residual has arrived for a parameter that no rank used."""
        if is_sharded(self._job.parameters[name]):
            # All shards must come to the same answer.
            return any(self._buckets.states[index].per_element() for index in self._buckets.buckets_of[name])
        return bool(self._buckets.views[name].any())

    def _hold_back(self, tasks: list[Task], nowhere: set[str]) -> None:
        """Defer the results."""
        assert self._deferred is not None
        self._held_back = tasks
        of = self._buckets.buckets_of
        held = {name: [tasks[index] for index in of[name]] for name in self._job.parameters if name not in nowhere}
        self._deferred.hold(self._buckets.plan, self._planning.order, held, self._buckets.views)

    # -- around the optimizer's step ---------------------------------------------------------------------------

    def before_step(self, *, closure: bool) -> None:
        if self._open:
            raise refused.unfinished_pass(self._job.step)
        if closure:
            return  # the passes run inside step()
        self._refuse_unexchanged()
        if self._passes == 0 and all(parameter.grad is None for parameter in self._job.parameters.values()):
            # The others may have made a pass: contribute zeros, or their exchange would meet our next one.
            self._begin()
            self._finish_pass()
        if self._passes > 1:
            self._warn_of_several_passes()

    def _warn_of_several_passes(self) -> None:
        """Warn once where a momentum takes the gradients of each pass."""
        job = self._job
        if job.loss_scale.has_scaler:
            return  # it skips steps, and what was sent in them is dropped
        if not self._warned and job.strategy.adds_to_momentum(job.step):
            self._warned = True
            warn_user(refused.several_passes(self._passes, job.step, job.strategy))

    def before_optimizer(self, optimizer: Optimizer) -> None:
        if self._deferred is not None:
            self._deferred.before_optimizer(optimizer)

    def after_step(self) -> None:
        self._refuse_unexchanged()
        self._passes = 0
        if self._deferred is not None:
            self._deferred.after_step()

    def _refuse_unexchanged(self) -> None:
        if any(self._used.values()):
            raise refused.only_accumulated(self._job.step)
        if self._passes == 0:
            for name, parameter in self._job.parameters.items():
                gradient = gradient_of(parameter)
                if gradient is None or isinstance(gradient, LazyGradient):
                    continue
                if not self._views.was_handed_out(name, gradient):
                    raise refused.never_exchanged(name, self._job.step)

    def remember(self, field: str, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            self._buckets.write(field, values)

    def recall(self, field: str) -> Mapping[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for index, state in enumerate(self._buckets.states):
            found |= self._buckets.views_of(index, state.flat[field])
        return found

    def wait(self) -> None:
        if self._deferred is not None:
            self._deferred.wait_all()

    def settle(self) -> None:
        self.finish_updates()
        self.wait()

    def finish_updates(self) -> None:
        if self._deferred is not None:
            self._deferred.flush()

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._deferred is not None:
            self._deferred.detach()
        for parameter in self._job.parameters.values():
            if isinstance(parameter.grad, LazyGradient):
                parameter.grad = parameter.grad.without_waiting()
        self._views.release()


def _arrived(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The real gradient, once it has arrived."""
    return gradient.arrived() if isinstance(gradient, LazyGradient) else gradient


def _travels(name: str, buckets: Buckets) -> bool:
    """Whether the parameter is in a bucket that has any elements."""
    return any(buckets.flats[index].numel() for index in buckets.buckets_of[name])
