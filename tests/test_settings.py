"""Settings: every kind, its bounds, its errors, and the texts made from the one declaration."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.errors import InvalidSetting, UnknownName
from laconic.settings import Method, Setting, choice, count, duration, flag, method, number, pattern, share, size


@dataclass(frozen=True, kw_only=True)
class Everything(Method):
    """One setting of each kind.

    Nothing else.
    """

    axis: ClassVar[str] = "test"
    name: ClassVar[str] = "everything"
    period: int = count(4, at_least=1, at_most=1000, advice='To do it every step use "bsp".')
    """How often
    it happens."""
    seed: int = count(0)
    bytes: int = size(25 * 1024**2)
    """How much."""
    rate: float = number(0.5, above=0, at_most=2)
    """How fast."""
    free: float = number(0)
    """Any number."""
    density: float = share(0.01)
    """Which part."""
    wait_s: float = duration(0.005)
    """How long."""
    nesterov: bool = flag(False)
    """Whether."""
    mode: str = choice("ring", "tree", "torus2d")
    """Which way."""
    skip: str = pattern("*.bias")
    """Which not."""


def test_defaults_are_valid_and_print_as_the_bare_name() -> None:
    assert str(Everything()) == "everything"
    assert Everything().changed_settings() == {}
    assert Everything().settings() == {
        "period": 4,
        "seed": 0,
        "bytes": 25 * 1024**2,
        "rate": 0.5,
        "free": 0,
        "density": 0.01,
        "wait_s": 0.005,
        "nesterov": False,
        "mode": "ring",
        "skip": "*.bias",
    }


@pytest.mark.parametrize(
    ("key", "raw", "value"),
    [
        ("period", "12", 12),
        ("period", 12, 12),
        ("period", 12.0, 12),
        ("period", "1e2", 100),
        ("period", "1_000", 1000),
        ("seed", "9007199254740993", 2**53 + 1),
        ("seed", 2**53 + 1, 2**53 + 1),
        ("bytes", "1MiB", 1024**2),
        ("bytes", "1.5KiB", 1536),
        ("bytes", 77, 77),
        ("rate", "2", 2.0),
        ("rate", 1, 1.0),
        ("rate", "1e-3", 0.001),
        ("free", "-7.25", -7.25),
        ("density", "1%", 0.01),
        ("density", "0.5", 0.5),
        ("density", 1, 1.0),
        ("wait_s", "5ms", 0.005),
        ("wait_s", 2, 2.0),
        ("wait_s", "0", 0.0),
        ("nesterov", "true", True),
        ("nesterov", " False ", False),
        ("nesterov", True, True),
        ("mode", "tree", "tree"),
        ("mode", " torus2d ", "torus2d"),
        ("skip", " *.weight ", "*.weight"),
        ("skip", '"*.weight|norm[0-9]?"', "*.weight|norm[0-9]?"),
        ("skip", "", ""),
    ],
)
def test_build_reads(key: str, raw: object, value: object) -> None:
    built = Everything.build({key: raw})
    assert getattr(built, key) == value
    assert type(getattr(built, key)) is type(value)


_INFINITE = [math.inf, -math.inf, math.nan]


@pytest.mark.parametrize(
    ("key", "raw", "allowed"),
    [
        ("period", "0", "a whole number >= 1 and <= 1000"),
        ("period", 1001, "a whole number >= 1 and <= 1000"),
        ("period", 1.5, "a whole number"),
        ("period", "1.5", "a whole number"),
        ("period", True, "a whole number"),
        ("period", [4], "a whole number"),
        ("period", None, "a whole number"),
        ("period", "often", "a number"),
        ("period", "4ms", "a number"),
        *(("period", value, "a whole number") for value in _INFINITE),
        ("bytes", 0, "a size >= 1B"),
        ("bytes", "-1", "a size >= 1B"),
        ("bytes", 2**60, "a size >= 1B and <= "),
        ("bytes", "0.5", "a size"),
        ("bytes", "5ms", "a size such as 25MiB"),
        ("bytes", False, "a size"),
        ("bytes", datetime.date(1979, 5, 27), "a size"),
        *(("bytes", value, "a size") for value in _INFINITE),
        ("rate", 0, "a number > 0 and <= 2"),
        ("rate", 2.0001, "a number > 0 and <= 2"),
        ("rate", "1%", "a number"),
        ("rate", True, "a number"),
        *(("rate", value, "a number") for value in _INFINITE),
        ("rate", 10**400, "a number"),
        ("free", 10**400, "a number"),
        *(("free", value, "a number") for value in _INFINITE),
        ("density", 0, "a number > 0 and <= 1"),
        ("density", "101%", "a number > 0 and <= 1"),
        ("density", "1ms", "a number"),
        *(("density", value, "a number") for value in _INFINITE),
        ("wait_s", -1, "a time >= 0s"),
        ("wait_s", "1MiB", "a time such as 5ms"),
        *(("wait_s", value, "a time") for value in _INFINITE),
        ("nesterov", "yes", "true or false"),
        ("nesterov", 1, "true or false"),
        ("nesterov", {}, "true or false"),
        ("mode", "rings", 'Did you mean "ring"? Known: ring, tree, torus2d'),
        ("mode", "", "Known: ring, tree, torus2d"),
        ("mode", 3, "Known: ring, tree, torus2d"),
        ("mode", ["ring"], "ring or tree or torus2d"),
        ("skip", "a b", "names with * and ?, separated by |, got"),
        ("skip", 'a"b', "names with * and ?"),
        ("skip", "x" * 501, "names with * and ?"),
        ("skip", 3, "names with * and ?"),
        ("skip", ["a"], "names with * and ?"),
    ],
)
def test_build_refuses_on_one_line_and_says_what_is_allowed(key: str, raw: object, allowed: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        Everything.build({key: raw})
    message = str(caught.value)
    assert message.startswith(f"test.everything.{key} ")
    assert allowed in message
    assert "\n" not in message
    assert len(message) < 250


@pytest.mark.parametrize("key", ["period", "bytes", "rate", "free", "density", "wait_s", "nesterov", "mode"])
@pytest.mark.parametrize("sign", [1, -1])
def test_build_refuses_integers_python_does_not_print(key: str, sign: int) -> None:
    # More than 4300 digits; TOML can hold one in hexadecimal.
    with pytest.raises(InvalidSetting) as caught:
        Everything.build({key: sign * 16**5000})
    assert str(caught.value).startswith(f"test.everything.{key} ")
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("make", "allowed"),
    [
        (lambda: Everything(period=0), "a whole number >= 1"),
        (lambda: Everything(period=4.0), "a whole number"),  # type: ignore[arg-type]
        (lambda: Everything(period="4"), "a whole number"),  # type: ignore[arg-type]
        (lambda: Everything(bytes=True), "a size"),
        (lambda: Everything(rate=math.nan), "a number"),
        (lambda: Everything(wait_s=math.inf), "a time"),
        (lambda: Everything(density=1.5), "a number > 0 and <= 1"),
        (lambda: Everything(nesterov=0), "true or false"),  # type: ignore[arg-type]
        (lambda: Everything(mode="star"), "Known: ring, tree, torus2d"),
        (lambda: Everything(free=10**400), "a number"),
    ],
)
def test_objects_are_checked_like_text(make: Callable[[], Method], allowed: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        make()
    assert allowed in str(caught.value)
    assert "\n" not in str(caught.value)


def test_range_error_shows_the_value_as_it_is_written_and_the_advice() -> None:
    with pytest.raises(InvalidSetting) as caught:
        Everything.build({"period": 0})
    assert str(caught.value) == (
        'test.everything.period must be a whole number >= 1 and <= 1000, got 0. To do it every step use "bsp".'
    )
    with pytest.raises(InvalidSetting, match=r"period must be a whole number >= 1 and <= 1000, got 2000\."):
        Everything.build({"period": "2e3"})
    with pytest.raises(InvalidSetting, match=r"wait_s must be a time >= 0s, got -250ms\."):
        Everything.build({"wait_s": "-0.25s"})


def test_a_flag_given_for_a_size_is_shown_as_a_flag() -> None:
    with pytest.raises(InvalidSetting, match=r"got (true|True)\."):
        Everything.build({"bytes": True})
    with pytest.raises(InvalidSetting, match=r"got (true|True)\."):
        Everything.build({"wait_s": True})


def test_a_setting_that_is_a_method() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Outer(Method):
        axis: ClassVar[str] = "test"
        name: ClassVar[str] = "outer"
        inner: Method = method(Everything(period=8), wants=Everything)

    assert str(Outer()) == "outer"
    assert str(Outer(inner=Everything(skip=""))) == 'outer(inner=everything(skip=""))'
    assert Outer.build({"inner": Everything()}) == Outer(inner=Everything())
    assert hash(Outer()) == hash(Outer(inner=Everything(period=8)))
    for wrong in ("everything", {"name": "everything"}, None, Everything):
        with pytest.raises(InvalidSetting, match=r"test\.outer\.inner must be a method") as caught:
            Outer.build({"inner": wrong})
        assert "\n" not in str(caught.value)
    with pytest.raises(InvalidSetting, match=r"test\.outer\.inner must be a method"):
        Outer(inner=3)  # type: ignore[arg-type]


def test_unknown_setting_offers_the_nearest_and_all() -> None:
    with pytest.raises(UnknownName) as caught:
        Everything.build({"perod": 3})
    message = str(caught.value)
    assert message.startswith("test.everything.perod: everything has no such setting.")
    assert 'Did you mean "period"?' in message
    assert "Known: period, seed, bytes, rate, free, density, wait_s, nesterov, mode, skip." in message
    with pytest.raises(UnknownName, match=r"Known: ") as far:
        Everything.build({"zzz\nqqq": 3})
    assert "Did you mean" not in str(far.value)
    assert "\n" not in str(far.value)


def test_summary_and_setting_help() -> None:
    assert Everything.summary() == "One setting of each kind."
    assert Everything.setting_help() == {
        "period": "How often it happens.",
        "seed": "",
        "bytes": "How much.",
        "rate": "How fast.",
        "free": "Any number.",
        "density": "Which part.",
        "wait_s": "How long.",
        "nesterov": "Whether.",
        "mode": "Which way.",
        "skip": "Which not.",
    }


def test_setting_help_of_a_derived_method_has_what_it_inherits() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Derived(Everything):
        """More."""

        extra: int = count(0)
        """One more."""
        rate: float = number(0.25, above=0)
        """Slower."""

    derived = Derived.setting_help()
    assert derived["extra"] == "One more."
    assert derived["rate"] == "Slower."
    assert derived["density"] == "Which part."


def test_setting_help_without_source_is_empty() -> None:
    # A method typed into an interpreter has no source file; `laconic explain` must still work.
    space: dict[str, object] = {"Method": Method, "dataclass": dataclass, "count": count}
    exec("@dataclass(frozen=True, kw_only=True)\nclass Typed(Method):\n    k: int = count(1)\n    'Help.'\n", space)
    typed = space["Typed"]
    assert isinstance(typed, type)
    assert issubclass(typed, Method)
    assert typed.setting_help() == {"k": ""}


def test_call_text_has_only_what_differs() -> None:
    method = Everything(period=8, bytes=1024, density=0.5, wait_s=0.25, nesterov=True, mode="tree", rate=1e-6)
    assert str(method) == (
        "everything(period=8, bytes=1KiB, rate=1e-06, density=0.5, wait_s=250ms, nesterov=true, mode=tree)"
    )


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "period": st.integers(1, 1000),
        "seed": st.integers(0, 10**30),
        "bytes": st.integers(1, int(Everything.declared()["bytes"].at_most or 0)),
        "rate": st.floats(0, 2, exclude_min=True),
        "free": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53),
        "density": st.floats(0, 1, exclude_min=True),
        "wait_s": st.floats(0, 1e308),
        "nesterov": st.booleans(),
        "mode": st.sampled_from(["ring", "tree", "torus2d"]),
        "skip": st.text("ab.*?[]!|-_0é", max_size=20),
    },
)


@given(VALUES)
def test_changed_settings_read_back(values: dict[str, object]) -> None:
    method = Everything(**values)  # type: ignore[arg-type]
    assert Everything.build(method.changed_settings()) == method
    assert Everything.build(method.settings()) == method


@given(
    st.sampled_from(["count", "number", "share", "size", "duration", "flag", "choice", "pattern", "hosts", "method"]),
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.lists(st.integers(), max_size=2)
    | st.dates(),
)
def test_reading_anything_gives_a_valid_value_or_an_invalid_setting(kind: str, raw: object) -> None:
    setting = Setting(kind=kind, at_least=0, choices=("a", "b"))  # type: ignore[arg-type]
    try:
        value = setting.read(raw, "here")
        setting.check(value, "here")
    except InvalidSetting as error:
        refusal = str(error)
    else:
        refusal = ""
        assert setting.read(setting.show(value), "here") == value
    assert len(refusal.splitlines()) <= 1


@pytest.mark.parametrize("port", ["0", "65536", "99999", "00000"])
def test_hosts_have_ports_that_exist(port: str) -> None:
    with pytest.raises(InvalidSetting, match=f'here must have ports from 1 to 65535, got "a:{port}"'):
        Setting(kind="hosts").check(f"b:1|a:{port}", "here")


@pytest.mark.parametrize("host", ["0", "0.0", "000.0.0.0", "0.0.0.0", "0x0"])
def test_hosts_are_single_hosts(host: str) -> None:
    with pytest.raises(InvalidSetting, match=f'here must name one host each, got "{host}:29600"'):
        Setting(kind="hosts").check(f"{host}:29600", "here")


def test_hosts_that_are_allowed() -> None:
    for text in ("", "10.0.0.5:29600", "a-b.example:1|localhost:65535", "10:5"):
        Setting(kind="hosts").check(text, "here")
