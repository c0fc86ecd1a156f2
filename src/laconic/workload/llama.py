"""Llama in two sizes, sequences of 2048 tokens, bfloat16, tensors named as Hugging Face names them.

The output layer has a weight of its own. The larger model has eight heads of keys and values for its 64 of queries.

Reference: Touvron et al. 2023, arXiv:2302.13971 (7B) and arXiv:2307.09288 (70B).
"""

from __future__ import annotations

import torch

from laconic.workload.decoder import DecoderShape, decoder_layers
from laconic.workload.roofline import DIVISION, H200_BF16, stated_compute_s, timed_layers
from laconic.workload.workload import Workload

_SEQUENCE = 2048
_VOCABULARY = 32_000

_7B = DecoderShape(
    blocks=32, width=4096, inner=11_008, heads=32, kv_heads=32, vocabulary=_VOCABULARY, sequence=_SEQUENCE, batch=4
)
_70B = DecoderShape(
    blocks=80, width=8192, inner=28_672, heads=64, kv_heads=8, vocabulary=_VOCABULARY, sequence=_SEQUENCE, batch=4
)

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
            "The shapes are computed from the architecture. For 4 sequences of 2048 tokens in bfloat16, a forward pass "
            "of 215.3 ms and a backward pass of 415.3 ms were measured on one H200 with torch 2.11 "
            f"(docs/workloads.md). Only the time of both passes, 630.7 ms, is used. {DIVISION}"
        ),
    )


def llama_70b() -> Workload:
    """Llama 70B, batch 4."""
    return _llama(
        "llama-70b",
        _70B,
        compute_s=stated_compute_s(list(decoder_layers(_70B)), H200_BF16, share=_70B_SHARE),
        source=(
            "The shapes are computed from the architecture. The time of a step was not measured: it is the time that "
            "one H200 would take in bfloat16 for 4 sequences of 2048 tokens if the model fitted into its memory, at "
            f"61% of the peaks in its data sheet, the share that llama-7b reaches on this GPU. {DIVISION}"
        ),
    )


def _llama(name: str, shape: DecoderShape, *, compute_s: float, source: str) -> Workload:
    return Workload(
        name=name,
        batch=shape.batch,
        layers=timed_layers(list(decoder_layers(shape)), H200_BF16, compute_s=compute_s),
        source=source,
        dtype=torch.bfloat16,
    )
