"""A third-party compressor with settings of every kind and a second wrapper: all spellings hold for them too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.compression import COMPRESSORS, Compressor, ErrorFeedback, Wrapper
from laconic.errors import IllegalCombination
from laconic.settings import choice, count, duration, flag, number, share, size
from laconic.strategy import Strategy
from tests.strategy.generate import settings_of


@dataclass(frozen=True, kw_only=True)
class Everything(Compressor):
    """One setting of each kind."""

    name: ClassVar[str] = "test_everything"
    period: int = count(4, at_least=1)
    bytes: int = size(1024)
    rate: float = number(0.5, above=0)
    free: float = number(0)
    density: float = share(0.01)
    wait_s: float = duration(0.005)
    nesterov: bool = flag(False)
    mode: str = choice("ring", "tree", "torus2d")


@dataclass(frozen=True, kw_only=True)
class Warmup(Wrapper):
    """A wrapper with settings."""

    name: ClassVar[str] = "test_warmup"
    steps: int = count(100)
    start: float = share(0.25)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COMPRESSORS._methods, Everything.name, Everything)
        patch.setitem(COMPRESSORS._methods, Warmup.name, Warmup)
        yield


@settings(max_examples=150)
@given(settings_of(Everything), settings_of(Warmup), st.sampled_from(["none", "inside", "outside", "warmup only"]))
def test_canonical_text_and_toml_read_back(base: dict[str, object], wrapper: dict[str, object], feedback: str) -> None:
    compression: Compressor = Everything(**base)  # type: ignore[arg-type]
    if feedback == "inside":
        compression = ErrorFeedback(compression)
    if feedback != "none":
        compression = Warmup(compression, **wrapper)  # type: ignore[arg-type]
    if feedback == "outside":
        compression = ErrorFeedback(compression)
    strategy = Strategy(compression=compression)
    text = str(strategy)
    assert Strategy.parse(text) == strategy
    assert str(Strategy.parse(text)) == text
    assert Strategy.from_toml(strategy.to_toml()) == strategy


def test_wrappers_apply_from_left_to_right() -> None:
    inside = Warmup(ErrorFeedback(Everything()), steps=3)
    outside = ErrorFeedback(Warmup(Everything(), steps=3))
    assert str(inside) == "test_everything + error_feedback + test_warmup(steps=3)"
    assert str(outside) == "test_everything + test_warmup(steps=3) + error_feedback"
    for compression in (inside, outside):
        strategy = Strategy(compression=compression)
        assert Strategy.parse(f"bsp / all_reduce / {compression}") == strategy
        assert Strategy.from_toml(strategy.to_toml()) == strategy
    table = {"name": "test_everything", "with": ["error_feedback", {"name": "test_warmup", "steps": 3}]}
    assert Strategy.from_table({"compression": table}) == Strategy(compression=inside)


def test_positional_values_go_to_the_settings_in_order() -> None:
    text = "bsp / all_reduce / test_everything(8, 2KiB, 1e-3, density=5%, wait_s=1e-07s) + test_warmup(10, 50%)"
    expected = Warmup(Everything(period=8, bytes=2048, rate=0.001, density=0.05, wait_s=1e-7), steps=10, start=0.5)
    assert Strategy.parse(text) == Strategy(compression=expected)


def test_the_second_wrapper_of_a_kind_is_found_among_others() -> None:
    with pytest.raises(IllegalCombination) as caught:
        Strategy.parse("bsp / all_reduce / test_everything + error_feedback + test_warmup(7) + error_feedback")
    assert str(caught.value) == (
        "compression: error_feedback is applied twice in "
        '"test_everything + error_feedback + test_warmup(steps=7) + error_feedback". Nearest that works: '
        '"bsp / all_reduce / test_everything + test_warmup(steps=7) + error_feedback / fusion".'
    )
