"""Models of which only the size or a config is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from laconic.errors import UsageError
from laconic.workload.devices import device
from laconic.workload.guessed import decoder_workload, guessed_shape
from laconic.workload.hugging_face import is_config, read_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}


def written(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def parameters(shape) -> int:
    return decoder_workload("m", shape, device("h200"), dtype=torch.float32, shape_from="x").num_parameters


@pytest.mark.parametrize("number", [30e6, 125e6, 350e6, 1.3e9, 7e9, 70e9, 1e12])
def test_a_guess_has_about_the_parameters_asked_for(number: float) -> None:
    assert parameters(guessed_shape(int(number))) == pytest.approx(number, rel=0.08)


def test_times_are_operations_over_the_peaks() -> None:
    shape = guessed_shape(350_000_000)
    job = decoder_workload("m", shape, device("h200"), dtype=torch.float32, shape_from="a guess")
    # Six operations per parameter and token, and what attention adds; memory-bound layers take longer than that.
    least_s = 6 * job.num_parameters * shape.tokens / 989.4e12 / 0.61
    assert least_s < job.compute_s < 2 * least_s
    assert job.backward_s == pytest.approx(2 * job.forward_s)
    assert "a guess" in job.source
    assert "61%" in job.source


def test_configs_of_hugging_face(tmp_path: Path) -> None:
    shape, dtype = read_config(written(tmp_path, LLAMA), batch=4, sequence=2048)
    assert (parameters(shape), dtype) == (6_738_415_616, "bfloat16")
    shape, dtype = read_config(written(tmp_path, GPT2), batch=1, sequence=256)
    # Without positions, and biases, of which there are 13 widths a block and two in the end.
    assert parameters(shape) == 124_439_808 - 1024 * 768 - 12 * 768 * (3 + 1 + 4 + 1 + 2) - 768
    assert dtype is None
    grouped = {**LLAMA, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True}
    shape, _ = read_config(written(tmp_path, grouped), batch=1, sequence=64)
    assert (shape.kv_width, shape.attention_width, shape.tied) == (512, 2048, True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "model_type": "lama"}, 'there is no model_type "lama" here. Did you mean "llama"?'),
        ({"hidden_size": 4}, "there is no model_type"),
        ({**LLAMA, "num_local_experts": 8}, '"num_local_experts" means parameters that a plain decoder does not have'),
        ({key: value for key, value in LLAMA.items() if key != "vocab_size"}, 'has no "vocab_size"'),
        ({**LLAMA, "hidden_size": "4096"}, "hidden_size must be a whole number"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1"),
        ([], "must hold one JSON object"),
    ],
)
def test_bad_configs_are_refused(tmp_path: Path, config: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_config(written(tmp_path, config), batch=1, sequence=64)
    assert message in str(caught.value)


def test_a_workload_file_is_no_config(tmp_path: Path) -> None:
    assert is_config(written(tmp_path, LLAMA))
    assert not is_config(written(tmp_path, {"name": "x", "layers": []}))
    assert not is_config(tmp_path / "absent.json")


@pytest.mark.parametrize("number", [1000, 10**14])
def test_no_shape_is_guessed_for_sizes_that_nobody_trains(number: int) -> None:
    with pytest.raises(UsageError, match="a shape can be guessed for"):
        guessed_shape(number)
