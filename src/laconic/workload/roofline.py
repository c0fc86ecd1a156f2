"""Times of layers whose work is known, where their total time has been measured or is stated.

    weight  = max(operations / peak rate, bytes / memory bandwidth),   backward = 2 * forward

The weights divide the time of both passes among the layers, so that only the device's ratio of operations to bytes
matters, not its peaks. Backward costs twice as much because it computes two products, one for the gradient of the
input and one for that of the weights, where forward computes one. Where the sum was not measured, it is the sum of the
weights divided by the share of the peaks that training reaches, which the source of the workload states.

Reference: Williams, Waterman, Patterson 2009, Roofline, doi:10.1145/1498765.1498785.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from laconic.workload.workload import Layer, TensorShape, scaled_layers

_BACKWARD_TO_FORWARD = 2.0
DIVISION = (
    "This time is divided among the layers by their operations and bytes, on the assumption that the backward pass of "
    "each layer takes twice as long as its forward pass."
)
"""How timed_layers() divides the time of a step, for the source of a workload."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The two peaks of a device, for products of one kind."""

    flops_per_s: float
    memory_bytes_per_s: float
    element_bytes: int = 4
    """Bytes per element of the factors of a product."""


RTX_2080_TI = Device(flops_per_s=13.4e12, memory_bytes_per_s=616e9)
"""NVIDIA's data sheet of the GeForce RTX 2080 Ti: float32 without tensor cores."""
H200 = Device(flops_per_s=67e12, memory_bytes_per_s=4.8e12)
"""NVIDIA's data sheet of the H200 SXM: float32 without tensor cores."""
H200_TF32 = Device(flops_per_s=494.7e12, memory_bytes_per_s=4.8e12)
"""Likewise: float32 whose products are TF32, without sparsity."""
H200_BF16 = Device(flops_per_s=989.4e12, memory_bytes_per_s=4.8e12, element_bytes=2)
"""Likewise: bfloat16, without sparsity."""


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """The work of the forward pass of one layer."""

    name: str
    tensors: tuple[TensorShape, ...] = ()
    flops: float = 0.0
    """Floating-point operations; a multiplication with its addition counts as two."""
    activations: int
    """Elements of activations read and written."""

    def forward_s(self, device: Device) -> float:
        """The time at the device's peaks."""
        elements = self.activations + sum(tensor.numel for tensor in self.tensors)
        return max(self.flops / device.flops_per_s, elements * device.element_bytes / device.memory_bytes_per_s)


def timed_layers(work: Sequence[LayerWork], device: Device, *, compute_s: float) -> tuple[Layer, ...]:
    """Layers that take `compute_s` in total, divided in proportion to their weights."""
    layers: list[Layer] = []
    for layer in work:
        forward_s = layer.forward_s(device)
        backward_s = _BACKWARD_TO_FORWARD * forward_s
        layers.append(Layer(name=layer.name, forward_s=forward_s, backward_s=backward_s, tensors=layer.tensors))
    return scaled_layers(layers, compute_s=compute_s)


def stated_compute_s(work: Sequence[LayerWork], device: Device, *, share: float) -> float:
    """The time of both passes at this share of the device's peaks."""
    return (1 + _BACKWARD_TO_FORWARD) * math.fsum(layer.forward_s(device) for layer in work) / share


def linear_tensors(name: str, shape: tuple[int, int], *, bias: int) -> tuple[TensorShape, ...]:
    """The tensors of a linear layer; autograd completes the bias's gradient first."""
    return (TensorShape(name=f"{name}.bias", shape=(bias,)), TensorShape(name=f"{name}.weight", shape=shape))


def normalization_tensors(name: str, width: int) -> tuple[TensorShape, ...]:
    """The tensors of a batch or layer normalization; autograd completes the weight's gradient first."""
    return (TensorShape(name=f"{name}.weight", shape=(width,)), TensorShape(name=f"{name}.bias", shape=(width,)))
