"""Large models as data: parameters as published, operations as counted by hand, bad configurations refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laconic.errors import ConfigurationError, UsageError
from laconic.workload.transformer import Transformer, from_config
from laconic.workload.transformer_presets import MODELS, gpt, transformer

PUBLISHED = {
    # The number of elements of the published weights.
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    # Without the layer that predicts two tokens ahead.
    "deepseek-v3": 671_026_419_200,
}
LLAMA = {
    **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"intermediate_size": 14_336, "vocab_size": 128_256, "max_position_embeddings": 131_072, "model_type": "llama"},
    **{"rope_theta": 500_000.0, "mlp_bias": False, "tie_word_embeddings": False, "hidden_act": "silu"},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    assert MODELS[name].num_parameters == PUBLISHED[name]


def test_active_parameters_are_those_published() -> None:
    found = {name: round(MODELS[name].num_active_parameters / 1e9) for name in ("deepseek-v3", "qwen3-235b-a22b")}
    assert found == {"deepseek-v3": 38, "qwen3-235b-a22b": 22}
    assert round(MODELS["mixtral-8x7b"].num_active_parameters / 1e9, 1) == 12.9
    assert MODELS["llama3-8b"].num_active_parameters == MODELS["llama3-8b"].num_parameters


def test_a_gpt_has_the_parameters_of_the_formula() -> None:
    hidden, layers, vocabulary, positions = 12_288, 96, 51_200, 2048
    model = gpt("g", hidden=hidden, layers=layers, heads=96)
    formula = 12 * layers * hidden**2 + 13 * layers * hidden + (vocabulary + positions) * hidden + 2 * hidden
    assert model.num_parameters == formula


def test_operations_are_those_of_the_formula() -> None:
    """SC21: 72 B s l h^2 (1 + s / 6h + V / 12lh) without recomputation, every score counted."""
    hidden, layers, batch, sequence = 4096, 36, 7, 2048
    model = gpt("g", hidden=hidden, layers=layers, heads=32)
    formula = 72 * batch * sequence * layers * hidden**2
    formula *= 1 + sequence / (6 * hidden) + 51_200 / (12 * layers * hidden)
    assert model.model_flops(batch * sequence, sequence, causal=False) == pytest.approx(formula, rel=1e-12)


def test_a_published_configuration_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    assert transformer(path).num_parameters == PUBLISHED["llama3-8b"]
    assert transformer("llama3-8b") is MODELS["llama3-8b"]
    mixture = {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32_000, "model_type": "mixtral"}
    assert from_config(mixture).num_parameters == PUBLISHED["mixtral-8x7b"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_attention_heads": 33}, "not divisible by 33 heads. The nearest number of heads that divides it is 32"),
        ({"hiden_size": 4096}, 'no key "hiden_size". Did you mean "hidden_size"'),
        ({"num_hidden_layers": "many"}, "num_hidden_layers must be of type int, got 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        ({"num_key_value_heads": 5}, "cannot share 5 heads"),
        ({"mlp_bias": True}, "mlp_bias is not modelled"),
        ({"num_experts": 8}, "num_experts and num_experts_per_tok go together"),
        ({"num_experts": 2, "num_experts_per_tok": 3}, "at most num_experts = 2"),
        ({"vocab_size": None}, "vocab_size must be at least 1"),
        ({"hidden_size": 10**12}, "hidden_size must be at most 10000000"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most 100000"),
        ({"head_dim": -64}, "head_dim must be at least 0"),
        ({"first_k_dense_replace": 33}, "first_k_dense_replace must be at most num_hidden_layers = 32, got 33"),
    ],
)
def test_bad_configurations_are_refused(change: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        from_config({**LLAMA, **change})
    assert expected in str(caught.value)


def test_unknown_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r'no large model "lama3-8b". Did you mean "llama3-8b"'):
        transformer("lama3-8b")
    (tmp_path / "bad.json").write_text("[1", encoding="utf-8")
    with pytest.raises(UsageError, match=r"cannot read .*bad\.json"):
        transformer(tmp_path / "bad.json")
    (tmp_path / "deep.json").write_text("[" * 200_000, encoding="utf-8")
    with pytest.raises(UsageError, match=r"cannot read .*deep\.json: maximum recursion depth"):
        transformer(tmp_path / "deep.json")
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="expected an object"):
        transformer(tmp_path / "list.json")


def test_experts_hold_what_their_tokens_pass() -> None:
    model: Transformer = MODELS["deepseek-v3"]
    dense, mixture = model.layer_parameters(mixture=False), model.layer_parameters(mixture=True)
    assert (
        3 * dense + 58 * mixture + 2 * model.vocab_size * model.hidden_size + model.hidden_size == model.num_parameters
    )
