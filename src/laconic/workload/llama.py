"""Llama in two sizes, sequences of 2048 tokens, bfloat16, tensors named as Hugging Face names them.

The output layer has a weight of its own. The larger model has eight heads of keys and values for its 64 of queries.

Reference: Touvron et al. 2023, arXiv:2302.13971 (7B) and arXiv:2307.09288 (70B).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from laconic.workload.roofline import H200_BF16, LayerWork, stated_compute_s, timed_layers
from laconic.workload.workload import TensorShape, Workload

_SEQUENCE = 2048
_VOCABULARY = 32_000


@dataclass(frozen=True, kw_only=True)
class _Shape:
    blocks: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.batch * _SEQUENCE

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv_heads


_7B = _Shape(blocks=32, width=4096, inner=11_008, heads=32, kv_heads=32, batch=4)
_70B = _Shape(blocks=80, width=8192, inner=28_672, heads=64, kv_heads=8, batch=4)


_7B_COMPUTE_S = 0.6307
_70B_SHARE = 0.61
"""Of the peaks, as llama-7b reaches it."""


def llama_7b() -> Workload:
    """Llama 7B, batch 4."""
    return _llama(
        "llama-7b",
        _7B,
        compute_s=_7B_COMPUTE_S,
        source=(
            "Shapes computed from the architecture; 630.7 ms of forward (215.3) and backward (415.3) as measured on "
            "one H200 with torch 2.11 in bfloat16, 4 sequences of 2048 tokens (docs/workloads.md), divided among "
            "layers by their operations and bytes, forward : backward = 1 : 2."
        ),
    )


def llama_70b() -> Workload:
    """Llama 70B, batch 4."""
    return _llama(
        "llama-70b",
        _70B,
        compute_s=stated_compute_s(list(_layers(_70B)), H200_BF16, share=_70B_SHARE),
        source=(
            "Shapes computed from the architecture; not measured: what one H200 would take in bfloat16 for 4 sequences "
            "of 2048 tokens if the model fitted into it, at 61% of the peaks in its data sheet, which is the share "
            "that llama-7b reaches there, divided among layers by their operations and bytes, "
            "forward : backward = 1 : 2."
        ),
    )


def _llama(name: str, shape: _Shape, *, compute_s: float, source: str) -> Workload:
    return Workload(
        name=name,
        batch=shape.batch,
        layers=timed_layers(list(_layers(shape)), H200_BF16, compute_s=compute_s),
        source=source,
        dtype=torch.bfloat16,
    )


def _layers(shape: _Shape) -> Iterator[LayerWork]:
    yield LayerWork(
        name="model.embed_tokens",
        tensors=(TensorShape(name="model.embed_tokens.weight", shape=(_VOCABULARY, shape.width)),),
        activations=2 * shape.tokens * shape.width,
    )
    for block in range(shape.blocks):
        yield from _block(f"model.layers.{block}", shape)
    yield _normalization("model.norm", shape)
    yield _linear("lm_head", shape.width, _VOCABULARY, shape)


def _block(name: str, shape: _Shape) -> Iterator[LayerWork]:
    width, inner, tokens = shape.width, shape.inner, shape.tokens
    yield _normalization(f"{name}.input_layernorm", shape)
    yield _linear(f"{name}.self_attn.q_proj", width, width, shape)
    yield _linear(f"{name}.self_attn.k_proj", width, shape.kv_width, shape)
    yield _linear(f"{name}.self_attn.v_proj", width, shape.kv_width, shape)
    yield LayerWork(
        name=f"{name}.self_attn",
        flops=2 * 2 * tokens * _SEQUENCE * width,  # scores, then the mixture of values
        # Rotated queries and keys are read and written; then fused: scores never reach memory.
        activations=tokens * (4 * width + 4 * shape.kv_width),
    )
    yield _linear(f"{name}.self_attn.o_proj", width, width, shape)
    yield _normalization(f"{name}.post_attention_layernorm", shape)
    yield _linear(f"{name}.mlp.gate_proj", width, inner, shape)
    yield LayerWork(name=f"{name}.mlp.act_fn", activations=2 * tokens * inner)
    yield _linear(f"{name}.mlp.up_proj", width, inner, shape)
    yield LayerWork(name=f"{name}.mlp", activations=3 * tokens * inner)  # gate times up
    yield _linear(f"{name}.mlp.down_proj", inner, width, shape)


def _linear(name: str, width: int, out: int, shape: _Shape) -> LayerWork:
    return LayerWork(
        name=name,
        tensors=(TensorShape(name=f"{name}.weight", shape=(out, width)),),
        flops=2 * shape.tokens * width * out,
        activations=shape.tokens * (width + out),
    )


def _normalization(name: str, shape: _Shape) -> LayerWork:
    """RMS normalization and the addition before it: each reads and writes once."""
    return LayerWork(
        name=name,
        tensors=(TensorShape(name=f"{name}.weight", shape=(shape.width,)),),
        activations=4 * shape.tokens * shape.width,
    )
