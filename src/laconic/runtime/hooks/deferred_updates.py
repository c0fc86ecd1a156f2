"""Updates that wait: optimizer.step() returns at once, and parameters are updated when their layer is used next.

Parameters are cut into groups that follow from the plan alone, in the order of the forward pass. When a layer is about
to be used, the gradients of its groups are awaited and the optimizer makes its step for them, with the settings it had
when step() was called. Which parameters share a step never depends on what has arrived on a rank.

That is right only for an optimizer whose step can be made in parts (separability.py). With any other one step() itself
waits for all gradients; so it does while somebody else has a hook that runs after the step, for such a hook may look at
parameters. A parameter that is used elsewhere than in its own module is watched in the first pass and from then on
updated before the model starts; one that escapes even that is noticed in the backward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.core.plan import Plan
from laconic.errors import CommunicationError, LaconicWarning
from laconic.runtime.engine import Task
from laconic.runtime.hooks.lazy_gradient import LazyGradient
from laconic.runtime.hooks.module_hook import ModuleHook, outside_compiled
from laconic.runtime.hooks.optimizer_steps import others_watch
from laconic.runtime.hooks.separability import Settings, group_settings, step_in_part, why_not_separable
from laconic.runtime.job import Job


def why_not_deferred(optimizers: Sequence[Optimizer]) -> str | None:
    """Why updates of these optimizers cannot be made later, in parts; None if they can."""
    for optimizer in optimizers:
        reason = why_not_separable(optimizer)
        if reason is not None:
            return f"{type(optimizer).__name__}: {reason}"
    return None


class DeferredUpdates:
    """Holds back updates and makes them in time."""

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
        """Parameters whose update waits, with what tells whether somebody else has written to them."""
        self._stale: set[str] = set()
        self._borrowed: set[str] | None = None
        self._entered: set[str] = set()
        self._handles: list[Any] = []
        for module, names in self._layers():
            before = ModuleHook(
                lambda _, names=names: self.before_layer(names),
                before_copy=lambda names=names: self._refuse_copy(names),
                before_save=self.flush,
            )
            self._handles += [
                module.register_forward_pre_hook(outside_compiled(job.model, before)),
                module.register_state_dict_pre_hook(ModuleHook(lambda _, names=names: self.update(names))),
                module.register_load_state_dict_pre_hook(ModuleHook(lambda _, names=names: self.update(names))),
            ]
        # A module's own parameters are copied before its hooks, and its submodules after them.
        before_model = ModuleHook(lambda _: self.before_model(), before_copy=self._before_model_copy)
        self._handles += [
            job.model.register_forward_pre_hook(outside_compiled(job.model, before_model), prepend=True),
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
        """Let the gradients of these parameters come when they come; until then .grad waits for whoever touches it.

        order: all parameters as their gradients become ready, from the last layer to the first.
        """
        if self._borrowed is None:
            # Used, but never by the module they belong to.
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
        """Somebody wants this gradient: have it, and if its update waits make that first, for it may be changed now."""
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
        """Hide the gradients whose updates come later from an optimizer that is about to make its step."""
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
        """Show the gradients again that optimizers could not have, and remember what parameters are like."""
        for name in self._pending:
            self._job.parameters[name].grad = self._lazy(name)
            self._pending[name] = self._signature(name)

    def _signature(self, name: str) -> tuple[int, int]:
        parameter = self._job.parameters[name]
        return parameter._version, parameter.data_ptr()

    # -- before a layer is used --------------------------------------------------------------------------------

    def before_model(self) -> None:
        """The model is about to be used."""
        if self._borrowed is None:
            # Until it is known which parameters are used where, all must be there.
            self.flush()
        elif self._pending:
            self.update(self._borrowed)

    def before_layer(self, names: Sequence[str]) -> None:
        """A layer with these parameters is about to be used."""
        if self._borrowed is None:
            self._entered.update(names)
        self.update(names)

    def flush(self) -> None:
        """Make every update that waits."""
        self.update(list(self._pending))

    def update(self, names: Iterable[str]) -> None:
        """Make the updates of the groups these parameters are in, as far as they wait."""
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
            if not isinstance(gradient, LazyGradient):  # zero_grad() has been called, or somebody has set another one
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
        """A backward pass begins: what was not used meanwhile is updated now."""
        self._stale = set(self._pending)
        self.flush()
        self.wait_all()
        self._tasks = {}

    def check(self, name: str) -> None:
        """Raise if this parameter had a gradient computed with a value that was out of date."""
        if name in self._stale:
            raise CommunicationError(
                f'parameter "{name}" was used in step {self._job.step} before its update of the step before had been '
                f"made: not by its own module, and not in the first step. {self._job.strategy.scheduling.name} cannot "
                'know that; use the schedule "fusion".'
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
    """Parameters that are updated together: neighbours in the forward pass, as much as the largest bucket holds.

    It depends on the plan alone, which is the same on all ranks. Fewer groups would wait for gradients before they are
    needed; more would call the optimizer more often than messages arrive.
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
