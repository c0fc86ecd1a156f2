"""What cannot be combined is refused with a reason and a nearest choice that works."""

from __future__ import annotations

import itertools
import re

import pytest

from laconic.compression import Compressor, Wrapper
from laconic.errors import IllegalCombination
from laconic.strategy import AXES, Strategy
from tests.strategy.generate import WRAPPERS, bases

STACKS = [
    (base, wrappers)
    for base in bases("compression")
    for length in range(4)
    for wrappers in itertools.product(WRAPPERS, repeat=length)
]


def _stack(base: type[Compressor], wrappers: tuple[type[Wrapper], ...]) -> Compressor:
    method = base()
    for wrapper in wrappers:
        method = wrapper(method)
    return method


@pytest.mark.parametrize(("base", "wrappers"), STACKS)
def test_every_stack_is_legal_or_refused_with_a_legal_choice(
    base: type[Compressor], wrappers: tuple[type[Wrapper], ...]
) -> None:
    compression = _stack(base, wrappers)
    text = f"bsp / all_reduce / {compression} / wfbp"
    sensible = len(set(wrappers)) == len(wrappers) and not (base.lossless and wrappers)
    if sensible:
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
    assert len(set(errors)) == 1, "the same refusal in every spelling"
    message = errors[0]
    assert "\n" not in message
    assert message.startswith("compression: ")
    nearest = re.search(r'Nearest that works: "(.+)"\.$', message)
    assert nearest is not None, message
    assert str(Strategy.parse(nearest[1])) == nearest[1], "the nearest choice must itself be legal and canonical"
    assert nearest[1].endswith("/ wfbp"), "the other axes stay as they were"


@pytest.mark.parametrize("base", bases("compression"))
def test_cannot_combine_says_exactly_which_wrappers_would_be_refused(base: type[Compressor]) -> None:
    for stack in (base(), *(wrapper(base()) for wrapper in WRAPPERS if not base.lossless)):
        strategy = Strategy(compression=stack)
        refused = {line.split(":")[0].removeprefix("+ ") for line in strategy.cannot_combine()}
        for wrapper in WRAPPERS:
            try:
                Strategy(compression=wrapper(stack))
            except IllegalCombination:
                assert wrapper.name in refused
            else:
                assert wrapper.name not in refused
