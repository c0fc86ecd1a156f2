"""GPT-2 with 124 million parameters, sequences of 256 tokens, tensors named as Hugging Face names them.

The output layer shares the token embedding's weight, whose gradient is complete when the embedding, the first layer,
has finished its backward pass.

Reference: Radford et al. 2019, Language Models are Unsupervised Multitask Learners.
"""

from __future__ import annotations

from collections.abc import Iterator

from laconic.workload.roofline import H200, LayerWork, linear_tensors, normalization_tensors, timed_layers
from laconic.workload.workload import TensorShape, Workload

_BLOCKS = 12
_WIDTH = 768
_VOCABULARY = 50_257
_POSITIONS = 1024
_BATCH = 16
_SEQUENCE = 256
_TOKENS = _BATCH * _SEQUENCE
_COMPUTE_S = 0.0770


def gpt2() -> Workload:
    """GPT-2 (124 M), batch 16."""
    return Workload(
        name="gpt2",
        batch=_BATCH,
        layers=timed_layers(list(_layers()), H200, compute_s=_COMPUTE_S),
        source=(
            "Shapes computed from the architecture; 77.0 ms of forward (26.5) and backward (50.5) as measured on one "
            "H200 with torch 2.11 in float32, 16 sequences of 256 tokens (docs/workloads.md), divided among layers by "
            "their operations and bytes, forward : backward = 1 : 2."
        ),
    )


def _layers() -> Iterator[LayerWork]:
    yield LayerWork(
        name="transformer.embeddings",
        tensors=(
            TensorShape(name="transformer.wpe.weight", shape=(_POSITIONS, _WIDTH)),
            TensorShape(name="transformer.wte.weight", shape=(_VOCABULARY, _WIDTH)),
        ),
        activations=3 * _TOKENS * _WIDTH,  # two are read, their sum is written
    )
    for block in range(_BLOCKS):
        yield from _block(f"transformer.h.{block}")
    yield _normalization("transformer.ln_f")
    yield LayerWork(
        name="lm_head",
        flops=2 * _TOKENS * _WIDTH * _VOCABULARY,
        activations=_TOKENS * (_WIDTH + _VOCABULARY),
    )


def _block(name: str) -> Iterator[LayerWork]:
    inner = 4 * _WIDTH
    yield _normalization(f"{name}.ln_1")
    yield _linear(f"{name}.attn.c_attn", _WIDTH, 3 * _WIDTH)
    yield LayerWork(
        name=f"{name}.attn",
        flops=2 * 2 * _TOKENS * _SEQUENCE * _WIDTH,  # scores, then the mixture of values
        activations=4 * _TOKENS * _WIDTH,  # fused: scores never reach memory
    )
    yield _linear(f"{name}.attn.c_proj", _WIDTH, _WIDTH)
    yield _normalization(f"{name}.ln_2")
    yield _linear(f"{name}.mlp.c_fc", _WIDTH, inner)
    yield LayerWork(name=f"{name}.mlp.act", activations=2 * _TOKENS * inner)
    yield _linear(f"{name}.mlp.c_proj", inner, _WIDTH)


def _linear(name: str, width: int, out: int) -> LayerWork:
    return LayerWork(
        name=name,
        # Hugging Face's Conv1D keeps its weight transposed.
        tensors=linear_tensors(name, (width, out), bias=out),
        flops=2 * _TOKENS * width * out,
        activations=_TOKENS * (width + out),
    )


def _normalization(name: str) -> LayerWork:
    """Layer normalization and the addition before it: each reads and writes once."""
    return LayerWork(name=name, tensors=normalization_tensors(name, _WIDTH), activations=4 * _TOKENS * _WIDTH)
