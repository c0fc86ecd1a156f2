"""Transformers known by a name, each checked against the published number of parameters.

The vocabulary of GPT-3 is padded to 51,200, as Megatron does. References: Brown et al. 2020, arXiv:2005.14165 (GPT-3);
Dubey et al. 2024, arXiv:2407.21783 (Llama 3); Jiang et al. 2024, arXiv:2401.04088 (Mixtral); DeepSeek-AI 2024,
arXiv:2412.19437 (DeepSeek-V3); Yang et al. 2025, arXiv:2505.09388 (Qwen3); and the configurations that were published
with their weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from laconic.errors import ConfigurationError, UsageError, did_you_mean, one_line
from laconic.workload.transformer import Transformer, from_config


def gpt(
    name: str, *, hidden: int, layers: int, heads: int, vocabulary: int = 51_200, positions: int = 2048
) -> Transformer:
    """A model of the shape of GPT-3: two matrices of 4 x the width, biases, learned positions, tied output."""
    return Transformer(
        name=name,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        intermediate_size=4 * hidden,
        gated=False,
        bias=True,
        tie_word_embeddings=True,
        max_position_embeddings=positions,
    )


def _llama3(name: str, hidden: int, layers: int, heads: int, inner: int) -> Transformer:
    return Transformer(
        name=name,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        intermediate_size=inner,
        vocab_size=128_256,
    )


def _qwen3_moe(name: str, hidden: int, layers: int, heads: int, inner: int) -> Transformer:
    return Transformer(
        name=name,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,
        qk_norm=True,
        intermediate_size=8 * inner,
        moe_intermediate_size=inner,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151_936,
    )


MODELS: dict[str, Transformer] = {
    model.name: model
    for model in (
        gpt("gpt3-125m", hidden=768, layers=12, heads=12),
        gpt("gpt3-1.3b", hidden=2048, layers=24, heads=16),
        gpt("gpt3-6.7b", hidden=4096, layers=32, heads=32),
        gpt("gpt3-13b", hidden=5120, layers=40, heads=40),
        gpt("gpt3-175b", hidden=12_288, layers=96, heads=96),
        _llama3("llama3-8b", 4096, 32, 32, 14_336),
        _llama3("llama3-70b", 8192, 80, 64, 28_672),
        _llama3("llama3-405b", 16_384, 126, 128, 53_248),
        Transformer(
            name="mixtral-8x7b",
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=14_336,
            num_experts=8,
            num_experts_per_tok=2,
            vocab_size=32_000,
        ),
        Transformer(
            name="deepseek-v3",
            hidden_size=7168,
            num_hidden_layers=61,
            num_attention_heads=128,
            head_dim=192,
            v_head_dim=128,
            qk_rope_head_dim=64,
            q_lora_rank=1536,
            kv_lora_rank=512,
            intermediate_size=18_432,
            moe_intermediate_size=2048,
            num_experts=256,
            num_experts_per_tok=8,
            n_shared_experts=1,
            first_k_dense_replace=3,
            vocab_size=129_280,
        ),
        _qwen3_moe("qwen3-235b-a22b", 4096, 94, 64, 1536),
        _qwen3_moe("qwen3-30b-a3b", 2048, 48, 32, 768),
    )
}
"""The known models by name."""


def transformer(name_or_path: str | Path) -> Transformer:
    """The known model of that name, or what a Hugging Face configuration in a .json file describes."""
    text = str(name_or_path)
    if text in MODELS:
        return MODELS[text]
    path = Path(name_or_path)
    if path.suffix != ".json":
        raise UsageError(
            f'there is no large model "{one_line(text, 80)}". {did_you_mean(text, MODELS)} '
            "Or give a config.json with Hugging Face's keys."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise UsageError(f"cannot read {one_line(text, 80)}: {one_line(exc, 120)}.") from exc
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path.name}: expected an object with the keys of a model.")
    return from_config(config, name=path.stem)
