"""Times of layers whose work is known and whose sum has been measured.

    weight  = max(operations / peak rate, bytes / memory bandwidth),   backward = 2 * forward

The weights divide the measured time of both passes among the layers, so that only the device's ratio of operations
to bytes matters, not its peaks. Backward costs twice as much because it computes two products, one for the gradient
of the input and one for that of the weights, where forward computes one.

Reference: Williams, Waterman, Patterson 2009, Roofline, doi:10.1145/1498765.1498785.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.workload.workload import Layer, TensorShape, scaled_layers

_ELEMENT_BYTES = 4
"""The known models were measured in float32."""
_BACKWARD_TO_FORWARD = 2.0


@dataclass(frozen=True, kw_only=True)
class Device:
    """The two peaks of a device."""

    flops_per_s: float
    """Of float32, without tensor cores."""
    memory_bytes_per_s: float


RTX_2080_TI = Device(flops_per_s=13.4e12, memory_bytes_per_s=616e9)
"""NVIDIA's data sheet of the GeForce RTX 2080 Ti."""
H200 = Device(flops_per_s=67e12, memory_bytes_per_s=4.8e12)
"""NVIDIA's data sheet of the H200 SXM."""


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """What the forward pass of one layer does."""

    name: str
    tensors: tuple[TensorShape, ...] = ()
    flops: float = 0.0
    """Floating-point operations; a multiplication with its addition counts as two."""
    activations: int
    """Elements of activations read and written."""

    def forward_s(self, device: Device) -> float:
        """The time at the device's peaks."""
        elements = self.activations + sum(tensor.numel for tensor in self.tensors)
        return max(self.flops / device.flops_per_s, elements * _ELEMENT_BYTES / device.memory_bytes_per_s)


def timed_layers(work: Sequence[LayerWork], device: Device, *, compute_s: float) -> tuple[Layer, ...]:
    """Layers that take `compute_s` in sum, each its share of it."""
    layers: list[Layer] = []
    for layer in work:
        forward_s = layer.forward_s(device)
        backward_s = _BACKWARD_TO_FORWARD * forward_s
        layers.append(Layer(name=layer.name, forward_s=forward_s, backward_s=backward_s, tensors=layer.tensors))
    return scaled_layers(layers, compute_s=compute_s)


def linear_tensors(name: str, shape: tuple[int, int], *, bias: int) -> tuple[TensorShape, ...]:
    """The tensors of a linear layer; autograd has the bias's gradient first."""
    return (TensorShape(name=f"{name}.bias", shape=(bias,)), TensorShape(name=f"{name}.weight", shape=shape))


def normalization_tensors(name: str, width: int) -> tuple[TensorShape, ...]:
    """The tensors of a batch or layer normalization; autograd has the weight's gradient first."""
    return (TensorShape(name=f"{name}.weight", shape=(width,)), TensorShape(name=f"{name}.bias", shape=(width,)))
