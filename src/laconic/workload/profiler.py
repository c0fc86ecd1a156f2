"""Measures a torch model into a workload: the time of each layer, and the order in which gradients are complete.

Steps with and without hooks take turns. The hooks tell how a pass divides among layers; because they cost time
themselves, the layers' medians are multiplied by one factor for each pass, so that they add up to the median of the
passes without hooks:

    forward_s of a layer = median seen * (median of plain forward passes / sum of the medians seen)
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from laconic.core.clock import Clock
from laconic.errors import UsageError, one_line
from laconic.workload.device_time import DeviceTime
from laconic.workload.layer_watch import LayerWatch, tensors_in
from laconic.workload.seen_pass import SeenPass, Step
from laconic.workload.workload import Layer, TensorShape, Workload

_WARMUP_STEPS = 3
"""Warm-up steps, in which memory is allocated and libraries choose their kernels."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The measured job: one step is `loss(model, batch).backward()`."""

    model: nn.Module
    batch: object
    """A tensor, or tuples, lists or mappings of tensors; its samples are the first dimension of the first tensor."""
    loss: Callable[[nn.Module, object], torch.Tensor]
    """Makes the forward pass and returns a scalar."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A measured workload, and how it came about."""

    workload: Workload
    forward_factor: float
    """The factor on the forward times of layers, as measured with hooks."""
    backward_factor: float
    """The factor on the backward times of layers, likewise."""
    ready_error_s: float
    """The largest time between the completion of a gradient and the end of its layer in the workload."""
    notes: tuple[str, ...]
    """Further remarks; also in the workload's source."""


def profile(
    subject: Subject, *, name: str, device: torch.device | str, steps: int = 10, clock: Clock | None = None
) -> Profile:
    """Make `steps` steps with hooks and as many without, after a few warm-up steps; leaves no gradients behind."""
    if steps < 1:
        raise UsageError(f"steps to measure must be >= 1, got {steps}.")
    device = torch.device(device)
    timer = DeviceTime(device, clock)
    if hasattr(subject.model, "_orig_mod"):
        raise UsageError("a compiled model hides its layers. Give the model without torch.compile.")
    subject = Subject(model=subject.model.to(device), batch=_on(subject.batch, device), loss=subject.loss)
    samples = _samples(subject.batch)
    plain: list[Step] = []
    seen: list[tuple[LayerWatch, Step]] = []
    for _ in range(_WARMUP_STEPS + steps):
        plain.append(_step(subject, timer))
        with LayerWatch(subject.model, timer.mark) as watch:
            seen.append((watch, _step(subject, timer, watch)))
    subject.model.zero_grad(set_to_none=True)
    timer.settle()
    counted = plain[_WARMUP_STEPS:]
    return _assembled(
        subject.model,
        [SeenPass.read(timer, watch, step) for watch, step in seen[_WARMUP_STEPS:]],
        forward_s=statistics.median(timer.between_s(*step.forward) for step in counted),
        backward_s=statistics.median(timer.between_s(*step.backward) for step in counted),
        name=name,
        samples=samples,
        where=timer.in_words,
    )


