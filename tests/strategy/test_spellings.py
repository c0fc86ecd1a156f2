"""Three spellings, one object, one canonical text."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings

from laconic.architecture import AllReduce
from laconic.compression import (
    Bf16,
    Chain,
    Compressor,
    Dgc,
    ErrorFeedback,
    Fp16,
    Int4,
    Int8,
    NoCompression,
    OneBit,
    PerLayer,
    PowerSgd,
    Qsgd,
    TopK,
)
from laconic.errors import IllegalCombination, MethodError, UnknownName
from laconic.scheduling import Fusion, Sequential, Wfbp
from laconic.strategy import AXES, PRESETS, Strategy, as_strategy
from laconic.synchronization import SYNCHRONIZATIONS, Bsp, Synchronization
from tests.strategy.generate import strategies

MIB = 1024**2

SPELLINGS = [
    (
        "bsp / all_reduce / none / fusion",
        Strategy(),
        'synchronization = "bsp"',
        [
            "bsp",
            "ddp",
            "bsp/all_reduce",
            " bsp / all_reduce / none ",
            "bsp / all_reduce(native) / none / fusion(25MiB)",
        ],
    ),
    (
        "bsp / all_reduce / fp16 + error_feedback / fusion(bytes=4MiB, first_bytes=1KiB)",
        Strategy(Bsp(), AllReduce(algorithm="native"), ErrorFeedback(Fp16()), Fusion(bytes=4 * MIB, first_bytes=1024)),
        """
        [strategy]
        compression = { name = "fp16", with = ["error_feedback"] }
        [strategy.scheduling]
        name = "fusion"
        bytes = "4MiB"
        first_bytes = 1024
        """,
        [
            "bsp/all_reduce/fp16+error_feedback/fusion(4MiB,1KiB)",
            "bsp() / all_reduce() / fp16 + error_feedback() / fusion(4194304, first_bytes=1024)",
            "bsp / all_reduce / fp16 + error_feedback / fusion(first_bytes='1KiB', bytes=\"4MiB\")",
            "bsp / all_reduce / fp16 + error_feedback / fusion(4_194_304B, 1024)",
            "bsp\n/ all_reduce\t/ fp16\n+ error_feedback / fusion( bytes = 4096kib , first_bytes=1.0KiB )\n",
        ],
    ),
    (
        "bsp / all_reduce / bf16 / wfbp",
        Strategy(compression=Bf16(), scheduling=Wfbp()),
        'compression = "bf16"\nscheduling = "wfbp"',
        ["bsp / all_reduce / bf16 / wfbp"],
    ),
    (
        "bsp / all_reduce / bf16 + error_feedback / sequential",
        Strategy(compression=ErrorFeedback(Bf16()), scheduling=Sequential()),
        'compression = "bf16 + error_feedback"\nscheduling = { name = "sequential" }',
        ["bsp / all_reduce / bf16+error_feedback / sequential"],
    ),
    (
        "bsp / all_reduce / topk(density=0.05) + chain(second=qsgd(levels=15)) + error_feedback / fusion",
        Strategy(compression=ErrorFeedback(Chain(TopK(density=0.05), second=Qsgd(levels=15)))),
        """
        [compression]
        name = "topk"
        density = "5%"
        with = [{ name = "chain", second = { name = "qsgd", levels = 15 } }, "error_feedback"]
        """,
        [
            "bsp / all_reduce / topk(5%) + chain(qsgd(levels=15)) + error_feedback",
            "bsp / all_reduce / topk(5%) + chain(second = qsgd( levels = 15 )) + error_feedback()",
            "bsp / all_reduce / topk(5%) + chain('qsgd(levels=15)') + error_feedback",
        ],
    ),
    (
        "bsp / all_reduce / topk + chain(second=int4) / fusion",
        Strategy(compression=Chain(TopK(), second=Int4())),
        'compression = { name = "topk", with = ["chain(int4)"] }',
        ["bsp / all_reduce / topk + chain(int4)", "bsp / all_reduce / topk + chain(second=int4())"],
    ),
    (
        'bsp / all_reduce / fp16 + per_layer(skip="*.bias|0.[ab]?-*", min_numel=64) / fusion',
        Strategy(compression=PerLayer(Fp16(), skip="*.bias|0.[ab]?-*", min_numel=64)),
        """
        compression = { name = "fp16", with = [{ name = "per_layer", skip = "*.bias|0.[ab]?-*", min_numel = 64 }] }
        """,
        ["bsp / all_reduce / fp16 + per_layer('*.bias|0.[ab]?-*', 64)"],
    ),
]


@pytest.mark.parametrize(("canonical", "built", "toml", "texts"), SPELLINGS)
def test_all_spellings_give_the_same_object_and_text(
    canonical: str, built: Strategy, toml: str, texts: list[str]
) -> None:
    assert str(built) == canonical
    for text in [canonical, *texts]:
        parsed = Strategy.parse(text)
        assert parsed == built
        assert str(parsed) == canonical
        assert hash(parsed) == hash(built)
    assert Strategy.from_toml(toml) == built
    assert Strategy.from_toml(built.to_toml()) == built
    document = tomllib.loads(toml)
    assert Strategy.from_table(document.get("strategy", document)) == built


@settings(max_examples=150)
@given(strategies())
def test_canonical_text_and_toml_read_back(strategy: Strategy) -> None:
    text = str(strategy)
    assert "\n" not in text
    assert Strategy.parse(text) == strategy
    assert str(Strategy.parse(text)) == text
    toml = strategy.to_toml()
    assert Strategy.from_toml(toml) == strategy
    assert str(Strategy.from_toml(toml)) == text
    assert Strategy.from_table(tomllib.loads(toml)["strategy"]) == strategy


@settings(max_examples=100)
@given(strategies())
def test_toml_names_every_setting(strategy: Strategy) -> None:
    table = tomllib.loads(strategy.to_toml())["strategy"]
    assert list(table) == list(AXES)
    for axis, entry in table.items():
        method = getattr(strategy, axis)
        layers = list(method.layers()) if isinstance(method, Compressor) else [method]
        written = [*reversed(entry.pop("with", [])), entry]
        assert [part.pop("name") for part in written] == [layer.name for layer in layers]
        assert [list(part) for part in written] == [list(layer.declared()) for layer in layers]


def test_parts_left_off_take_the_defaults() -> None:
    assert Strategy.parse("bsp") == Strategy(Bsp(), AllReduce(), NoCompression(), Fusion())
    assert str(Strategy.parse("bsp / all_reduce / bf16")) == "bsp / all_reduce / bf16 / fusion"
    assert Strategy.from_toml('scheduling = "wfbp"') == Strategy(scheduling=Wfbp())


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    text, meaning = PRESETS[name]
    assert Strategy.parse(name) == Strategy.parse(text)
    assert Strategy.parse(f"  {name}\n") == Strategy.parse(text)
    assert str(Strategy.parse(name)) == text, "a preset is written in canonical text"
    assert meaning


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_with_the_name_of_a_method(name: str) -> None:
    """Is that method alone; with another axis' name it may add something, but only if it is spelled as the method."""
    for axis, registry in AXES.items():
        for method in registry:
            if _bare(method.name) != _bare(name):
                continue
            is_alone = Strategy.parse(name) == Strategy.from_table({axis: method.name})
            assert is_alone or (axis != "synchronization" and method.name == name), (
                f'the preset "{name}" adds something to the {axis} "{method.name}"'
            )


