"""`laconic list`: every registered name, in text and in JSON."""

from __future__ import annotations

import json

import pytest

from laconic.cli import main
from laconic.compression import Wrapper
from laconic.strategy import AXES, PRESETS, Strategy
from laconic.workload import workload


def test_text_names_every_method_setting_and_preset(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["list"]) == 0
    out, err = capsys.readouterr()
    lines = [line.strip() for line in out.splitlines()]
    assert err == ""
    for axis, registry in AXES.items():
        assert any(line.startswith(f"{axis}: ") for line in lines)
        for method in registry:
            mark = "+ " if issubclass(method, Wrapper) else ""
            assert any(line.startswith(f"{mark}{method.name} ") for line in lines)
            for key, setting in method.declared().items():
                default = setting.show(method.__dataclass_fields__[key].default)
                assert any(f"{line} ".startswith(f"{key}={default} ") for line in lines)
    whole = " ".join(" ".join(lines).split())
    for name, (text, what) in PRESETS.items():
        assert f" {name} {text} {what}" in whole
    assert "If left off: architecture parameter_server." in whole
    assert "If left off: compression dct_topk." in whole


@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_text_fits_the_terminal(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= int(columns)
    assert "…" not in out
    assert not any(line != line.rstrip() for line in out.splitlines())


def test_json_has_the_documented_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["axes", "questions", "presets", "loss"]
    assert list(document["questions"]) == list(AXES)
    assert list(document["axes"]) == list(AXES)
    for axis, registry in AXES.items():
        assert [entry["name"] for entry in document["axes"][axis]] == registry.names()
        for entry, method in zip(document["axes"][axis], registry, strict=True):
            of_axis = {
                "synchronization": {"partners"},
                "compression": {
                    "lossless",
                    "unbiased",
                    "wants_error_feedback",
                    "keeps_residual",
                    "ratio",
                    "exact",
                    "loss_gap",
                },
            }
            assert set(entry) == {"name", "summary", "wrapper", "settings"} | of_axis.get(axis, set())
            assert entry["summary"].endswith(".")
            assert [setting["name"] for setting in entry["settings"]] == list(method.declared())
            for setting in entry["settings"]:
                assert set(setting) == {"name", "kind", "default", "default_text", "allowed", "help"}
                assert setting["help"], f"{method.name}.{setting['name']} has no docstring"
    synchronization = {entry["name"]: entry for entry in document["axes"]["synchronization"]}
    assert synchronization["bsp"]["partners"] == {}
    assert synchronization["ssp"]["partners"] == {"architecture": "parameter_server"}
    compression = {entry["name"]: entry for entry in document["axes"]["compression"]}
    assert compression["none"]["lossless"] is True
    assert compression["fp16"]["lossless"] is False
    assert compression["error_feedback"]["wrapper"] is True
    assert compression["error_feedback"]["ratio"] is None
    assert compression["chain"]["settings"][0]["default"] == "int8"
    assert [compression[name]["ratio"] for name in ("none", "fp16")] == [1, 2]
    assert compression["powersgd"]["ratio"] > 100
    assert compression["powersgd"]["wants_error_feedback"] is True
    assert compression["qsgd"]["unbiased"] is True
    assert compression["threshold"]["exact"] is False
    scheduling = {entry["name"]: entry for entry in document["axes"]["scheduling"]}
    assert scheduling["fusion"]["settings"][0]["default"] == 25 * 1024 * 1024


def test_ratios_are_those_of_the_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    main(["list", "--json"])
    entries = json.loads(capsys.readouterr().out)["axes"]["compression"]
    tensors = workload("gpt2").tensors
    plain = Strategy().wire_bytes_per_step(tensors, 4)
    for entry in entries:
        if not entry["wrapper"]:
            strategy = Strategy.parse(f"bsp / all_reduce / {entry['name']}")
            assert entry["ratio"] == plain / strategy.wire_bytes_per_step(tensors, 4)
    main(["list"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "the same number of bytes, lossless" in lines
    assert "2 times fewer bytes, biased" in lines
    assert any(line.endswith("times fewer bytes, biased, wants error_feedback") for line in lines)
    assert any(line.startswith("at worst ") for line in lines), "threshold says only what it sends at most"
    far = [entry for entry in entries if (entry["loss_gap"] or 0) > 0.02]
    assert far
    said = [line for line in lines if "compared with no compression" in line]
    assert [line.split()[1] for line in said] == [f"{entry['loss_gap']:+.1%}" for entry in far]


def test_json_presets_are_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    main(["list", "--json"])
    for preset in json.loads(capsys.readouterr().out)["presets"]:
        assert set(preset) == {"name", "strategy", "what", "loss"}
        assert Strategy.parse(preset["name"]) == Strategy.parse(preset["strategy"])
