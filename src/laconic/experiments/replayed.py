"""A workload as a model: every layer sleeps for its compute time, and its gradients are real tensors.

Communication then has the sizes and the timing of a job on a GPU, on a machine that could not compute it. Sleeping lets
other threads run, so that exchanges continue meanwhile. The host also sleeps when the parameters are on a GPU, which
then works only for communication.

Values are meaningless: all gradients are views of one buffer of noise, and parameters never change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.core.clock import Clock, WallClock
from laconic.errors import UsageError, one_line
from laconic.workload import Layer, Workload

_SHORTEST_WAIT_S = 1e-4
"""A thread that was blocked for less time was delayed by the scheduler, not by communication."""
_LONGEST_OVERHEAD_S = 1e-3
"""Python between two layers may take this much more than a tiny layer and still count as part of the compute."""
_READY_AT_ONCE = 2
"""Gradients per autograd node: among many there is no defined order; of two, the first is ready first."""


class SleptCompute:
    """The simulated compute of one thread: consecutive slots of time, each slept to its end.

        start = end of the previous slot + time spent waiting since,   end = start + duration

    The time that Python needs between two slots, and the excess of a sleep, are thus taken from the next slots and do
    not accumulate. Time in which the thread was blocked (a hook that waits for communication) is not compute and delays
    the slots that follow; so does other work that lasts longer than the slot it delays.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        busy_s: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock or WallClock()
        self._busy_s = busy_s
        self._sleep = sleep
        self.restart()

    def restart(self) -> None:
        """Begin the next slot now, wherever the previous one ended."""
        self._end_s = self._clock.now()
        self._leave()

    def spend(self, duration_s: float) -> None:
        """Sleep until the end of a slot of this length."""
        if threading.get_ident() != self._thread:
            self.restart()  # autograd has a thread per GPU; another thread's time cannot be split into work and waiting
        gap_s = self._clock.now() - self._left_s
        waited_s = gap_s - (self._busy_s() - self._left_busy_s)
        if waited_s <= _SHORTEST_WAIT_S:
            waited_s = 0.0
        outlasting_s = max(0.0, gap_s - waited_s - duration_s - _LONGEST_OVERHEAD_S)
        self._end_s += waited_s + outlasting_s + duration_s
        remaining_s = self._end_s - self._clock.now()
        if remaining_s > 0:
            self._sleep(remaining_s)
        self._leave()

    def _leave(self) -> None:
        self._thread = threading.get_ident()
        self._left_s = self._clock.now()
        self._left_busy_s = self._busy_s()


class _Memory:
    """The two tensors that all tensors of a model are views of."""

    def __init__(self, parameters: torch.Tensor, noise: torch.Tensor) -> None:
        self.parameters = parameters
        self.noise = noise

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Noise in the parameter's shape."""
        if parameter.grad is not None and parameter.grad.untyped_storage().data_ptr() == self.noise.data_ptr():
            # A second pass before zero_grad() would add the noise to itself in place.
            parameter.grad = None
        # Not stored: autograd uses a gradient without other references as .grad, without a copy.
        return self.noise[: parameter.numel()].view(parameter.shape)


class ReplayedLayer(nn.Module):
    """One layer; its parameters have the names of its tensors, with / for every dot."""

    def __init__(self, layer: Layer, memory: _Memory, compute: SleptCompute, start: int) -> None:
        super().__init__()
        self.layer = layer
        self.compute = compute
        self.memory = memory
        self._start = start
        for tensor, view in zip(layer.tensors, self._views(), strict=True):
            name = tensor.name.replace(".", "/")
            if hasattr(self, name):
                raise UsageError(
                    f'tensor "{one_line(tensor.name, 80)}" cannot be replayed: torch has another use for the parameter '
                    f'name "{one_line(name, 80)}", or another tensor of its layer has it. Rename the tensor.'
                )
            # .data has a version counter of its own. Views share that of their memory: a write to one parameter, also
            # to one of another contender, would pass for a write to all of them.
            self.register_parameter(name, nn.Parameter(view.data))

    def _views(self) -> Iterable[torch.Tensor]:
        start = self._start
        for tensor in self.layer.tensors:
            yield self.memory.parameters[start : start + tensor.numel].view(tensor.shape)
            start += tensor.numel

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        """Sleep for the layer's time; the token only carries the order of layers."""
        parameters = list(self._parameters.values())
        # What comes first in the forward pass comes last in the backward pass.
        for start in reversed(range(_READY_AT_ONCE, len(parameters), _READY_AT_ONCE)):
            token = _Slot.apply(self, 0.0, 0.0, token, *parameters[start : start + _READY_AT_ONCE])
        times_s = self.layer.forward_s, self.layer.backward_s
        return _Slot.apply(self, *times_s, token, *parameters[:_READY_AT_ONCE])

    def view_parameters(self) -> None:
        """Make the parameters views of the model's memory, after that has moved."""
        for parameter, view in zip(self._parameters.values(), self._views(), strict=True):
            assert parameter is not None
            parameter.data = view


