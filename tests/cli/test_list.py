"""`laconic list`: every registered name, in text and in JSON."""

from __future__ import annotations

import json

import pytest

from laconic.cli import main
from laconic.compression import Wrapper
from laconic.strategy import AXES, PRESETS, Strategy
from laconic.workload import workload


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["list", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [line.strip() for line in out.splitlines()]


def test_text_names_every_method_and_preset(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one line each, where the terminal is wide enough."""
    monkeypatch.setenv("COLUMNS", "200")
    lines = printed(capsys)
    for axis, registry in AXES.items():
        assert any(line.startswith(f"{axis}: ") for line in lines)
        for method in registry:
            mark = "+ " if issubclass(method, Wrapper) else ""
            about = method.good_for or method.summary()
            assert any(line.startswith(f"{mark}{method.name} ") and line.endswith(about) for line in lines)
    for name, (_, what) in PRESETS.items():
        assert any(line.split(maxsplit=1) == [name, what] for line in lines)


def test_families_are_listed_with_what_they_cost(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys)
    families = list(dict.fromkeys(method.family for method in AXES["compression"]))
    assert [line for line in lines if line in families] == families
    assert next(line for line in lines if line.startswith("fp16 ")).split()[1:3] == ["16", "-0.2%"]
    assert next(line for line in lines if line.startswith("topk ")).split()[2] == "+15.8%*"
    assert next(line for line in lines if line.startswith("none ")).split()[1:3] == ["32", "0"]
    assert "<=" in next(line for line in lines if line.startswith("threshold "))
    unmeasured = [
        kind.name
        for kind in AXES["compression"]
        if not issubclass(kind, Wrapper) and not kind().traits.lossless and kind().traits.loss_gap is None
    ]
    assert [line.split()[0] for line in lines if "not measured" in line] == sorted(
        unmeasured, key=AXES["compression"].names().index
    )


def test_every_compressor_says_what_it_is_good_for() -> None:
    for method in AXES["compression"]:
        assert method.family, method
        assert method.good_for, method
        assert len(method.good_for) < 80, "one line"


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_is_shown_with_every_setting(
    axis: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = printed(capsys, "--family", axis)
    whole = " ".join(" ".join(lines).split())
    for method in AXES[axis]:
        assert method.summary() in whole
        for key, setting in method.declared().items():
            default = setting.show(method.__dataclass_fields__[key].default)
            assert any(f"{line} ".startswith(f"{key}={default} ") for line in lines)
    if axis == "synchronization":
        assert "If left off: architecture parameter_server." in whole
        assert "If left off: compression dct_topk." in whole


@pytest.mark.parametrize(
    ("words", "found", "left_out"),
    [
        (("--family", "low-rank"), "powersgd", "topk"),
        (("momentum",), "momentum_correction", "fp16"),
        (("OUTLIERS",), "thc", "intsgd"),
        (("outer", "nesterov"), "diloco", "bsp"),
        (("--family", "sparsification", "density"), "topk", "threshold"),
    ],
)
def test_words_and_families_choose(
    words: tuple[str, ...], found: str, left_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["list", "--json", *words])
    document = json.loads(capsys.readouterr().out)
    names = [entry["name"] for methods in document["axes"].values() for entry in methods]
    assert found in names
    assert left_out not in names
    lines = printed(capsys, *words)
    assert any(line.startswith((f"{found} ", f"+ {found} ")) for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--family", "sparsificaton"), 'Did you mean "sparsification"?'),
        (("quaternion",), 'no method or preset matches "quaternion"'),
        (("--family", "low_rank", "bits"), "in the family low_rank"),
    ],
)
def test_what_is_not_there(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--family", "compression"], ["int8"]], ids=str)
@pytest.mark.parametrize("columns", ["40", "60", "80", "120"])
def test_text_fits_the_terminal(
    columns: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["list", *words]) == 0
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
                    "loss_deviation",
                },
            }
            common = {"name", "family", "summary", "good_for", "wrapper", "settings"}
            assert set(entry) == common | of_axis.get(axis, set())
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
    lines = printed(capsys, "--family", "compression")
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
