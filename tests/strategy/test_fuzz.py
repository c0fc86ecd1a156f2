"""Whatever is given as a strategy becomes one that reads back, or a LaconicError on one line. Nothing else."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import LaconicError
from laconic.strategy import AXES, PRESETS, Strategy
from tests.strategy.generate import WRAPPERS, bases, every_stack

VALID = every_stack()
NAMES = [method.name for registry in AXES.values() for method in registry]
KEYS = sorted({key for registry in AXES.values() for method in registry for key in method.declared()})
PIECES = [
    *NAMES,
    *KEYS,
    *PRESETS,
    *AXES,
    *["/", "+", "(", ")", ",", "=", " ", ".", "-", "_", "%", '"', "'", "\n", "\t", "#", "[", "]", "[[", "]]", "{", "}"],
    *["1", "0", "25MiB", "5ms", "1e-3", "1e999", "-1", "0x10", "inf", "nan", "true", "1_0", "1979-05-27", "7.", "1%"],
    *["strategy", "name", "with", "\\", "\x00", "\u2028", "é", "٣", "\ud800", "K"],
]


def accepts_or_refuses(read: Callable[[], Strategy]) -> None:
    try:
        strategy = read()
    except LaconicError as error:
        message = str(error)
        assert message.strip()
        assert len(message.splitlines()) == 1, repr(message)
        assert len(message) < 800, message
    else:
        assert Strategy.parse(str(strategy)) == strategy
        assert Strategy.from_toml(strategy.to_toml()) == strategy


def edits() -> st.SearchStrategy[list[tuple[int, int, str]]]:
    """Places to cut and what to put there; places are taken modulo the length of the text."""
    piece = st.sampled_from(PIECES) | st.text(max_size=3) | st.just("")
    return st.lists(st.tuples(st.integers(0, 500), st.integers(0, 6), piece), min_size=1, max_size=4)


def edited(text: str, changes: list[tuple[int, int, str]]) -> str:
    for place, length, piece in changes:
        start = place % (len(text) + 1)
        text = text[:start] + piece + text[start + length :]
    return text


@settings(max_examples=400)
@given(st.text() | st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_any_text(text: str) -> None:
    accepts_or_refuses(lambda: Strategy.parse(text))


@settings(max_examples=400)
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
def test_any_row_of_pieces(text: str) -> None:
    accepts_or_refuses(lambda: Strategy.parse(text))


@settings(max_examples=500)
@given(st.sampled_from(VALID), edits())
def test_damaged_text(strategy: Strategy, changes: list[tuple[int, int, str]]) -> None:
    text = edited(str(strategy), changes)
    accepts_or_refuses(lambda: Strategy.parse(text))


@settings(max_examples=300)
@given(st.text() | st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
def test_any_toml_text(text: str) -> None:
    accepts_or_refuses(lambda: Strategy.from_toml(text))


@settings(max_examples=400)
@given(st.sampled_from(VALID), edits())
def test_damaged_toml(strategy: Strategy, changes: list[tuple[int, int, str]]) -> None:
    text = edited(strategy.to_toml(), changes)
    accepts_or_refuses(lambda: Strategy.from_toml(text))


SCALARS = (
    st.sampled_from([*NAMES, *KEYS, *PRESETS, "fp16 + error_feedback", "fusion(1MiB)", "25MiB", "", "a / b"])
    | st.text(max_size=10)
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([math.inf, -math.inf, math.nan, 2**63, -(2**63), 10**400, 1e308, 0, 1, 1.5])
    | st.just(5000).map(lambda digits: 16**digits)  # Python prints no integer of more than 4300 digits
    | st.dates()
    | st.times()
    | st.datetimes(timezones=st.just(datetime.UTC))
)
TABLE_KEYS = st.sampled_from(["name", "with", "strategy", *AXES, *KEYS]) | st.text(max_size=6)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TABLE_KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=250)
@given(st.dictionaries(st.sampled_from(list(AXES)) | TABLE_KEYS, VALUES, max_size=3))
def test_any_table(table: dict[str, object]) -> None:
    accepts_or_refuses(lambda: Strategy.from_table(table))


def _method_tables(axis: str) -> st.SearchStrategy[dict[str, object]]:
    """Tables that come far: a method that exists, and anything as its settings and wrappers."""
    wrapper = st.sampled_from([method.name for method in WRAPPERS])
    return st.fixed_dictionaries(
        {"name": st.sampled_from([method.name for method in bases(axis)])},
        optional={
            **{key: VALUES for method in bases(axis) for key in method.declared()},
            "with": st.lists(wrapper | st.fixed_dictionaries({"name": wrapper}) | VALUES, max_size=2) | VALUES,
        },
    )


@pytest.mark.slow
@settings(max_examples=250)
@given(st.fixed_dictionaries({}, optional={axis: _method_tables(axis) for axis in AXES}))
def test_any_settings_of_real_methods(table: dict[str, object]) -> None:
    accepts_or_refuses(lambda: Strategy.from_table(table))