class _Slot(torch.autograd.Function):
    """Sleeps the forward time in the forward pass and the backward time in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: ReplayedLayer,
        forward_s: float,
        backward_s: float,
        token: torch.Tensor,
        *parameters: nn.Parameter,
    ) -> torch.Tensor:
        """Returns the token."""
        ctx.layer, ctx.backward_s, ctx.parameters = layer, backward_s, parameters
        layer.compute.spend(forward_s)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Noise for every parameter that requires a gradient."""
        layer: ReplayedLayer = ctx.layer
        layer.compute.spend(ctx.backward_s)
        wanted = zip(ctx.parameters, ctx.needs_input_grad[4:], strict=True)
        noise = (layer.memory.gradient(parameter) if needed else None for parameter, needed in wanted)
        return None, None, None, gradients[0], *noise


class ReplayedModel(nn.Module):
    """A model whose passes take as long as the workload says and whose gradients have its shapes.

    storage: a model of this process, made from the same workload, whose memory this one uses too: parameters do not
        change, so contenders of one comparison need no copies. Device and noise are then those of that model.
    device: where parameters and gradients are; the CPU if left out.
    seed: of the noise; 0 if left out.

    Clear gradients with set_to_none=True, torch's default: gradients are the noise itself, not copies.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        storage: ReplayedModel | None = None,
        device: torch.device | str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.workload = workload
        if storage is None:
            self._memory = _allocate(workload, torch.device(device or "cpu"), seed or 0)
        else:
            if device is not None or seed is not None:
                raise UsageError("device and seed have no effect with storage, which has its own; leave them out.")
            self._memory = _share(storage, workload)
        compute = SleptCompute()
        layers: list[ReplayedLayer] = []
        start = 0
        for layer in workload.layers:
            layers.append(ReplayedLayer(layer, self._memory, compute, start))
            start += sum(tensor.numel for tensor in layer.tensors)
        self._compute = compute
        self.layers = nn.ModuleList(layers)

    @property
    def tensor_names(self) -> dict[str, str]:
        """The workload's name of each parameter, by its name in this model."""
        tensors = (tensor.name for layer in self.workload.layers for tensor in layer.tensors)
        return dict(zip((name for name, _ in self.named_parameters()), tensors, strict=True))

    def forward(self, batch: torch.Tensor | None = None) -> torch.Tensor:
        """A number whose backward() takes the backward time; any batch takes the same."""
        self._compute.restart()
        # A leaf that requires a gradient, so that layers without parameters have a backward pass too.
        token = torch.zeros((), device=self._memory.noise.device, requires_grad=True)
        for layer in self.layers:
            token = layer(token)
        return token

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ReplayedModel:
        """Move or cast the memory together with the parameters, as .to() requests."""
        super()._apply(fn, recurse)
        self._memory.parameters, self._memory.noise = fn(self._memory.parameters), fn(self._memory.noise)
        for layer in self.layers:
            assert isinstance(layer, ReplayedLayer)
            layer.view_parameters()
        return self


def _allocate(workload: Workload, device: torch.device, seed: int) -> _Memory:
    largest = max(tensor.numel for tensor in workload.tensors)
    noise = torch.empty(largest, dtype=workload.dtype, device=device)
    noise.normal_(generator=torch.Generator(device).manual_seed(seed))
    # Pages of zeros take no memory until they are written.
    return _Memory(torch.zeros(workload.num_parameters, dtype=workload.dtype, device=device), noise)


def _share(storage: ReplayedModel, workload: Workload) -> _Memory:
    if storage.workload.tensors != workload.tensors:
        raise UsageError(
            f'a model of workload "{one_line(workload.name, 80)}" cannot use the storage of one of '
            f'"{one_line(storage.workload.name, 80)}": their tensors differ. Share among models of one workload.'
        )
    # A separate object: moving one model must not move the other's gradients.
    return _Memory(storage._memory.parameters, storage._memory.noise)


class NoUpdate(Optimizer):
    """An optimizer whose step changes nothing: a replay measures communication, not the optimizer."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        # Rules of synchronization may ask for the learning rate; any will do where nothing changes.
        super().__init__(params, {"lr": 1.0})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Evaluate the closure, if there is one; hooks before and after a step run as with any optimizer."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        if not set_to_none:
            raise UsageError(
                "replayed gradients are views of shared noise: set_to_none=False would zero it. Use set_to_none=True."
            )
        super().zero_grad(set_to_none=True)