def _bare(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def test_no_two_presets_differ_by_a_hyphen() -> None:
    assert len(set(map(_bare, PRESETS))) == len(PRESETS)


@pytest.mark.parametrize("rule", list(SYNCHRONIZATIONS))
def test_a_rule_by_itself_is_a_strategy(rule: type[Synchronization]) -> None:
    """With the partners that it declares, and the general defaults."""
    usual = {"architecture": "all_reduce", "compression": "none", "scheduling": "fusion"}
    assert set(rule.partners) <= set(usual)
    written = " / ".join([rule.name, *(usual | dict(rule.partners)).values()])
    assert str(Strategy.parse(rule.name)) == written


@pytest.mark.parametrize(
    ("written", "texts", "toml"),
    [
        ("demo / all_reduce / dct_topk / fusion", ["demo", "demo / all_reduce"], 'synchronization = "demo"'),
        ("demo(beta=0.5) / all_reduce / topk / fusion", ["demo(beta=0.5) / all_reduce / topk"], None),
        ("dion / all_reduce / powersgd / fusion", ["dion", "dion / all_reduce"], 'synchronization = "dion"'),
        ("demo / parameter_server / dct_topk / fusion", ["demo / parameter_server"], None),
        (
            "demo / all_reduce / dct_topk / wfbp",
            ["demo / all_reduce / dct_topk / wfbp"],
            'synchronization = "demo"\nscheduling = "wfbp"',
        ),
        (
            "ssp / parameter_server / none / fusion",
            ["ssp", "ssp / parameter_server"],
            '[synchronization]\nname = "ssp"',
        ),
        (
            "asp / gossip / none / fusion",
            ["asp / gossip", "ad-psgd"],
            'synchronization = "asp"\narchitecture = "gossip"',
        ),
        ("asp / parameter_server / none / fusion", ["asp", "downpour"], 'synchronization = "asp"'),
        (
            "asp / parameter_server / int8 / fusion",
            ["asp / parameter_server / int8"],
            'synchronization = "asp"\ncompression = "int8"',
        ),
    ],
)
def test_parts_left_off_are_the_partners_of_the_rule(written: str, texts: list[str], toml: str | None) -> None:
    assert [str(Strategy.parse(text)) for text in texts] == [written] * len(texts)
    if toml is not None:
        assert str(Strategy.from_toml(toml)) == written


def test_a_part_that_is_given_is_never_replaced_by_a_partner() -> None:
    with pytest.raises(IllegalCombination, match='"none" sends everything'):
        Strategy.parse("demo / all_reduce / none")
    with pytest.raises(IllegalCombination, match="does not wait for other workers"):
        Strategy.from_toml('synchronization = "ssp"\narchitecture = "all_reduce"')


@pytest.mark.parametrize("axis", ["compresion", "synchronization"])
def test_partners_of_an_unknown_axis_are_refused(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bsp, "partners", {axis: "bsp"})
    with pytest.raises(MethodError, match=f'bsp.partners names "{axis}"; it may name architecture, comp'):
        Strategy.parse("bsp / all_reduce")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "ef_signsgd",
            'a method of compression. Write "bsp / all_reduce / ef_signsgd", or take a preset that has it: sign-ef',
        ),
        ("priority", 'a method of scheduling. Write "bsp / all_reduce / none / priority", or take a preset'),
        ("push_sum", 'a method of architecture. Write "bsp / push_sum", or take a preset that has it: sgp.'),
        ("streaming-diloco", 'Did you mean "streaming'),
    ],
)
def test_a_name_that_is_no_strategy_says_what_to_write(name: str, words: str) -> None:
    with pytest.raises(UnknownName) as caught:
        Strategy.parse(name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("ddp", Strategy()),
        ("ddp-fp16", Strategy(compression=Fp16())),
        ("ddp-bf16", Strategy(compression=Bf16())),
        ("bsp-a2a", Strategy(scheduling=Sequential())),
        ("wfbp-a2a", Strategy(scheduling=Wfbp())),
        ("powersgd", Strategy(compression=ErrorFeedback(PowerSgd(rank=4)))),
        ("dgc", Strategy(compression=Dgc(density=0.001))),
        ("onebit", Strategy(compression=ErrorFeedback(OneBit()))),
        ("topk-int8-ef", Strategy(compression=ErrorFeedback(Chain(TopK(density=0.01), second=Int8())))),
    ],
)
def test_presets_mean_what_the_literature_calls_so(name: str, meaning: Strategy) -> None:
    assert Strategy.parse(name) == meaning


def test_load_reads_a_file(tmp_path: Path) -> None:
    file = tmp_path / "strategy.toml"
    file.write_text('# ours\n[strategy]\ncompression = "fp16"\n\n[lab]\nhosts = 4\n')
    assert Strategy.load(file) == Strategy(compression=Fp16())
    assert Strategy.load(str(file)) == Strategy(compression=Fp16())


def test_as_strategy() -> None:
    strategy = Strategy(scheduling=Wfbp())
    assert as_strategy(strategy) is strategy
    assert as_strategy("wfbp-a2a") == strategy
