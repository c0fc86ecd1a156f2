"""`laconic plan` from the command line: its questions, its errors, its JSON and its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laconic.cli import main

HERE = ("--hosts", "4", "--bandwidth", "1gbit")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(path)


def test_json_and_the_page(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    words = ["plan", "--model", config, *HERE, "--json", "--output", str(page)]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("Use ")
    assert found["workers"] == 4
    assert found["workload"]["num_parameters"] > 2_000_000
    assert found["baseline"]["strategy"] == "bsp / all_reduce / none / fusion"
    by_time = [choice["seconds"] for choice in found["choices"]]
    assert by_time == sorted(by_time)
    assert found["crossovers"][0]["from_bps"] == 0
    assert found["crossovers"][-1]["to_bps"] is None
    text = page.read_text(encoding="utf-8")
    assert found["verdict"].replace("'", "&#39;") in text
    assert 'id="map"' in text
    assert 'id="frontier"' in text


def test_a_model_that_cannot_fit(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", config, *HERE, "--memory", "1MB"]) == 2
    assert "no strategy fits into" in capsys.readouterr().err


def test_config_keys_that_are_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "num_atention_heads": 4, "bos_token_id": 1}), encoding="utf-8")
    assert main(["plan", "--model", str(path), *HERE, "--lossless", "--json"]) == 0
    assumed = json.loads(capsys.readouterr().out)["grounds"]["assumed"]
    assert any(line.endswith("changes no shape: num_atention_heads") for line in assumed)
    missing = {key: value for key, value in CONFIG.items() if key != "num_hidden_layers"}
    path.write_text(json.dumps({**missing, "num_hiden_layers": 2}), encoding="utf-8")
    assert main(["plan", "--model", str(path), *HERE]) == 2
    assert 'Did you mean "num_hiden_layers"?' in capsys.readouterr().err


def test_text(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", config, *HERE, "--lossless", "--compute", "100ms", "--steps", "500"]) == 0
    printed = capsys.readouterr().out
    for part in ("Use ", "1. ", "Best by bandwidth", "Measured:", "Assumed:", "Not modelled:", "as given"):
        assert part in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --model or --params"),
        (("--params", "350M", "--model", "gpt2", *HERE), "and not both"),
        (("--params", "350M"), "say where to train"),
        (("--params", "350M", "--hosts", "4"), "say where to train"),
        (("--params", "350M", "--hosts", "4", "--bandwidth", "0"), "bandwidth of zero"),
        (("--params", "many", *HERE), "--params must be a whole number"),
        (("--params", "350M", "--hosts", "1", "--bandwidth", "1gbit"), "a single worker exchanges nothing"),
        (("--params", "350M", *HERE, "--device", "h20"), 'there is no device "h20"'),
        (("--params", "350M", *HERE, "--device", "cpu"), "on a CPU is not known"),
        (("--params", "350M", *HERE, "--lossless", "--max-loss-gap", "1%"), "no effect with --lossless"),
        (("--params", "350M", *HERE, "--max-loss-gap", "2"), "between 0 and 100%"),
        (("--model", "gpt2", "--batch", "4", *HERE), "--batch has an effect only with"),
        (("--model", "gpt3", *HERE), 'there is no workload "gpt3"'),
        (("--params", "350M", *HERE, "--batch", "-1"), "batch must be between 1"),
        (("--params", "350M", *HERE, "--batch", "0"), "batch must be between 1"),
        (("--params", "350M", *HERE, "--sequence", "0"), "sequence must be between 1"),
        (("--params", "350M", *HERE, "--max-loss-gap", "-1%"), "--max-loss-gap must be"),
        (("--params", "350M", *HERE, "--steps", "0"), "steps must be between 1"),
        (("--params", "350M", *HERE, "--memory", "0"), "--memory must be more than 0 B"),
        (("--params", "350M", *HERE, "--gpus-per-host", "2", "--inside", "0"), "zero inside hosts"),
        (("--params", "350M", *HERE, "--inside", "10gbit"), "--inside has no effect with one device"),
        (("--params", "350M", "--hosts", "1", "--gpus-per-host", "8", "--bandwidth", "1gbit"), "no effect on one host"),
        (("--params", "350M", "--hosts", "0", "--bandwidth", "1gbit"), "hosts must be between 1"),
        (("--params", "350M", *HERE, "--output", "/nowhere/at/all.html"), "there is no folder"),
    ],
)
def test_bad_input(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err
