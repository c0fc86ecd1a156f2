"""Deferred updates: optimizer.step() returns at once, and parameters are updated when their layer is used next.

Parameters are cut into groups that follow from the plan alone, in the order of the forward pass. When a layer is about
to be used, the gradients of its groups are awaited and the optimizer makes its step for them, with the settings it had
when step() was called. Which parameters share a step never depends on what has arrived on a rank.

This needs a separable optimizer (separability.py). With any other optimizer, step() itself waits for all gradients, as
it does while another hook runs after the step, because such a hook may read parameters. A parameter that is used
outside its own module is found in the first pass, and from then on is updated before the forward pass starts. If a
parameter is used like this only later, the backward pass detects it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from laconic.core.plan import Plan
from laconic.errors import CommunicationError, LaconicWarning
from laconic.runtime.engine import Task
from laconic.runtime.hooks.lazy_gradient import LazyGradient
from laconic.runtime.hooks.module_hook import ModuleHook
from laconic.runtime.hooks.optimizer_steps import others_watch
from laconic.runtime.hooks.separability import Settings, group_settings, step_in_part, why_not_separable
from laconic.runtime.job import Job


def why_not_deferred(optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> str | None:
    """Why updates of these optimizers cannot be made later, in parts; None if they can."""
    together = counted_together(parameters)
    if together:
        # Later layers are updated when the forward pass has used earlier ones, whose values the backward pass needs.
        return (
            f'parameters "{together[0]}" and "{together[1]}" are views of one tensor, so torch takes an update of one '
            "for a change of the other"
        )
    for optimizer in optimizers:
        reason = why_not_separable(optimizer)
        if reason is not None:
            return f"{type(optimizer).__name__}: {reason}"
    return None


def counted_together(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Parameters that share torch's counter of in-place changes; usually there are none.

    nn.Parameter(flat[:10]) and nn.Parameter(flat[10:]) do. If several tensors are shared like this,
    the parameters of one of them are returned.
    """

    def moved(changed: Iterable[str]) -> dict[str, int]:
        """By how much each counter grows when these parameters are marked as changed."""
        before = {name: parameter._version for name, parameter in parameters.items()}
        increment_version([parameters[name] for name in changed])
        return {name: parameter._version - before[name] for name, parameter in parameters.items()}

    sharing = next((name for name, by in moved(parameters).items() if by > 1), None)
    return [] if sharing is None else [name for name, by in moved([sharing]).items() if by]


