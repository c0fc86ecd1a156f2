"""Times the layers of a model during training: begin and end of the forward pass, and when each gradient is ready.

    step     = between + forward + backward, and whatever communication is not hidden behind the backward pass
    between  from the end of a step to the last forward pass of the next (data, gradient accumulation), and the
             optimizer's own time

On a GPU the times are those of the device, by events on its stream. Meanwhile gradients are exchanged only after the
backward pass: with compiled models, events were seen to wait for exchanges that had begun before them.

Hooks do not see a forward pass inside code that torch.compile made of the whole model, nor one that does not begin by
calling the model. Then only the time from one step to the last gradient of the next is known, and the forward pass is
taken to be a third of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from laconic.runtime.hooks.module_hook import ModuleHook, before_forward, outside_compiled
from laconic.runtime.job import Job
from laconic.workload import DTYPES, Layer, TensorShape, Workload
from laconic.workload.device_time import DeviceTime, Mark

_LEAST_S = 1e-9
_FORWARD_SHARE = 1 / 3
"""Of both passes, where only their sum was timed: a backward pass has twice the multiplications of a forward pass."""
_FEWEST = 3
"""The least number of whole steps for a result."""


@dataclass
class _Step:
    """The marks of one step."""

    began: Mark | None = None
    forward: Mark | None = None
    backward: Mark | None = None
    ready: dict[str, Mark] = field(default_factory=dict)
    optimizer: Mark | None = None


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Medians over the timed steps."""

    between_s: float
    forward_s: float
    ready_s: Mapping[str, float]
    """For each parameter, the time from the end of the forward pass to its gradient, in order of arrival. Parameters
    without a gradient in some step are left out."""

    @property
    def compute_s(self) -> float:
        """The time of a step without communication."""
        return self.between_s + self.forward_s + max(self.ready_s.values())


class LayerTimes:
    """Hooks that stay for a few steps."""

    def __init__(self, job: Job) -> None:
        self._job = job
        device = next(iter(job.parameters.values())).device
        self._time = DeviceTime(device, job.clock)
        # In compiled code, the event that is recorded would not be the one that the hook keeps.
        self._mark = torch.compiler.disable(self._time.mark) if device.type == "cuda" else self._time.mark
        job.after_backward = device.type == "cuda"
        self._step = _Step()
        self._steps: list[tuple[_Step, Mark]] = []
        after = ModuleHook(outside_compiled(job.model, self._forward_ended))
        self._handles: list[Any] = [
            before_forward(job.model, self._forward_begins, first=True),
            job.model.register_forward_hook(after),
            job.optimizers[0].register_step_pre_hook(lambda *_: self._optimizer_begins()),
            *(parameter.register_hook(self._gradient_hook(name)) for name, parameter in job.parameters.items()),
        ]
        self._step.began = self._mark()

    def step_made(self) -> None:
        """A step has ended."""
        now = self._mark()
        self._steps.append((self._step, now))
        self._step = _Step(began=now)

    def detach(self) -> None:
        """Remove all hooks; calling it again does nothing."""
        self._job.after_backward = False
        while self._handles:
            self._handles.pop().remove()

    def passes(self) -> Passes | None:
        """The times; None if too few steps ran as one forward and one backward pass of the model."""
        self._time.settle()
        made = [(step, ended) for step, ended in self._steps if None not in (step.began, step.optimizer) and step.ready]
        whole = [(step, ended) for step, ended in made if None not in (step.forward, step.backward)]
        if len(whole) >= _FEWEST:
            return self._seen(whole)
        compiled = [(step, ended) for step, ended in made if step.forward is None]
        return self._guessed(compiled) if len(compiled) >= _FEWEST else None

    def _seen(self, steps: list[tuple[_Step, Mark]]) -> Passes | None:
        """Where hooks saw the forward pass."""
        ready = self._ready([(step.backward, step) for step, _ in steps])
        if not ready:
            return None
        return Passes(
            between_s=statistics.median(
                self._between_s(step.began, step.forward) + self._between_s(step.optimizer, ended)
                for step, ended in steps
            ),
            forward_s=statistics.median(self._between_s(step.forward, step.backward) for step, _ in steps),
            ready_s=ready,
        )

    def _guessed(self, steps: list[tuple[_Step, Mark]]) -> Passes | None:
        """Where hooks saw gradients only."""
        ready = self._ready([(step.began, step) for step, _ in steps])
        if not ready:
            return None
        forward_s = _FORWARD_SHARE * max(ready.values())
        return Passes(
            between_s=statistics.median(self._between_s(step.optimizer, ended) for step, ended in steps),
            forward_s=forward_s,
            ready_s={name: max(0.0, ready_s - forward_s) for name, ready_s in ready.items()},
        )

    def _ready(self, steps: Sequence[tuple[Mark | None, _Step]]) -> dict[str, float]:
        """The median time from the mark of each step to the gradient of each parameter, in order of arrival."""
        times_s = {
            name: statistics.median(self._between_s(begin, step.ready[name]) for begin, step in steps)
            for name in self._job.parameters
            if all(name in step.ready for _, step in steps)
        }
        return dict(sorted(times_s.items(), key=lambda entry: entry[1]))

    def _between_s(self, begin: Any, end: Any) -> float:
        return max(0.0, self._time.between_s(begin, end))

    def _forward_begins(self, module: nn.Module) -> None:
        if self._may_time(module):
            # The last forward pass before the step counts; earlier ones only accumulate gradients.
            self._step.forward, self._step.backward, self._step.ready = self._mark(), None, {}

    def _forward_ended(self, module: nn.Module) -> None:
        if self._may_time(module):
            self._step.backward = self._mark()

    def _may_time(self, module: nn.Module) -> bool:
        """Whether this is a forward pass for training, outside compiled code."""
        return module is self._job.model and torch.is_grad_enabled() and not torch.compiler.is_compiling()

    def _gradient_hook(self, name: str) -> Any:
        def ready(_: torch.Tensor) -> None:
            self._step.ready[name] = self._mark()

        return ready

    def _optimizer_begins(self) -> None:
        if self._step.optimizer is None:
            self._step.optimizer = self._mark()


def workload_of(passes: Passes, parameters: Mapping[str, nn.Parameter]) -> Workload:
    """The model as the planner sees it: a layer for each parameter, which gets its share of the forward pass.

    Time outside both passes comes first, where it hides no communication.
    """
    layers: list[Layer] = []
    before_s, whole_s = 0.0, max(*passes.ready_s.values(), _LEAST_S)
    last_s = max(passes.ready_s.values())
    ready = {**passes.ready_s, **{name: last_s for name in parameters if name not in passes.ready_s}}
    for name, ready_s in ready.items():
        backward_s = ready_s - before_s
        shape = TensorShape(name=name, shape=tuple(parameters[name].shape))
        forward_s = passes.forward_s * backward_s / whole_s
        layers.append(Layer(name=name, forward_s=forward_s, backward_s=backward_s, tensors=(shape,)))
        before_s = ready_s
    layers.append(Layer(name="(between steps)", forward_s=passes.between_s, backward_s=0.0))
    sizes: dict[torch.dtype, int] = {}
    for parameter in parameters.values():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    dtype = max(sizes, key=lambda one: sizes[one])
    return Workload(
        name="the attached model",
        batch=1,
        layers=tuple(reversed(layers)),
        source="Timed while it trained.",
        dtype=dtype if dtype in DTYPES.values() else torch.float32,
    )
