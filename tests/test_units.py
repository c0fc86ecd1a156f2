"""Quantities: what is written is read back exactly, and a wrong unit is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.errors import InvalidSetting
from laconic.units import (
    Dimension,
    format_rate,
    format_size,
    format_time,
    human_bytes,
    human_factor,
    human_seconds,
    parse_quantity,
)


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("25MiB", "size", 25 * 1024**2),
        ("25 MiB", "size", 25 * 1024**2),
        ("  1.5KiB ", "size", 1536),
        ("1GiB", "size", 1024**3),
        ("1kB", "size", 1000),
        ("3MB", "size", 3e6),
        ("2gb", "size", 2e9),
        ("7", "size", 7),
        ("7b", "size", 7),
        ("26_214_400", "size", 26214400),
        ("1e3", "size", 1000),
        ("5ms", "time", 0.005),
        ("0.3ms", "time", 0.0003),
        ("7us", "time", 7e-6),
        ("9ns", "time", 9e-9),
        (".5s", "time", 0.5),
        ("2min", "time", 120),
        ("1.5h", "time", 5400),
        ("1e-07s", "time", 1e-7),
        ("100mbit", "rate", 1e8),
        ("100 Mbit/s", "rate", 1e8),
        ("100Mbps", "rate", 1e8),
        ("9600bps", "rate", 9600),
        ("10gbit", "rate", 1e10),
        ("1tbit", "rate", 1e12),
        ("12", "rate", 12),
        ("1%", "share", 0.01),
        ("0.1%", "share", 0.001),
        ("0.25", "share", 0.25),
        ("-3", "number", -3),
        ("+4.5e+2", "number", 450),
    ],
)
def test_reads(text: str, dimension: Dimension, value: float) -> None:
    assert parse_quantity(text, dimension, "here") == value


@pytest.mark.parametrize(
    ("text", "dimension"),
    [
        ("5ms", "size"),
        ("25MiB", "time"),
        ("25MiB", "rate"),
        ("100mbit", "size"),
        ("1%", "size"),
        ("1%", "number"),
        ("5ms", "share"),
        ("5s", "number"),
        # "/s" and "bps" belong to rates: a size per second is not a size.
        ("25MiB/s", "size"),
        ("5ms/s", "time"),
        ("1%/s", "share"),
        ("3/s", "number"),
        ("8bps", "size"),
        ("", "size"),
        ("MiB", "size"),
        ("fast", "rate"),
        ("5 parsecs", "time"),
        ("1,5s", "time"),
        ("1.2.3", "number"),
        ("--5", "number"),
        ("0x10", "size"),
        ("_1", "number"),
        ("five\nms", "time"),
    ],
)
def test_refuses_and_says_what_is_allowed(text: str, dimension: Dimension) -> None:
    with pytest.raises(InvalidSetting) as caught:
        parse_quantity(text, dimension, "axis.method.key")
    message = str(caught.value)
    assert "\n" not in message
    example = {"size": "25MiB", "time": "5ms", "rate": "100mbit", "share": "1%", "number": "a number"}[dimension]
    assert message.startswith(f"axis.method.key must be a {dimension if dimension != 'number' else 'number'}")
    assert example in message


@pytest.mark.parametrize("text", ["1e999", "-1e999", "9" * 400, "1e308GiB", "9e307h"])
def test_refuses_what_overflows(text: str) -> None:
    dimension: Dimension = "time" if text.endswith("h") else "size"
    with pytest.raises(InvalidSetting, match=r"here must be finite, got \"") as caught:
        parse_quantity(text, dimension, "here")
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize("text", ["inf", "nan", "-inf", "Infinity", "NaN"])
@pytest.mark.parametrize("dimension", ["size", "time", "rate", "share", "number"])
def test_refuses_words_for_infinity(text: str, dimension: Dimension) -> None:
    with pytest.raises(InvalidSetting):
        parse_quantity(text, dimension, "here")


@given(st.integers(min_value=0, max_value=2**53))
def test_size_round_trip(num_bytes: int) -> None:
    assert parse_quantity(format_size(num_bytes), "size", "here") == num_bytes


@given(st.integers(min_value=1, max_value=4096), st.sampled_from([1024, 1024**2, 1024**3]))
def test_size_uses_the_largest_exact_unit(count: int, unit: int) -> None:
    text = format_size(count * unit)
    assert text.endswith("iB")
    assert len(text) <= len(str(count)) + 3
    assert parse_quantity(text, "size", "here") == count * unit


@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False))
def test_time_round_trip(seconds: float) -> None:
    assert parse_quantity(format_time(seconds), "time", "here") == seconds


@given(st.integers(min_value=1, max_value=999_999), st.sampled_from([1_000, 1_000_000]))
def test_time_of_whole_milliseconds_and_microseconds_is_short(count: int, per_second: int) -> None:
    text = format_time(count / per_second)
    assert parse_quantity(text, "time", "here") == count / per_second
    assert len(text) <= len(str(count)) + 3


@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False))
def test_rate_round_trip(rate: float) -> None:
    assert parse_quantity(format_rate(rate), "rate", "here") == rate


@given(st.integers(min_value=0, max_value=2**53))
def test_rate_round_trip_of_whole_numbers(rate: int) -> None:
    assert parse_quantity(format_rate(rate), "rate", "here") == rate


@given(st.text(max_size=40), st.sampled_from(["size", "time", "rate", "share", "number"]))
def test_any_text_is_a_finite_number_or_an_invalid_setting(text: str, dimension: Dimension) -> None:
    _check_finite_or_refused(text, dimension)


@given(
    st.from_regex(r"[+-]?[0-9][0-9_]{0,30}(\.[0-9]{0,20})?(e[+-]?[0-9]{1,4})? ?[a-zA-Z%/]{0,4}", fullmatch=True),
    st.sampled_from(["size", "time", "rate", "share", "number"]),
)
def test_anything_like_a_quantity_is_a_finite_number_or_an_invalid_setting(text: str, dimension: Dimension) -> None:
    _check_finite_or_refused(text, dimension)


def _check_finite_or_refused(text: str, dimension: Dimension) -> None:
    try:
        value, refusal = parse_quantity(text, dimension, "here"), ""
    except InvalidSetting as error:
        value, refusal = 0.0, str(error)
    assert math.isfinite(value)
    assert len(refusal.splitlines()) <= 1


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (20_000_000, "19.1 MiB"), (3 * 1024**3, "3.0 GiB")],
)
def test_human_bytes(num_bytes: float, text: str) -> None:
    assert human_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 ns"), (5e-8, "50 ns"), (2.5e-6, "2.5 us"), (0.0123, "12.3 ms"), (75.25, "75.2 s")]
)
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [
        (1.4321, 3, "1.43"),
        (204.4, 3, "204"),
        (204.4, 2, "200"),
        (2036.0, 3, "2,040"),
        (1e6, 2, "1,000,000"),
        (0.5, 2, "0.5"),
    ],
)
def test_human_factor(number: float, digits: int, text: str) -> None:
    assert human_factor(number, digits) == text