class DeferredUpdates:
    """Defers updates and makes them before their parameters are used."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._names = {id(parameter): name for name, parameter in job.parameters.items()}
        self._optimizer_of = {
            self._names[id(p)]: optimizer
            for optimizer in job.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) in self._names
        }
        self._warned = False
        self._plan: Plan | None = None
        self._groups: list[list[str]] = []
        self._group_of: dict[str, int] = {}
        self._tasks: dict[str, list[Task]] = {}
        self._views: dict[str, torch.Tensor] = {}
        self._settings: dict[int, Settings] = {}
        self._pending: dict[str, tuple[int, int]] = {}
        """Parameters whose update is deferred, with the version that shows whether the script has written to them."""
        self._stale: set[str] = set()
        self._borrowed: set[str] | None = None
        self._entered: set[str] = set()
        self._handles: list[Any] = []
        # In the graph of a compiled model there are no updates, or torch.compile would compile the optimizer's step.
        self._before_graph = torch.compiler.disable(self.before_graph)
        for module, names in self._layers():
            before = ModuleHook(
                lambda _, names=names: self._enter_layer(names),
                before_copy=lambda names=names: self._refuse_copy(names),
                before_save=self.flush,
            )
            self._handles += [
                module.register_forward_pre_hook(before),
                module.register_state_dict_pre_hook(ModuleHook(lambda _, names=names: self.update(names))),
                module.register_load_state_dict_pre_hook(ModuleHook(lambda _, names=names: self.update(names))),
            ]
        # A module's own parameters are copied before its hooks, and its submodules after them.
        before_model = ModuleHook(lambda _: self._enter_model(), before_copy=self._before_model_copy)
        self._handles += [
            job.model.register_forward_pre_hook(before_model, prepend=True),
            *(optimizer.register_state_dict_pre_hook(lambda *_: self.flush()) for optimizer in job.optimizers),
            *(optimizer.register_load_state_dict_pre_hook(lambda *_: self.flush()) for optimizer in job.optimizers),
        ]

    def _layers(self) -> Iterable[tuple[nn.Module, list[str]]]:
        for module in self._job.model.modules():
            names = [self._names[id(p)] for p in module._parameters.values() if id(p) in self._names]
            if names:
                yield module, names

    # -- after a backward pass ---------------------------------------------------------------------------------

    def hold(
        self, plan: Plan, order: Sequence[str], tasks: dict[str, list[Task]], views: dict[str, torch.Tensor]
    ) -> None:
        """Defer these gradients: until they arrive, .grad is a tensor that waits when an operation uses it.

        order: all parameters as their gradients become ready, from the last layer to the first.
        """
        if self._borrowed is None:
            # Used, but never by their own module.
            self._borrowed = set(tasks) - self._entered
        if plan is not self._plan:
            self._plan = plan
            self._groups = update_groups(plan, order, self._job.parameters)
            self._group_of = {name: number for number, group in enumerate(self._groups) for name in group}
        self._tasks, self._views = tasks, views
        for name in tasks:
            self._job.parameters[name].grad = self._lazy(name)

    def _lazy(self, name: str) -> LazyGradient:
        tasks = self._tasks[name]
        return LazyGradient(self._views[name], lambda: self._touched(name), lambda: self._has_arrived(tasks))

    def _has_arrived(self, tasks: Sequence[Task]) -> bool:
        """Whether these exchanges are complete; the current stream then waits for them, the host does not."""
        if not all(task.succeeded for task in tasks):
            return False
        for task in tasks:
            if task.outputs_ready is not None:
                torch.cuda.current_stream(task.device).wait_event(task.outputs_ready)
        return True

    def _touched(self, name: str) -> None:
        """An operation uses this gradient: wait for it, and make its deferred update before it can be changed."""
        self.update([name])
        self._await(name)

    def _await(self, name: str) -> None:
        for task in self._tasks.get(name, ()):
            self._job.engine.wait(task)

    def wait_all(self) -> None:
        """Return when nothing is in flight."""
        for name in self._tasks:
            self._await(name)

    # -- around the optimizer's step ---------------------------------------------------------------------------

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """Hide gradients with deferred updates from an optimizer that is about to make its step."""
        mine = [name for name in self._tasks if self._optimizer_of.get(name) is optimizer]
        lazy = [name for name in mine if isinstance(self._job.parameters[name].grad, LazyGradient)]
        if not self._may_defer(optimizer):
            for name in lazy:
                self._await(name)
                self._job.parameters[name].grad = self._views[name].detach()
            return
        self._settings[id(optimizer)] = group_settings(optimizer)
        for name in lazy:
            self._job.parameters[name].grad = None
            self._pending[name] = (0, 0)

    def _may_defer(self, optimizer: Optimizer) -> bool:
        if not self._job.updates_in_parts:
            return False
        if getattr(optimizer, "found_inf", None) is not None:
            return False  # a GradScaler's scale is known to the optimizer during this call only
        if not others_watch(optimizer):
            return True
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"another hook on the step of {type(optimizer).__name__} may look at gradients or parameters, so "
                f'optimizer.step() waits for all gradients: "{self._job.strategy.scheduling.name}" overlaps nothing '
                'with the next forward pass. Remove the hook, or use the schedule "fusion".',
                LaconicWarning,
                stacklevel=2,
            )
        return False

    def after_step(self) -> None:
        """Restore the hidden gradients, and record the versions of the parameters."""
        for name in self._pending:
            self._job.parameters[name].grad = self._lazy(name)
            self._pending[name] = self._signature(name)

    def _signature(self, name: str) -> tuple[int, int]:
        parameter = self._job.parameters[name]
        return parameter._version, parameter.data_ptr()

    # -- before a layer is used --------------------------------------------------------------------------------

    # Inside a compiled graph the hooks of layers do nothing. Their parameters count as borrowed, so they are updated
    # before the model starts.

    def _enter_layer(self, names: Sequence[str]) -> None:
        if not torch.compiler.is_compiling():
            self.before_layer(names)
        elif self._pending:
            self._before_graph()

    def _enter_model(self) -> None:
        if not torch.compiler.is_compiling():
            self.before_model()
        else:  # even if nothing is deferred: then one graph serves every step
            self._before_graph()

    def before_graph(self) -> None:
        """A compiled part begins, and updates are still deferred: it was not compiled when the first pass was made."""
        if self._borrowed is not None:
            self._borrowed.update(self._pending)
        self.flush()

    def before_model(self) -> None:
        """The forward pass of the model begins."""
        if self._borrowed is None:
            # Until it is known which modules use which parameters, all must be up to date.
            self.flush()
        elif self._pending:
            self.update(self._borrowed)

    def before_layer(self, names: Sequence[str]) -> None:
        """The forward pass of a layer with these parameters begins."""
        if self._borrowed is None:
            self._entered.update(names)
        self.update(names)

    def flush(self) -> None:
        """Make every deferred update."""
        self.update(list(self._pending))

    def update(self, names: Iterable[str]) -> None:
        """Make the deferred updates of the groups that these parameters are in."""
        if self._pending:
            for number in sorted({self._group_of[name] for name in names if name in self._pending}):
                self._update_group([name for name in self._groups[number] if name in self._pending])

    def _update_group(self, names: Sequence[str]) -> None:
        job = self._job
        device = self._views[names[0]].device
        began = job.stopwatch.mark(device)
        for name in names:
            self._await(name)
        job.stopwatch.note("wait", job.step - 1, began, job.stopwatch.mark(device))
        self._refuse_changed(names)
        shown = {name: job.parameters[name].grad for name in names}
        for name in names:
            del self._pending[name]
            job.parameters[name].grad = self._views[name].detach()
        for optimizer in job.optimizers:
            chosen = {id(job.parameters[name]) for name in names if self._optimizer_of[name] is optimizer}
            if chosen:
                params = [[p for p in group["params"] if id(p) in chosen] for group in optimizer.param_groups]
                step_in_part(optimizer, self._settings[id(optimizer)], params)
        for name, gradient in shown.items():
            if not isinstance(gradient, LazyGradient):  # zero_grad() was called, or the script has set another gradient
                job.parameters[name].grad = gradient

    def _refuse_changed(self, names: Sequence[str]) -> None:
        for name in names:
            if self._signature(name) != self._pending[name]:
                raise CommunicationError(
                    f'parameter "{name}" was changed after optimizer.step() of step {self._job.step - 1}, while its '
                    f'update was still waiting for gradients under "{self._job.strategy.scheduling.name}". Call '
                    "session.settle() before reading or writing parameters between step() and the next forward pass, "
                    'or use the schedule "fusion".'
                )

    def _refuse_copy(self, names: Iterable[str]) -> None:
        late = [name for name in names if name in self._pending]
        if late:
            raise CommunicationError(
                f'a module with parameter "{late[0]}" was copied after optimizer.step() of step {self._job.step - 1}, '
                f'while its update was still waiting for gradients under "{self._job.strategy.scheduling.name}". Call '
                "session.settle() before copying it."
            )

    def _before_model_copy(self) -> None:
        self._refuse_copy(self._names[id(p)] for p in self._job.model._parameters.values() if id(p) in self._names)
        self.flush()

    # -- at the next backward pass -----------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward pass begins: parameters that were not used meanwhile are updated now."""
        self._stale = set(self._pending)
        self.flush()
        self.wait_all()
        # Also the views: with a plan that defers nothing, the memory of the last one that did would be kept for good.
        self._tasks, self._views = {}, {}

    def check(self, name: str) -> None:
        """Raise if the gradient of this parameter was computed with an outdated value."""
        if name in self._stale:
            raise CommunicationError(
                f'parameter "{name}" was used in step {self._job.step} before its update of the previous step had been '
                "made: code outside its own module has read it, and did not do so in the first step. "
                f'{self._job.strategy.scheduling.name} cannot foresee that; use the schedule "fusion". If a function '
                "that calls the model was compiled before attach(), compile it after attach()."
            )

    def detach(self) -> None:
        """Remove every hook; waits for nothing."""
        for handle in self._handles:
            handle.remove()
        if self._pending:
            warnings.warn(
                f"training ended while updates of {len(self._pending)} parameters were waiting for gradients: the "
                "model holds some parameters of one step and some of the step before. Continue from a checkpoint.",
                LaconicWarning,
                stacklevel=2,
            )
        self._pending.clear()


def update_groups(plan: Plan, order: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Parameters that are updated together: adjacent in the forward pass, up to the size of the largest bucket.

    Groups depend on the plan alone, which is the same on all ranks. Larger groups would wait for gradients before they
    are needed; smaller ones would call the optimizer more often than messages arrive.
    """
    enough = max((bucket.nbytes for bucket in plan.buckets), default=0)
    groups: list[list[str]] = []
    filled = enough
    for name in [*reversed(order), *(name for name in parameters if name not in set(order))]:
        if filled >= enough:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += parameters[name].nbytes
    return groups
