"""The shape of a decoder from a config.json as Hugging Face writes it.

Families differ in the names of keys, in whether a third product gates the feed-forward layer, and in whether the output
layer has a weight of its own. Keys that would change the number of parameters in an unknown way, such as experts, are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from laconic.errors import UsageError, did_you_mean, one_line
from laconic.workload import strict_json
from laconic.workload.decoder import DecoderShape


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What the models of one type have in common."""

    gated: bool
    tied: bool
    """Unless the config says otherwise (tie_word_embeddings)."""
    blocks: str = "num_hidden_layers"
    width: str = "hidden_size"
    heads: str = "num_attention_heads"
    inner: str = "intermediate_size"
    inner_ratio: int = 0
    """Of the feed-forward layer's width to the model's, if the config leaves it out; 0: it must be there."""


_LLAMA_LIKE = _Family(gated=True, tied=False)
_BERT_LIKE = _Family(gated=False, tied=True)
FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3", "olmo2"), _LLAMA_LIKE),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _Family(gated=True, tied=True)),
    **dict.fromkeys(("bert", "roberta", "modernbert"), _BERT_LIKE),
    "gpt_neox": _Family(gated=False, tied=False),
    "opt": _Family(gated=False, tied=True, inner="ffn_dim"),
    "gpt2": _Family(
        gated=False, tied=True, blocks="n_layer", width="n_embd", heads="n_head", inner="n_inner", inner_ratio=4
    ),
}
"""By model_type."""
_CHANGES_SHAPES = ("expert", "moe", "ssm", "mamba", "lora", "vision", "audio", "encoder_layers", "text_config")
"""Words that a key must not contain: parameters that a plain decoder does not have."""
_DTYPES = ("torch_dtype", "dtype")
_USED = ("head_dim", "num_key_value_heads", "vocab_size")
_SIZE = re.compile(r"^n_|^num_|_(dim|size|rank|layers|heads|width)$")


def read_config(path: str | Path, *, batch: int, sequence: int) -> tuple[DecoderShape, str | None]:
    """The shape, and the dtype that the config names, if any."""
    where = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the config {where}: {reason}.") from exc
    config = strict_json.parse(text, where)
    if not isinstance(config, dict):
        raise UsageError(f"{where} must hold one JSON object, as Hugging Face's config.json does.")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UsageError(
            f'{where}: there is no model_type "{one_line(kind, 40)}" here. {did_you_mean(str(kind), FAMILIES)} For '
            "any other model, profile it: --model script.py:make_model."
        )
    for key in config:
        if any(part in key.lower() for part in _CHANGES_SHAPES):
            raise UsageError(
                f'{where}: "{one_line(key, 60)}" means parameters that a plain decoder does not have. Profile the '
                "model instead: --model script.py:make_model."
            )
    return _shape(config, FAMILIES[kind], where, batch=batch, sequence=sequence), _dtype(config)


def sizes_not_used(path: str | Path) -> list[str]:
    """Keys of an accepted config that look like sizes but have no effect here, perhaps because of a typo."""
    config = strict_json.parse(Path(path).read_text(encoding="utf-8"), str(path))
    assert isinstance(config, dict), "read_config has read it"
    family = FAMILIES[config["model_type"]]
    used = {family.blocks, family.width, family.heads, family.inner, *_USED}
    return [key for key in config if _SIZE.search(key) and key not in used]


def is_config(path: str | Path) -> bool:
    """Whether a JSON file is a model's config and not a workload of ours."""
    try:
        config = strict_json.parse(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, UsageError):
        return False
    return isinstance(config, dict) and "layers" not in config


def _shape(config: Mapping[str, object], family: _Family, where: str, *, batch: int, sequence: int) -> DecoderShape:
    def number(key: str, otherwise: int | None = None) -> int:
        value = config.get(key)
        if value is None and otherwise is not None:
            return otherwise
        if value is None:
            raise UsageError(f'{where} has no "{key}", which its model_type needs. {did_you_mean(key, config)}')
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**31:
            raise UsageError(f"{where}: {key} must be a whole number from 1 to {2**31}, got {one_line(value, 40)}.")
        return value

    width, heads = number(family.width), number(family.heads)
    head_width = number("head_dim", max(1, width // heads))
    tied = config.get("tie_word_embeddings", family.tied)
    if not isinstance(tied, bool):
        raise UsageError(f"{where}: tie_word_embeddings must be true or false, got {one_line(tied, 40)}.")
    return DecoderShape(
        blocks=number(family.blocks),
        width=width,
        inner=number(family.inner, family.inner_ratio * width or None),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_width=head_width,
        vocabulary=number("vocab_size"),
        sequence=sequence,
        batch=batch,
        gated=family.gated,
        tied=tied,
    )


def _dtype(config: Mapping[str, object]) -> str | None:
    return next((value for key in _DTYPES if isinstance(value := config.get(key), str)), None)