def _on(value: object, device: torch.device) -> object:
    """The value with all its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _on(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [_on(item, device) for item in value]
    if isinstance(value, tuple):
        items = tuple(_on(item, device) for item in value)
        named: Callable[..., object] | None = getattr(value, "_make", None)
        return items if named is None else named(items)
    return value


def _samples(batch: object) -> int:
    first = next(tensors_in(batch), None)
    if first is None:
        raise UsageError("the batch holds no tensor. Give a tensor, or tuples, lists or mappings of tensors.")
    return max(1, first.shape[0]) if first.dim() else 1


def _step(subject: Subject, timer: DeviceTime, watch: LayerWatch | None = None) -> Step:
    """One step; the preparation of the watch between the passes counts in neither."""
    subject.model.zero_grad(set_to_none=True)
    began = timer.mark()
    loss = subject.loss(subject.model, subject.batch)
    lost = timer.mark()
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UsageError(
            f"the loss must be a tensor with one number and a gradient, got {_described(loss)}. "
            "Let loss(model, batch) return what backward() is called on."
        )
    if watch is not None:
        watch.turn(loss)
    turned = timer.mark()
    loss.backward()
    return Step((began, lost), (turned, timer.mark()))


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return one_line(repr(value), 60)
    return f"one of shape {list(value.shape)} {'with' if value.requires_grad else 'without'} a gradient"


def _assembled(
    model: nn.Module,
    passes: Sequence[SeenPass],
    *,
    forward_s: float,
    backward_s: float,
    name: str,
    samples: int,
    where: str,
) -> Profile:
    usual = _usual(passes)
    layers = usual.layers()
    forward = {layer: _median(step.forward_s.get(layer, 0.0) for step in passes) for layer in layers}
    backward = {layer: _median(step.backward_s.get(layer, 0.0) for step in passes) for layer in layers}
    forward_factor, backward_factor = _factor(forward_s, forward), _factor(backward_s, backward)
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    owned, unused = _owned(usual, parameters)
    dtype, notes = _dtype(parameters.values())
    if unused:
        notes.append(
            f"No gradient came to {one_line(', '.join(unused), 200)}: ready when all others are, as they are exchanged."
        )
    alike = sum(list(step.ready_s) == list(usual.ready_s) for step in passes)
    if alike < len(passes):
        notes.append(f"Gradients were complete in this order in {alike} of {len(passes)} steps.")
    source = (
        f"The workload was profiled on {where} with torch {torch.__version__.partition('+')[0]}. Times are medians of "
        f"{len(passes)} steps; those of layers were multiplied by {forward_factor:.3f} forward and "
        f"{backward_factor:.3f} backward, so that they add up to the times of passes without hooks."
    )
    workload = Workload(
        name=name,
        batch=samples,
        layers=tuple(
            Layer(
                name=layer,
                forward_s=forward[layer] * forward_factor,
                backward_s=backward[layer] * backward_factor,
                tensors=tuple(
                    TensorShape(name=one, shape=tuple(parameters[one].shape)) for one in owned.get(layer, ())
                ),
            )
            for layer in layers
        ),
        source=" ".join([source, *notes]),
        dtype=dtype,
    )
    return Profile(
        workload=workload,
        forward_factor=forward_factor,
        backward_factor=backward_factor,
        ready_error_s=backward_factor * _ready_error_s(workload, passes),
        notes=tuple(notes),
    )


def _usual(passes: Sequence[SeenPass]) -> SeenPass:
    """A step in which gradients were complete in the most frequent order."""
    orders = Counter(tuple(step.ready_s) for step in passes)
    usual = orders.most_common(1)[0][0]
    return next(step for step in passes if tuple(step.ready_s) == usual)


def _owned(usual: SeenPass, parameters: Mapping[str, nn.Parameter]) -> tuple[dict[str, list[str]], list[str]]:
    """The parameters of each layer, and those that got no gradient, which are added to the layer that is ready last."""
    owned = usual.parameters_by_layer()
    unused = [one for one in reversed(list(parameters)) if one not in usual.ready_s]
    if not owned:
        raise UsageError(
            "no parameter got a gradient, so there is nothing to exchange. Let the loss depend on some parameter."
        )
    last = list(owned)[-1]
    return {**owned, last: [*owned[last], *unused]}, unused


def _dtype(parameters: Iterable[nn.Parameter]) -> tuple[torch.dtype, list[str]]:
    """The dtype of most elements, as a workload has only one."""
    elements: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        elements[parameter.dtype] += parameter.numel()
    (dtype, most), *others = elements.most_common()
    if not others:
        return dtype, []
    rest = sum(count for _, count in others)
    return dtype, [f"{rest} of {rest + most} parameters have another dtype than {str(dtype).removeprefix('torch.')}."]


def _factor(plain_s: float, seen_s: Mapping[str, float]) -> float:
    total_s = math.fsum(seen_s.values())
    return plain_s / total_s if total_s > 0 else 1.0


def _median(values: Iterable[float]) -> float:
    return max(0.0, statistics.median(values))


def _ready_error_s(workload: Workload, passes: Sequence[SeenPass]) -> float:
    """The largest median time between the completion of a gradient and the end of its layer, both in the same pass."""
    errors: dict[str, list[float]] = {}
    for step in passes:
        ended_s = 0.0
        for layer in reversed(workload.layers):
            ended_s += step.backward_s.get(layer.name, 0.0)
            for tensor in layer.tensors:
                if tensor.name in step.ready_s:
                    errors.setdefault(tensor.name, []).append(abs(ended_s - step.ready_s[tensor.name]))
    return max(map(statistics.median, errors.values()))
