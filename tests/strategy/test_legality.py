"""What cannot be combined is refused with a reason and a nearest choice that works."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import re

import pytest

from laconic.compression import Compressor, Diana, Ef21, ErrorFeedback, Fp16, MomentumCorrection, Wrapper
from laconic.errors import IllegalCombination, InvalidSetting
from laconic.strategy import AXES, Strategy, legality
from tests.strategy.generate import WRAPPERS, bases, is_legal


def test_every_rule_is_asked_once() -> None:
    modules = [importlib.import_module(f"laconic.strategy.legality.{module.name}") for module in _modules()]
    written = {
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_") and list(inspect.signature(function).parameters) == ["parts"]
    } - {legality.check_legal, legality.nearest_legal}
    assert len(legality.RULES) == len(set(legality.RULES))
    assert set(legality.RULES) == written


def _modules() -> list[pkgutil.ModuleInfo]:
    return list(pkgutil.iter_modules(legality.__path__))


@pytest.mark.parametrize(
    "text",
    ["fusion(bytes=512KiB)", "fusion(bytes=512KiB, first_bytes=511KiB)", "fusion(bytes=2MiB, first_bytes=2MiB)"],
)
def test_small_buckets_need_not_be_asked_for_twice(text: str) -> None:
    assert str(Strategy.parse(f"bsp / all_reduce / none / {text}").scheduling) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bsp / all_reduce / none / fusion(bytes=1KiB, first_bytes=1KiB)", "Give less than that, or leave it out."),
        ("bsp / all_reduce / none / fusion(bytes=1KiB, first_bytes=2KiB)", "Give less than that, or leave it out."),
        ("bsp / all_reduce / none / fusion(bytes=2MiB, first_bytes=3MiB)", "Give at most that, or leave it out."),
        ("local_sgd(period=1, post_local=5)", "Leave post_local out, or give a longer period."),
        ("diloco(period=1, seconds=5s)", "Leave seconds out, or give a longer period."),
    ],
)
def test_a_setting_without_effect_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidSetting, match="has no effect") as caught:
        Strategy.parse(text)
    assert str(caught.value).endswith(words)


def _up_to(length: int) -> list[tuple[type[Wrapper], ...]]:
    return [stack for count in range(length + 1) for stack in itertools.product(WRAPPERS, repeat=count)]


STACKS = [*((base, _up_to(2)) for base in bases("compression")), (Fp16, _up_to(3))]


def _stack(base: type[Compressor], wrappers: tuple[type[Wrapper], ...]) -> Compressor:
    method = base()
    for wrapper in wrappers:
        method = wrapper(method)
    return method


def _makes_sense(base: type[Compressor], wrappers: tuple[type[Wrapper], ...]) -> bool:
    """From the inside out: every wrapper once, on something it works on, residuals once and inside momentum once."""
    below: Compressor = base()
    for wrapper in wrappers:
        if wrapper in map(type, below.layers()) or not isinstance(below, wrapper.wraps):
            return False
        if wrapper.needs_loss and below.traits.lossless:
            return False
        if wrapper.needs_unbiased and not below.traits.unbiased:
            return False
        if wrapper.needs_scale and not below.traits.keeps_scale:
            return False
        if wrapper in (ErrorFeedback, Ef21) and (below.traits.keeps_residual or below.traits.accumulates):
            return False
        if wrapper in (ErrorFeedback, Ef21) and below.traits.amplifies:
            return False
        if wrapper in (Diana, Ef21) and below.traits.rounds_sums:
            return False
        if wrapper is MomentumCorrection and below.traits.accumulates:
            return False
        below = wrapper(below)
    return True


@pytest.mark.parametrize(("base", "stacks"), STACKS, ids=[f"{base.name}, {len(stacks)}" for base, stacks in STACKS])
def test_every_stack_is_legal_or_refused_with_a_legal_choice(
    base: type[Compressor], stacks: list[tuple[type[Wrapper], ...]]
) -> None:
    for wrappers in stacks:
        _check_stack(base, wrappers)


def _check_stack(base: type[Compressor], wrappers: tuple[type[Wrapper], ...]) -> None:
    compression = _stack(base, wrappers)
    text = f"bsp / all_reduce / {compression} / wfbp"
    if _makes_sense(base, wrappers):
        assert str(Strategy.parse(text)) == text
        return
    errors = []
    for spell in (
        lambda: Strategy(compression=compression, scheduling=AXES["scheduling"].lookup("wfbp")()),
        lambda: Strategy.parse(text),
        lambda: Strategy.from_table({"compression": str(compression), "scheduling": "wfbp"}),
    ):
        with pytest.raises(IllegalCombination) as caught:
            spell()
        errors.append(str(caught.value))
    assert len(set(errors)) == 1, f"{text}: the same refusal in every spelling"
    message = errors[0]
    assert "\n" not in message
    assert message.startswith("compression: ")
    nearest = re.search(r'Nearest that works: "(.+)"\.$', message)
    assert nearest is not None, message
    assert str(Strategy.parse(nearest[1])) == nearest[1], "the nearest choice must itself be legal and canonical"
    assert nearest[1].endswith("/ wfbp"), "the other axes stay as they were"


@pytest.mark.parametrize("base", bases("compression"))
def test_cannot_combine_says_exactly_which_wrappers_would_be_refused(base: type[Compressor]) -> None:
    for stack in (base(), *(stack for wrapper in WRAPPERS if is_legal(stack := wrapper(base())))):
        strategy = Strategy(compression=stack)
        refused = {line.split(":")[0].removeprefix("+ ") for line in strategy.cannot_combine()}
        for wrapper in WRAPPERS:
            try:
                Strategy(compression=wrapper(stack))
            except IllegalCombination:
                assert wrapper.name in refused
            else:
                assert wrapper.name not in refused


def test_a_mean_that_is_used_again_holds_no_residual() -> None:
    for compression, nearest in (("int4 + error_feedback", "int4"), ("topk + momentum_correction", "topk")):
        with pytest.raises(IllegalCombination, match="lag may apply a mean in several steps") as caught:
            Strategy.parse(f"lag / all_reduce / {compression} / wfbp")
        assert f'Nearest that works: "lag / all_reduce / {nearest} / wfbp".' in str(caught.value)


def test_differences_that_add_up_need_a_residual() -> None:
    for compression in ("int4", "bf16", "terngrad", "topk + ef21"):
        with pytest.raises(IllegalCombination, match="unless error_feedback sends it later") as caught:
            Strategy.parse(f"scaffold / all_reduce / {compression} / fusion")
        assert 'Nearest that works: "scaffold / all_reduce / none / fusion".' in str(caught.value)
    Strategy.parse("scaffold / all_reduce / int4 + error_feedback / fusion")


@pytest.mark.parametrize(
    ("compression", "reason", "nearest"),
    [
        (
            "powersgd + momentum_correction + error_feedback",
            "error_feedback outside momentum_correction would take earlier gradients, which are not lost, for a loss",
            "powersgd + error_feedback + momentum_correction",
        ),
        (
            "powersgd + warmup(steps=5) + momentum_correction + per_layer + error_feedback",
            "error_feedback outside momentum_correction",
            "powersgd + warmup(steps=5) + error_feedback + momentum_correction + per_layer",
        ),
        ("none + warmup", 'warmup has no effect on "none"', "none"),
        ("none + per_layer", 'per_layer has no effect on "none"', "none"),
        ("none + momentum_correction + error_feedback", "outside momentum_correction", "none + momentum_correction"),
    ],
)
def test_reasons(compression: str, reason: str, nearest: str) -> None:
    with pytest.raises(IllegalCombination) as caught:
        Strategy.parse(f"bsp / all_reduce / {compression} / wfbp")
    assert reason in str(caught.value)
    assert f'Nearest that works: "bsp / all_reduce / {nearest} / wfbp".' in str(caught.value)
