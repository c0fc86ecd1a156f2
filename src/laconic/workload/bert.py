"""BERT with both heads of its pretraining, sequences of 64 tokens, tensors named as Hugging Face names them.

The vocabulary is padded to 30,528 (a multiple of 64): only then do the models have the 110,111,042 and 336,232,258
parameters of the survey whose times are used here. The masked-token head shares the word embedding's weight, whose
gradient is complete when the embedding, the first layer, has finished its backward pass.

Reference: Devlin et al. 2018, arXiv:1810.04805.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from laconic.workload.roofline import (
    DIVISION,
    RTX_2080_TI,
    LayerWork,
    linear_tensors,
    normalization_tensors,
    timed_layers,
)
from laconic.workload.workload import TensorShape, Workload

_SEQUENCE = 64
_POSITIONS = 512
_VOCABULARY = 30_528
_SEGMENTS = 2


@dataclass(frozen=True, kw_only=True)
class _Shape:
    blocks: int
    width: int
    heads: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.batch * _SEQUENCE


def bert_base() -> Workload:
    """BERT-Base, batch 64."""
    return _bert("bert-base", _Shape(blocks=12, width=768, heads=12, batch=64), "212.8")


def bert_large() -> Workload:
    """BERT-Large, batch 8."""
    return _bert("bert-large", _Shape(blocks=24, width=1024, heads=16, batch=8), "49")


def _bert(name: str, shape: _Shape, sequences_per_s: str) -> Workload:
    return Workload(
        name=name,
        batch=shape.batch,
        layers=timed_layers(list(_layers(shape)), RTX_2080_TI, compute_s=shape.batch / float(sequences_per_s)),
        source=(
            "The shapes are computed from the architecture. The authors of A Quantitative Survey of Communication "
            f"Optimizations in Distributed Deep Learning measured {sequences_per_s} sequences/s of {_SEQUENCE} tokens "
            "on one RTX 2080 Ti in float32 (HKBU-HPML/ddl-benchmarks, 2020-05-29), from which the time of a step "
            f"follows. {DIVISION}"
        ),
    )


def _layers(shape: _Shape) -> Iterator[LayerWork]:
    width = shape.width
    tables = (("token_type", _SEGMENTS), ("position", _POSITIONS), ("word", _VOCABULARY))
    yield LayerWork(
        name="bert.embeddings",
        tensors=tuple(
            TensorShape(name=f"bert.embeddings.{table}_embeddings.weight", shape=(rows, width))
            for table, rows in tables
        ),
        activations=4 * shape.tokens * width,  # three are read, their sum is written
    )
    yield _normalization("bert.embeddings.LayerNorm", shape)
    for block in range(shape.blocks):
        yield from _block(f"bert.encoder.layer.{block}", shape)
    yield _linear("bert.pooler.dense", width, width, shape.batch)
    yield _linear("cls.predictions.transform.dense", width, width, shape.tokens)
    yield _activation("cls.predictions.transform.transform_act_fn", width, shape)
    yield _normalization("cls.predictions.transform.LayerNorm", shape)
    yield LayerWork(
        name="cls.predictions.decoder",
        tensors=(TensorShape(name="cls.predictions.bias", shape=(_VOCABULARY,)),),
        flops=2 * shape.tokens * width * _VOCABULARY,
        activations=shape.tokens * (width + _VOCABULARY),
    )
    yield _linear("cls.seq_relationship", width, 2, shape.batch)


def _block(name: str, shape: _Shape) -> Iterator[LayerWork]:
    width, inner, tokens = shape.width, 4 * shape.width, shape.tokens
    for part in ("query", "key", "value"):
        yield _linear(f"{name}.attention.self.{part}", width, width, tokens)
    yield LayerWork(
        name=f"{name}.attention.self",
        flops=2 * 2 * tokens * _SEQUENCE * width,  # scores, then the mixture of values
        # Scores are written, and read and written by scaling with masking, softmax and dropout; then read.
        activations=4 * tokens * width + 8 * tokens * _SEQUENCE * shape.heads,
    )
    yield _linear(f"{name}.attention.output.dense", width, width, tokens)
    yield _normalization(f"{name}.attention.output.LayerNorm", shape)
    yield _linear(f"{name}.intermediate.dense", width, inner, tokens)
    yield _activation(f"{name}.intermediate.intermediate_act_fn", inner, shape)
    yield _linear(f"{name}.output.dense", inner, width, tokens)
    yield _normalization(f"{name}.output.LayerNorm", shape)


def _linear(name: str, width: int, out: int, rows: int) -> LayerWork:
    return LayerWork(
        name=name,
        tensors=linear_tensors(name, (out, width), bias=out),
        flops=2 * rows * width * out,
        activations=rows * (width + out),
    )


def _activation(name: str, width: int, shape: _Shape) -> LayerWork:
    return LayerWork(name=name, activations=2 * shape.tokens * width)


def _normalization(name: str, shape: _Shape) -> LayerWork:
    """Dropout or an addition, then layer normalization: each reads and writes once."""
    return LayerWork(
        name=name,
        tensors=normalization_tensors(name, shape.width),
        activations=4 * shape.tokens * shape.width,
    )
