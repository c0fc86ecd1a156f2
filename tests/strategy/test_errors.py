"""Every way to write a strategy wrongly: the right class, one line, what was found and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.compression import Fp16
from laconic.errors import (
    IllegalCombination,
    InvalidSetting,
    LaconicError,
    StrategyError,
    SyntaxProblem,
    UnknownName,
)
from laconic.strategy import Strategy

EXAMPLE = "bsp / all_reduce / fp16 + error_feedback / fusion(bytes=25MiB)"


def check_message(error: LaconicError, *fragments: str) -> None:
    message = str(error)
    assert len(message.splitlines()) == 1, repr(message)
    assert len(message) < 500, message
    for fragment in fragments:
        assert fragment in message


def test_the_example_in_messages_is_valid() -> None:
    assert str(Strategy.parse(EXAMPLE))


@pytest.mark.parametrize(
    ("text", "kind", "fragments"),
    [
        ("", SyntaxProblem, ["character 1", "expected a method name, found the end", EXAMPLE]),
        ("   ", SyntaxProblem, ["found the end", EXAMPLE]),
        ("/", SyntaxProblem, ["character 1", "expected a method name, found '/'"]),
        ("bsp /", SyntaxProblem, ["character 6", "found the end"]),
        ("bsp // none", SyntaxProblem, ["character 6", "found '/'"]),
        ("bsp all_reduce", SyntaxProblem, ["character 5", "expected '/' or the end, found 'all_reduce'"]),
        ("bsp(", SyntaxProblem, ["character 5", "expected a setting, found the end"]),
        ("bsp)", SyntaxProblem, ["character 4", "found ')'"]),
        ("bsp / all_reduce / none / fusion(25MiB", SyntaxProblem, ["expected ',' or ')'"]),
        ("bsp / all_reduce / none / fusion(25MiB,)", SyntaxProblem, ["expected a setting, found ')'"]),
        ("bsp / all_reduce / none / fusion(bytes=)", SyntaxProblem, ["expected a value for 'bytes', found ')'"]),
        ("bsp / all_reduce / none / fusion(25 MiB)", SyntaxProblem, ["character 37", "expected ',' or ')'"]),
        ("bsp / all_reduce / none / fusion(bytes=1, 2)", SyntaxProblem, ["must come before named settings"]),
        ("bsp / all_reduce / none / fusion(bytes=1, bytes=2)", SyntaxProblem, ["'bytes' is set twice"]),
        ("bsp / all_reduce / fp16 +", SyntaxProblem, ["expected a method name, found the end"]),
        ("bsp / 7up", SyntaxProblem, ["character 7", "expected a method name, found '7up'"]),
        ("bsp; rm", SyntaxProblem, ["character 4", "unexpected ';'"]),
        ("bsp \x00", SyntaxProblem, ["character 5", r"unexpected '\x00'"]),
        ("bsp 'open", SyntaxProblem, ["character 5"]),
        (
            "bsp / all_reduce / none / fusion / more",
            SyntaxProblem,
            ["5 choices", "at most 4", "compression / scheduling"],
        ),
        ("x" * 3000, SyntaxProblem, ["at most 2000 characters, got 3000"]),
        ("bsp / all_reduce / error_feedback", SyntaxProblem, ["error_feedback wraps another method", "before the +"]),
        ("bsp / all_reduce / fp16 + bf16", SyntaxProblem, ["bf16 cannot follow a +", "Known wrappers: error_feedback"]),
        ("bsp + bsp", SyntaxProblem, ["bsp cannot follow a +", "Known wrappers: none"]),
        ("auto", UnknownName, ["only laconic.attach() takes it", "laconic plan"]),
        ("auto(max_loss_gap=1%)", UnknownName, ["only laconic.attach() takes it"]),
        ("ddq", UnknownName, ["neither a preset nor a synchronization", 'Did you mean "ddp"', "bsp"]),
        ("fp16", UnknownName, ["a method of compression", 'Write "bsp / all_reduce / fp16"', "ddp-fp16"]),
        ("bps / all_reduce", UnknownName, ['synchronization: there is no method "bps"', 'Did you mean "bsp"?']),
        (
            "bsp / allreduce",
            UnknownName,
            ['architecture: there is no method "allreduce"', 'Did you mean "all_reduce"?'],
        ),
        ("bsp / all_reduce / fp61", UnknownName, ['Did you mean "fp16"?', "Known: none, fp16, bf16"]),
        ("bsp / all_reduce / none / buckets", UnknownName, ['scheduling: there is no method "buckets"', "fusion"]),
        ("bsp / all_reduce / fp16 + error_feedbak", UnknownName, ['Did you mean "error_feedback"?']),
        ("ddp / all_reduce", SyntaxProblem, ['preset "ddp" cannot be combined', '"bsp / all_reduce / none / fusion"']),
        (
            "bsp / all_reduce / none / fusion(byte=1MiB)",
            UnknownName,
            ["scheduling.fusion.byte", 'Did you mean "bytes"?', "Known: bytes, first_bytes"],
        ),
        ("bsp(period=4)", UnknownName, ["synchronization.bsp.period", "Known: none"]),
        ("bsp(4)", InvalidSetting, ["synchronization.bsp takes 0 setting(s)", '"4" is one too many', "Known: none"]),
        (
            "bsp / all_reduce / none / fusion(1, 2, 3)",
            InvalidSetting,
            ["scheduling.fusion takes 2 setting(s)", '"3" is one too many', "Known: bytes, first_bytes"],
        ),
        (
            "bsp / all_reduce / none / fusion(1MiB, bytes=2MiB)",
            InvalidSetting,
            ["scheduling.fusion.bytes is set twice"],
        ),
        (
            "bsp / all_reduce / none / fusion(0)",
            InvalidSetting,
            ["scheduling.fusion.bytes must be a size >= 1B", "got 0B"],
        ),
        (
            "bsp / all_reduce / none / fusion(512KiB, first_bytes=800KiB)",
            InvalidSetting,
            ["scheduling.fusion.first_bytes=800KiB has no effect with bytes=512KiB", "Give less than that"],
        ),
        ("bsp / all_reduce / none / fusion(-5MiB)", InvalidSetting, ["must be a size >= 1B"]),
        ("bsp / all_reduce / none / fusion(5ms)", InvalidSetting, ["must be a size such as 25MiB", '"5ms"']),
        ("bsp / all_reduce / none / fusion(25MiB/s)", SyntaxProblem, ["expected ',' or ')'"]),
        ("bsp / all_reduce / none / fusion('25MiB/s')", InvalidSetting, ["must be a size such as 25MiB"]),
        ("bsp / all_reduce / none / fusion(1e999)", InvalidSetting, ["must be finite"]),
        ("bsp / all_reduce / none / fusion(1e300)", InvalidSetting, ["must be a size >= 1B and <= "]),
        ("bsp / all_reduce / none / fusion(big)", InvalidSetting, ["must be a size such as 25MiB", '"big"']),
        ("bsp / all_reduce(algorithm=rings)", InvalidSetting, ["architecture.all_reduce.algorithm", "Known: native"]),
        (
            "bsp / all_reduce / topk + chain(qsdg(levels=7))",
            UnknownName,
            ['no method "qsdg"', 'Did you mean "qsgd"?'],
        ),
        (
            "bsp / all_reduce / topk + chain(qsgd(level=7))",
            UnknownName,
            ["compression.qsgd.level", 'Did you mean "levels"?'],
        ),
        ("bsp / all_reduce / topk + chain(qsgd(levels=0))", InvalidSetting, ["compression.qsgd.levels must be"]),
        (
            "bsp / all_reduce / topk + chain(error_feedback)",
            SyntaxProblem,
            ["compression.chain.second: error_feedback wraps another method and cannot stand by itself"],
        ),
        ("bsp / all_reduce / topk + chain(first=int8)", UnknownName, ["compression.chain.first", "Known: second"]),
        ("bsp / all_reduce / topk + chain(int8, int4)", InvalidSetting, ["takes 1 setting", '"int4" is one too many']),
        ("bsp / all_reduce / topk + chain('int8 + x')", SyntaxProblem, ["must be one method by itself"]),
        ("bsp / all_reduce / topk + chain(int8(1, 2, 3, 4))", InvalidSetting, ["compression.int8 takes 3 setting(s)"]),
        ("bsp / all_reduce / topk + chain(chain(chain(chain(int8))))", SyntaxProblem, ["more than 3 methods inside"]),
        ("bsp / all_reduce / topk(int8(block=64))", InvalidSetting, ["compression.topk.density", '"int8(block=64)"']),
        (
            "bsp / all_reduce / fp16 + per_layer(skip='a b')",
            InvalidSetting,
            ["compression.per_layer.skip must be names with * and ?, separated by |, got 'a b'"],
        ),
        ("bsp / all_reduce / fp16 + per_layer(*.bias)", SyntaxProblem, ["unexpected '*'"]),
        (
            "bsp / all_reduce / none + error_feedback",
            IllegalCombination,
            ['has no effect on "none"', 'Nearest that works: "bsp / all_reduce / none / fusion"'],
        ),
        (
            "bsp / all_reduce / fp16 + error_feedback + error_feedback",
            IllegalCombination,
            ["applied twice", 'Nearest that works: "bsp / all_reduce / fp16 + error_feedback / fusion"'],
        ),
    ],
)
def test_text(text: str, kind: type[LaconicError], fragments: list[str]) -> None:
    with pytest.raises(LaconicError) as caught:
        Strategy.parse(text)
    assert type(caught.value) is kind, caught.value
    check_message(caught.value, *fragments)


@pytest.mark.parametrize(
    ("toml", "kind", "fragments"),
    [
        ("", SyntaxProblem, ["the table is empty", 'synchronization = "bsp"']),
        ("[strategy]", SyntaxProblem, ["the table is empty"]),
        ("= 3", SyntaxProblem, ["strategy TOML cannot be read", "line 1"]),
        ('synchronization = "bsp"\nsynchronization = "bsp"', SyntaxProblem, ["cannot be read"]),
        ("a = " + "[" * 3000, SyntaxProblem, ["cannot be read"]),
        ("a = 1979-13-45", SyntaxProblem, ["cannot be read"]),
        ("strategy = 3", SyntaxProblem, ["[strategy] must be a table, got 3"]),
        ('compresion = "fp16"', UnknownName, ['no axis "compresion"', 'Did you mean "compression"?', "scheduling"]),
        ("compression = 3", SyntaxProblem, ["compression must be text or a table with a name, got 3"]),
        ('compression = ["fp16"]', SyntaxProblem, ["compression must be text or a table"]),
        ("[compression]\nbytes = 3", SyntaxProblem, ['compression needs name = "..."', "got None"]),
        ("[compression]\nname = 3", SyntaxProblem, ['compression needs name = "..."', "got 3"]),
        ('compression = "fp16 / wfbp"', SyntaxProblem, ["must be one method"]),
        ('compression = ""', SyntaxProblem, ["expected a method name"]),
        ('[compression]\nname = "fp16"\nwith = "error_feedback"', SyntaxProblem, ["compression.with must be a list"]),
        ('[compression]\nname = "fp16"\nwith = [3]', SyntaxProblem, ["compression.with must be text or a table"]),
        ('[compression]\nname = "fp16"\nwith = ["a / b"]', SyntaxProblem, ["write one wrapper"]),
        ('[compression]\nname = "fp16"\nwith = ["a + b"]', SyntaxProblem, ["write one wrapper"]),
        ('[compression]\nname = "fp16"\nwith = ["bf16"]', SyntaxProblem, ["not a wrapper", "error_feedback"]),
        ('[compression]\nname = "fp16"\nwith = ["nothing"]', UnknownName, ['no method "nothing"']),
        ('[compression]\nname = "error_feedback"', SyntaxProblem, ["wraps another method"]),
        (
            '[compression]\nname = "fp16"\nwith = [{name = "error_feedback", with = ["error_feedback"]}]',
            SyntaxProblem,
            ["cannot be nested"],
        ),
        ('[compression]\nname = "fp16"\nwith = [{name = "error_feedback", beta = 1}]', UnknownName, [".beta"]),
        ('[compression]\nname = "fp16"\nbits = 4', UnknownName, ["compression.fp16.bits", "Known: "]),
        ('[scheduling]\nname = "fusion"\nwith = ["error_feedback"]', StrategyError, ["error_feedback"]),
        ('[scheduling]\nname = "fusion"\nbytes = 0', InvalidSetting, ["scheduling.fusion.bytes must be a size >= 1B"]),
        ('[scheduling]\nname = "fusion"\nbytes = true', InvalidSetting, ["must be a size"]),
        ('[scheduling]\nname = "fusion"\nbytes = 1.5', InvalidSetting, ["must be a size"]),
        ('[scheduling]\nname = "fusion"\nbytes = inf', InvalidSetting, ["must be a size"]),
        ('[scheduling]\nname = "fusion"\nbytes = nan', InvalidSetting, ["must be a size"]),
        ('[scheduling]\nname = "fusion"\nbytes = 1979-05-27', InvalidSetting, ["must be a size"]),
        ('[scheduling]\nname = "fusion"\nbytes = [1]', InvalidSetting, ["must be a size", "[1]"]),
        (f'[scheduling]\nname = "fusion"\nbytes = 0x{"f" * 5000}', InvalidSetting, ["must be a size"]),
        ("strategy.compression.name" + ".a" * 3000 + " = 1", SyntaxProblem, ['needs name = "..."']),
        ("strategy.compression" + ".a" * 3000 + " = 1", SyntaxProblem, ['needs name = "..."']),
        ("scheduling.name = 'fusion'\nscheduling.bytes" + ".a" * 3000 + " = 1", InvalidSetting, ["must be a size"]),
        ("compression.name = 'fp16'\ncompression.with" + ".a" * 3000 + " = 1", SyntaxProblem, ["must be a list"]),
        ('compression = "none + error_feedback"', IllegalCombination, ["Nearest that works"]),
        (
            '[compression]\nname = "topk"\nwith = [{name = "chain", second = 3}]',
            InvalidSetting,
            ["compression.chain.second must be a method, with its settings in brackets if need be, got 3"],
        ),
        (
            '[compression]\nname = "topk"\nwith = [{name = "chain", second = {block = 3}}]',
            SyntaxProblem,
            ['compression.chain.second needs name = "..."'],
        ),
        (
            '[compression]\nname = "topk"\nwith = [{name = "chain", second = {name = "int8", blok = 64}}]',
            UnknownName,
            ["compression.int8.blok", 'Did you mean "block"?'],
        ),
        (
            '[compression]\nname = "topk"\nwith = [{name = "chain", second = {name = "int8", with = ["x"]}}]',
            SyntaxProblem,
            ["compression.chain.second must be one method by itself"],
        ),
        ('[compression]\nname = "topk"\nwith = [{name = "chain", second = "int9"}]', UnknownName, ['"int8"']),
        # Nothing is ignored silently: an axis beside [strategy] would be.
        ('compression = "fp16"\n[strategy]\nscheduling = "wfbp"', SyntaxProblem, ["compression", "[strategy]"]),
    ],
)
def test_toml(toml: str, kind: type[LaconicError], fragments: list[str]) -> None:
    with pytest.raises(LaconicError) as caught:
        Strategy.from_toml(toml)
    assert isinstance(caught.value, kind), repr(caught.value)
    check_message(caught.value, *fragments)


@pytest.mark.parametrize("wrong", [None, 3, b"bsp", ["bsp"], Fp16()])
def test_what_is_no_text(wrong: object) -> None:
    with pytest.raises(SyntaxProblem, match="a strategy is text or a Strategy") as caught:
        Strategy.parse(wrong)  # type: ignore[arg-type]
    check_message(caught.value)


def test_objects_of_the_wrong_axis() -> None:
    with pytest.raises(StrategyError) as caught:
        Strategy(Fp16())  # type: ignore[arg-type]
    check_message(caught.value, "synchronization must be a Synchronization object", "Fp16")
    with pytest.raises(StrategyError) as text:
        Strategy("bsp")  # type: ignore[arg-type]
    check_message(text.value, "Strategy.parse()")
    with pytest.raises(StrategyError) as not_built:
        Strategy(compression=Fp16)  # type: ignore[arg-type]
    check_message(not_built.value, "compression must be a Compressor object")


def test_files(tmp_path: Path) -> None:
    with pytest.raises(StrategyError) as missing:
        Strategy.load(tmp_path / "none.toml")
    check_message(missing.value, "none.toml", "No such file")
    with pytest.raises(StrategyError) as folder:
        Strategy.load(tmp_path)
    check_message(folder.value, "directory")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SyntaxProblem) as not_text:
        Strategy.load(binary)
    check_message(not_text.value, "binary.toml", "not UTF-8")
