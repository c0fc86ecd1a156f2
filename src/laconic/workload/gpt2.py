"""GPT-2 in two sizes, tensors named as Hugging Face names them.

The output layer shares the token embedding's weight, whose gradient is complete when the embedding, the first layer,
has finished its backward pass.

Reference: Radford et al. 2019, Language Models are Unsupervised Multitask Learners.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from laconic.workload.roofline import (
    DIVISION,
    H200,
    H200_BF16,
    LayerWork,
    linear_tensors,
    normalization_tensors,
    timed_layers,
)
from laconic.workload.workload import TensorShape, Workload

_VOCABULARY = 50_257
_POSITIONS = 1024


@dataclass(frozen=True, kw_only=True)
class _Shape:
    blocks: int
    width: int
    batch: int
    sequence: int
    autocast: bool = False
    """Products are of copies in another dtype: then autograd has the weight's gradient before the bias's."""

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


def gpt2() -> Workload:
    """GPT-2 (124 M), batch 16."""
    shape = _Shape(blocks=12, width=768, batch=16, sequence=256)
    return Workload(
        name="gpt2",
        batch=shape.batch,
        layers=timed_layers(list(_layers(shape)), H200, compute_s=0.0770),
        source=(
            "The shapes are computed from the architecture. For 16 sequences of 256 tokens in float32, a forward pass "
            "of 26.5 ms and a backward pass of 50.5 ms were measured on one H200 with torch 2.11 (docs/workloads.md). "
            f"Only the time of both passes, 77.0 ms, is used. {DIVISION}"
        ),
    )


def gpt2_xl() -> Workload:
    """GPT-2 XL (1.5 B), batch 8."""
    shape = _Shape(blocks=48, width=1600, batch=8, sequence=1024, autocast=True)
    return Workload(
        name="gpt2-xl",
        batch=shape.batch,
        layers=timed_layers(list(_layers(shape)), H200_BF16, compute_s=0.2308),
        source=(
            "The shapes are computed from the architecture. For 8 sequences of 1024 tokens, with products in bfloat16 "
            "by autocast and gradients in float32, a forward pass of 76.6 ms and a backward pass of 154.3 ms were "
            "measured on one H200 with torch 2.11 (docs/workloads.md). Only the time of both passes, 230.8 ms, is "
            f"used. {DIVISION}"
        ),
    )


def _layers(shape: _Shape) -> Iterator[LayerWork]:
    yield LayerWork(
        name="transformer.embeddings",
        tensors=(
            TensorShape(name="transformer.wpe.weight", shape=(_POSITIONS, shape.width)),
            TensorShape(name="transformer.wte.weight", shape=(_VOCABULARY, shape.width)),
        ),
        activations=3 * shape.tokens * shape.width,  # two are read, their sum is written
    )
    for block in range(shape.blocks):
        yield from _block(f"transformer.h.{block}", shape)
    yield _normalization("transformer.ln_f", shape)
    yield LayerWork(
        name="lm_head",
        flops=2 * shape.tokens * shape.width * _VOCABULARY,
        activations=shape.tokens * (shape.width + _VOCABULARY),
    )


def _block(name: str, shape: _Shape) -> Iterator[LayerWork]:
    inner = 4 * shape.width
    yield _normalization(f"{name}.ln_1", shape)
    yield _linear(f"{name}.attn.c_attn", shape.width, 3 * shape.width, shape)
    yield LayerWork(
        name=f"{name}.attn",
        flops=2 * 2 * shape.tokens * shape.sequence * shape.width,  # scores, then the mixture of values
        activations=4 * shape.tokens * shape.width,  # fused: scores never reach memory
    )
    yield _linear(f"{name}.attn.c_proj", shape.width, shape.width, shape)
    yield _normalization(f"{name}.ln_2", shape)
    yield _linear(f"{name}.mlp.c_fc", shape.width, inner, shape)
    yield LayerWork(name=f"{name}.mlp.act", activations=2 * shape.tokens * inner)
    yield _linear(f"{name}.mlp.c_proj", inner, shape.width, shape)


def _linear(name: str, width: int, out: int, shape: _Shape) -> LayerWork:
    # Hugging Face's Conv1D keeps its weight transposed.
    tensors = linear_tensors(name, (width, out), bias=out)
    return LayerWork(
        name=name,
        tensors=tensors[::-1] if shape.autocast else tensors,
        flops=2 * shape.tokens * width * out,
        activations=shape.tokens * (width + out),
    )


def _normalization(name: str, shape: _Shape) -> LayerWork:
    """Layer normalization and the addition before it: each reads and writes once."""
    return LayerWork(
        name=name, tensors=normalization_tensors(name, shape.width), activations=4 * shape.tokens * shape.width
    )
