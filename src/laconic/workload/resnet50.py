"""ResNet-50 for 1000 classes of images of 224 x 224, with tensors named as torchvision names them.

Reference: He et al. 2015, arXiv:1512.03385 (stride in the 3 x 3 convolution, as torchvision has it).
"""

from __future__ import annotations

from collections.abc import Iterator

from laconic.workload.roofline import (
    DIVISION,
    RTX_2080_TI,
    LayerWork,
    linear_tensors,
    normalization_tensors,
    timed_layers,
)
from laconic.workload.workload import TensorShape, Workload

_BATCH = 64
_CLASSES = 1000
_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
"""Blocks of each stage, and the channels inside them; a block ends with four times as many."""
_EXPANSION = 4
_IMAGES_PER_S = 253.1


def resnet50() -> Workload:
    """ResNet-50, batch 64."""
    return Workload(
        name="resnet50",
        batch=_BATCH,
        layers=timed_layers(list(_layers()), RTX_2080_TI, compute_s=_BATCH / _IMAGES_PER_S),
        source=(
            "The shapes are computed from the architecture. The authors of A Quantitative Survey of Communication "
            "Optimizations in Distributed Deep Learning measured 253.1 images/s on one RTX 2080 Ti in float32 "
            f"(HKBU-HPML/ddl-benchmarks, 2020-05-29), from which the time of a step follows. {DIVISION}"
        ),
    )


def _layers() -> Iterator[LayerWork]:
    yield _convolution("conv1", 3, 64, kernel=7, size=224, stride=2)
    yield _normalization("bn1", 64, size=112)
    yield LayerWork(name="maxpool", activations=_BATCH * 64 * (112**2 + 56**2))
    channels, size = 64, 56
    for stage, (blocks, inner) in enumerate(_STAGES, start=1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            yield from _bottleneck(f"layer{stage}.{block}", channels, inner, size=size, stride=stride)
            channels, size = inner * _EXPANSION, size // stride
    yield LayerWork(name="avgpool", activations=_BATCH * channels * (size**2 + 1))
    yield LayerWork(
        name="fc",
        tensors=linear_tensors("fc", (_CLASSES, channels), bias=_CLASSES),
        flops=2 * _BATCH * channels * _CLASSES,
        activations=_BATCH * (channels + _CLASSES),
    )


def _bottleneck(name: str, channels: int, inner: int, *, size: int, stride: int) -> Iterator[LayerWork]:
    small, out = size // stride, inner * _EXPANSION
    yield _convolution(f"{name}.conv1", channels, inner, kernel=1, size=size)
    yield _normalization(f"{name}.bn1", inner, size=size)
    yield _convolution(f"{name}.conv2", inner, inner, kernel=3, size=size, stride=stride)
    yield _normalization(f"{name}.bn2", inner, size=small)
    yield _convolution(f"{name}.conv3", inner, out, kernel=1, size=small)
    yield _normalization(f"{name}.bn3", out, size=small)
    if stride != 1 or channels != out:
        yield _convolution(f"{name}.downsample.0", channels, out, kernel=1, size=size, stride=stride)
        yield _normalization(f"{name}.downsample.1", out, size=small)


def _convolution(name: str, channels: int, out: int, *, kernel: int, size: int, stride: int = 1) -> LayerWork:
    small = size // stride
    return LayerWork(
        name=name,
        tensors=(TensorShape(name=f"{name}.weight", shape=(out, channels, kernel, kernel)),),
        flops=2 * _BATCH * small**2 * out * channels * kernel**2,
        activations=_BATCH * (channels * size**2 + out * small**2),
    )


def _normalization(name: str, channels: int, *, size: int) -> LayerWork:
    """Batch normalization and what follows it (ReLU or an addition): each reads and writes once."""
    return LayerWork(
        name=name,
        tensors=normalization_tensors(name, channels),
        activations=4 * _BATCH * channels * size**2,
    )
