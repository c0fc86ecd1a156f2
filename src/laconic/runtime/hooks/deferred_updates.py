"""Updates that wait: parameters whose gradients are still on their way at optimizer.step() are updated later.

When a layer is about to be used, its gradients are awaited and the optimizer makes its step for them, with the settings
it had when step() was called. A parameter that is used elsewhere than in its own module is watched in the first pass
and from then on updated before the model starts; one that escapes even that is noticed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from laconic.errors import CommunicationError
from laconic.runtime.engine import Task
from laconic.runtime.hooks.lazy_gradient import LazyGradient
from laconic.runtime.job import Job


class Deferral:
    """Holds back updates and makes them in time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._names = {id(parameter): name for name, parameter in job.parameters.items()}
        self._tasks: dict[str, list[Task]] = {}
        self._views: dict[str, torch.Tensor] = {}
        self._pending: dict[str, torch.Tensor] = {}
        self._settings: list[dict[str, Any]] = []
        self._stale: set[str] = set()
        self._borrowed: set[str] | None = None
        self._entered: set[str] = set()
        self._handles = [
            module.register_forward_pre_hook(_hook(job.model, _BeforeLayer(self, names)))
            for module, names in self._layers()
        ]
        self._handles += [
            job.model.register_forward_pre_hook(_hook(job.model, _BeforeModel(self)), prepend=True),
            job.model.register_state_dict_pre_hook(lambda *_: self.flush()),
            job.optimizer.register_state_dict_pre_hook(lambda _: self.flush()),
        ]

    def _layers(self) -> Iterable[tuple[nn.Module, list[str]]]:
        for module in self._job.model.modules():
            names = [self._names[id(p)] for p in module._parameters.values() if id(p) in self._names]
            if names:
                yield module, names

    # -- after a backward pass ---------------------------------------------------------------------------------

    def hold(self, tasks: dict[str, list[Task]], views: dict[str, torch.Tensor]) -> None:
        """Let the gradients of these parameters come when they come; until then .grad waits for whoever touches it."""
        if self._borrowed is None:
            # Used, but never by the module they belong to.
            self._borrowed = set(tasks) - self._entered
        self._tasks, self._views = tasks, views
        for name in tasks:
            self._job.parameters[name].grad = self._lazy(name)

    def _lazy(self, name: str) -> LazyGradient:
        return LazyGradient(self._views[name], lambda: self._touched(name))

    def _touched(self, name: str) -> None:
        """Somebody wants this gradient: have it, and if its update waits make that first, for it may be changed now."""
        if name in self._pending:
            self.update([name])
        self._await(name)

    def _await(self, name: str) -> None:
        for task in self._tasks.get(name, ()):
            self._job.engine.wait(task)

    def wait_all(self) -> None:
        """Return when nothing is on its way."""
        for name in self._tasks:
            self._await(name)

    # -- around the optimizer's step ---------------------------------------------------------------------------

    def before_step(self) -> None:
        """Give the optimizer what has arrived, and remember what it cannot have yet."""
        for name, tasks in self._tasks.items():
            parameter = self._job.parameters[name]
            if isinstance(parameter.grad, LazyGradient):
                if all(task.finished.is_set() for task in tasks):
                    self._await(name)  # on a GPU: the current stream
                    parameter.grad = self._views[name]
                else:
                    parameter.grad = None
                    self._pending[name] = self._views[name]
        if self._pending:
            groups = self._job.optimizer.param_groups
            self._settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def after_step(self) -> None:
        """Show the gradients again that the optimizer could not have."""
        for name in self._pending:
            self._job.parameters[name].grad = self._lazy(name)

    # -- before a layer is used --------------------------------------------------------------------------------

    def before_model(self) -> None:
        """The model is about to be used."""
        if self._borrowed is None:
            # Until it is known which parameters are used where, all must be there.
            self.flush()
        elif self._pending and self._borrowed:
            self.update([name for name in self._borrowed if name in self._pending])

    def before_layer(self, names: Sequence[str]) -> None:
        """A layer with these parameters is about to be used."""
        if self._borrowed is None:
            self._entered.update(names)
        if self._pending:
            self.update([name for name in names if name in self._pending])

    def flush(self) -> None:
        """Make every update that waits."""
        self.update(list(self._pending))

    def update(self, names: Sequence[str]) -> None:
        """Wait for the gradients of these parameters and make the optimizer's step for all that have arrived."""
        if not names:
            return
        job = self._job
        device = self._views[names[0]].device
        began = job.stopwatch.mark(device)
        for name in names:
            self._await(name)
        job.stopwatch.note("wait", job.step - 1, began, job.stopwatch.mark(device))
        chosen = set(names)
        chosen |= {name for name in self._pending if all(task.finished.is_set() for task in self._tasks[name])}
        groups = job.optimizer.param_groups
        whole = [dict(group) for group in groups]
        try:
            job.updating = True
            for group, settings in zip(groups, self._settings, strict=True):
                group.update(settings)
                group["params"] = [p for p in group["params"] if self._names.get(id(p)) in chosen]
            kept = {name: job.parameters[name].grad for name in chosen}
            for name in chosen:
                self._await(name)
                job.parameters[name].grad = self._pending.pop(name)
            job.optimizer.step()
            for name, gradient in kept.items():
                if not isinstance(gradient, LazyGradient):
                    job.parameters[name].grad = gradient
        finally:
            job.updating = False
            for group, before in zip(groups, whole, strict=True):
                group.update(before)

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
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()


class _BeforeLayer:
    """The hook on a layer; copying or saving the model must not take the session along."""

    def __init__(self, deferral: Deferral, names: list[str]) -> None:
        self._deferral = deferral
        self._names = names

    def __call__(self, module: nn.Module, inputs: object) -> None:
        """Pass the call on."""
        self._deferral.before_layer(self._names)

    def __deepcopy__(self, memo: dict[int, object]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> str:
        return "_nothing"


class _BeforeModel(_BeforeLayer):
    """The hook on the model."""

    def __init__(self, deferral: Deferral) -> None:
        super().__init__(deferral, [])

    def __call__(self, module: nn.Module, inputs: object) -> None:
        """Pass the call on."""
        self._deferral.before_model()


def _nothing(*_: object) -> None:
    """What stands in a copy of the model where a hook was."""


def _hook(model: nn.Module, hook: _BeforeLayer) -> Callable[..., None]:
    """The hook, outside of what a compiled model compiles."""
    return torch.compiler.disable(hook) if getattr(model, "_compiled_call_impl", None) is not None else hook
