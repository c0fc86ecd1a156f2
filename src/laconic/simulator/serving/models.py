"""The models of published serving measurements, by the name that was served.

Shapes are those of the configurations published with the weights. Two are approximate: Qwen3.5's linear attention is
counted with the cache of its full-attention layers on average, and GLM-5's sparse attention as latent attention.
"""

from __future__ import annotations

import re
from functools import cache

from laconic.errors import UsageError, did_you_mean, one_line
from laconic.workload.transformer import Transformer
from laconic.workload.transformer_presets import MODELS, gpt, transformer

_LATENT = {
    "head_dim": 192,
    "v_head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
}

_SHAPES: dict[str, Transformer] = {
    model.name: model
    for model in (
        gpt("bloom-176b", hidden=14_336, layers=70, heads=112, vocabulary=250_880, positions=0),
        Transformer(
            name="llama2-70b",
            hidden_size=8192,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            intermediate_size=28_672,
            vocab_size=32_000,
        ),
        Transformer(
            name="qwen3-32b",
            hidden_size=5120,
            num_hidden_layers=64,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            qk_norm=True,
            intermediate_size=25_600,
            vocab_size=151_936,
        ),
        Transformer(
            name="gpt-oss-120b",
            hidden_size=2880,
            num_hidden_layers=36,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            attention_bias=True,
            intermediate_size=2880,
            moe_intermediate_size=2880,
            num_experts=128,
            num_experts_per_tok=4,
            vocab_size=201_088,
        ),
        Transformer(
            name="gpt-oss-20b",
            hidden_size=2880,
            num_hidden_layers=24,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            attention_bias=True,
            intermediate_size=2880,
            moe_intermediate_size=2880,
            num_experts=32,
            num_experts_per_tok=4,
            vocab_size=201_088,
        ),
        Transformer(
            name="minimax-m2.5",
            hidden_size=3072,
            num_hidden_layers=62,
            num_attention_heads=48,
            num_key_value_heads=8,
            head_dim=128,
            qk_norm=True,
            intermediate_size=1536,
            moe_intermediate_size=1536,
            num_experts=256,
            num_experts_per_tok=8,
            vocab_size=200_064,
        ),
        Transformer(
            name="qwen3.5-397b-a17b",
            hidden_size=4096,
            num_hidden_layers=60,
            num_attention_heads=32,
            num_key_value_heads=2,
            head_dim=256,
            intermediate_size=1024,
            moe_intermediate_size=1024,
            num_experts=512,
            num_experts_per_tok=10,
            n_shared_experts=1,
            vocab_size=248_320,
        ),
        Transformer(
            name="kimi-k2.5",
            hidden_size=7168,
            num_hidden_layers=61,
            num_attention_heads=64,
            **_LATENT,
            intermediate_size=18_432,
            moe_intermediate_size=2048,
            num_experts=384,
            num_experts_per_tok=8,
            n_shared_experts=1,
            first_k_dense_replace=1,
            vocab_size=163_840,
        ),
        Transformer(
            name="glm-5",
            hidden_size=6144,
            num_hidden_layers=78,
            num_attention_heads=64,
            **_LATENT,
            intermediate_size=12_288,
            moe_intermediate_size=2048,
            num_experts=256,
            num_experts_per_tok=8,
            n_shared_experts=1,
            first_k_dense_replace=3,
            vocab_size=154_880,
        ),
    )
}

_FAMILIES = (
    ("llama-?3.*405b", "llama3-405b"),
    ("llama-?3.*70b", "llama3-70b"),
    ("llama-?3.*8b", "llama3-8b"),
    ("deepseek-?(r1|v3)", "deepseek-v3"),
    (r"qwen3\.5-397b", "qwen3.5-397b-a17b"),
    ("qwen3-235b", "qwen3-235b-a22b"),
    ("qwen3-30b", "qwen3-30b-a3b"),
    ("qwen3-32b", "qwen3-32b"),
    ("mixtral-8x7b", "mixtral-8x7b"),
    ("gpt-oss-120b", "gpt-oss-120b"),
    ("gpt-oss-20b", "gpt-oss-20b"),
    ("minimax-m2", "minimax-m2.5"),
    ("kimi-k2", "kimi-k2.5"),
    ("glm-5", "glm-5"),
)
"""Repositories of weights, quantized and tuned ones included -> the model's shape."""


@cache
def served_model(name: str) -> Transformer:
    """A model by its name in laconic, by the name of a repository of its weights, or from a config.json."""
    if name.endswith(".json"):
        return transformer(name)
    if name in _SHAPES:
        return _SHAPES[name]
    if name in MODELS:
        return MODELS[name]
    for pattern, shape in _FAMILIES:
        if re.search(pattern, name.lower()):
            return served_model(shape)
    known = list(dict.fromkeys([*_SHAPES, *MODELS]))
    raise UsageError(
        f'there is no model "{one_line(name, 60)}". {did_you_mean(name, known)} Or give a config.json with Hugging '
        "Face's keys."
    )
