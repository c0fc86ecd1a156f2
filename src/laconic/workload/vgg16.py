"""VGG-16 for 1000 classes of images of 224 x 224, with tensors named as torchvision names them.

Nine tenths of its parameters are in three fully connected layers at its end, whose gradients are ready first: the
opposite of ResNet-50.

Reference: Simonyan & Zisserman 2014, arXiv:1409.1556, configuration D.
"""

from __future__ import annotations

from collections.abc import Iterator

from laconic.workload.roofline import DIVISION, H200_TF32, LayerWork, linear_tensors, timed_layers
from laconic.workload.workload import TensorShape, Workload

_BATCH = 64
_STAGES = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
"""Convolutions of each stage, and their channels; after each stage the image has half the side."""
_CLASSIFIER = (4096, 4096, 1000)
_COMPUTE_S = 0.0455


def vgg16() -> Workload:
    """VGG-16, batch 64."""
    return Workload(
        name="vgg16",
        batch=_BATCH,
        layers=timed_layers(list(_layers()), H200_TF32, compute_s=_COMPUTE_S),
        source=(
            "The shapes are computed from the architecture. For 64 images of 224 x 224 in float32 with TF32 products, "
            "a forward pass of 14.2 ms and a backward pass of 31.3 ms were measured on one H200 with torch 2.11 "
            f"(docs/workloads.md). Only the time of both passes, 45.5 ms, is used. {DIVISION}"
        ),
    )


def _layers() -> Iterator[LayerWork]:
    channels, size, number = 3, 224, 0
    for convolutions, out in _STAGES:
        for _ in range(convolutions):
            yield _convolution(f"features.{number}", channels, out, size=size)
            yield _pointwise(f"features.{number + 1}", out * size**2)
            channels, number = out, number + 2
        yield LayerWork(name=f"features.{number}", activations=_BATCH * out * (size**2 + (size // 2) ** 2))
        size, number = size // 2, number + 1
    width = channels * size**2
    for place, out in enumerate(_CLASSIFIER):
        name = f"classifier.{3 * place}"
        yield LayerWork(
            name=name,
            tensors=linear_tensors(name, (out, width), bias=out),
            flops=2 * _BATCH * width * out,
            activations=_BATCH * (width + out),
        )
        if place < len(_CLASSIFIER) - 1:
            yield _pointwise(f"classifier.{3 * place + 1}", out)
            yield _pointwise(f"classifier.{3 * place + 2}", out)
        width = out


def _convolution(name: str, channels: int, out: int, *, size: int) -> LayerWork:
    return LayerWork(
        name=name,
        tensors=(
            TensorShape(name=f"{name}.weight", shape=(out, channels, 3, 3)),
            TensorShape(name=f"{name}.bias", shape=(out,)),
        ),
        flops=2 * _BATCH * size**2 * out * channels * 3**2,
        activations=_BATCH * (channels + out) * size**2,
    )


def _pointwise(name: str, elements: int) -> LayerWork:
    """ReLU or dropout: reads and writes once."""
    return LayerWork(name=name, activations=2 * _BATCH * elements)
