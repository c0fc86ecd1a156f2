"""The settings of a method: typed, bounded, documented fields, checked when the method is built.

A method is a frozen, keyword-only dataclass whose fields are made by `count`, `number`, `share`, `size`, `duration`,
`flag`, `choice`, `pattern`, `hosts` and `method`. The same declaration checks Python objects, reads strategy text and
TOML, prints the canonical text and fills `laconic explain`, so no setting can be accepted in one spelling and lost in
another.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import math
import re
import socket
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, Self, TypeAlias, TypeVar, cast

from laconic.errors import InvalidSetting, did_you_mean, one_line, unknown_setting
from laconic.units import format_size, format_time, parse_quantity

Value: TypeAlias = "bool | int | float | str | Method"
Kind = Literal["count", "number", "share", "size", "duration", "flag", "choice", "pattern", "hosts", "method"]
Chosen = TypeVar("Chosen", bound="Method")
_LAST_PORT = 65535
_TEXTS = {
    "pattern": re.compile(r"[\w.*?!|\[\]-]{0,500}"),
    "hosts": re.compile(r"([\w.-]{1,253}:\d{1,5}(\|[\w.-]{1,253}:\d{1,5})*)?", re.ASCII),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The declaration of one field: what it holds and within which bounds."""

    kind: Kind
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()
    advice: str = ""
    """What to do instead, appended to a range error."""
    wants: type[Method] | None = None
    """The kind of method that the value must be; checked where the parts of a strategy are combined, not here."""

    def allowed(self) -> str:
        """The bounds in words."""
        if self.kind == "choice":
            return " or ".join(self.choices)
        bounds = [
            f"{sign} {self.show(bound)}"
            for sign, bound in ((">=", self.at_least), (">", self.above), ("<=", self.at_most))
            if bound is not None
        ]
        noun = {
            "count": "a whole number",
            "size": "a size",
            "duration": "a time",
            "flag": "true or false",
            "pattern": "names with * and ?, separated by |,",
            "hosts": "address:port, several separated by |,",
            "method": "a method, with its settings in brackets if need be,",
        }.get(self.kind, "a number")
        return f"{noun} {' and '.join(bounds)}".strip(" ,")

    def show(self, value: object) -> str:
        """`value` as canonical text."""
        if self.kind == "flag":
            return "true" if value else "false"
        if self.kind in _TEXTS:
            return f'"{value}"'
        if self.kind == "size" and isinstance(value, int):
            return format_size(value)
        if self.kind == "duration" and isinstance(value, int | float):
            return format_time(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        return str(value)

    def read(self, value: object, where: str) -> Value:
        """Turn text or a TOML value into what the field holds; units are allowed in text.

        A name of a method must have been looked up before: names are known to registries, not here.
        """
        if self.kind == "method":
            self.check(value, where)
            return cast(Value, value)
        if isinstance(value, str):
            text = value.strip()
            if self.kind == "choice":
                return text
            if self.kind in _TEXTS:
                return text[1:-1] if text[:1] == text[-1:] == '"' and len(text) > 1 else text
            if self.kind == "flag":
                if text.lower() in ("true", "false"):
                    return text.lower() == "true"
                raise InvalidSetting(f'{where} must be true or false, got "{one_line(text, 60)}".')
            if self.kind == "share" and text.endswith("%"):
                return parse_quantity(text, "share", where)
            if self.kind in ("count", "size"):
                # A float holds whole numbers only up to 2**53.
                with contextlib.suppress(ValueError):
                    return int(text)
            dimension = {"size": "size", "duration": "time"}.get(self.kind, "number")
            value = parse_quantity(text, cast(Literal["size", "time", "number"], dimension), where)
        if self.kind in ("count", "size") and isinstance(value, float) and value.is_integer():
            return int(value)
        if self.kind in ("number", "share", "duration") and isinstance(value, int) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # too large: `check` says so
                return float(value)
        if isinstance(value, bool | int | float | str):
            return value
        raise InvalidSetting(f"{where} must be {self.allowed()}, got {found(value)}.")

    def check(self, value: object, where: str) -> None:
        """Raise InvalidSetting unless `value` has the right type and lies within the bounds."""
        if self.kind == "choice":
            if value not in self.choices:
                text = one_line(value, 60) if isinstance(value, str) else found(value)
                raise InvalidSetting(
                    f'{where} must be one of the known choices, got "{text}". {did_you_mean(text, self.choices)}'
                )
            return
        if self.kind in ("flag", "pattern", "hosts", "method"):
            if not (
                (self.kind == "flag" and isinstance(value, bool))
                or (self.kind in _TEXTS and isinstance(value, str) and _TEXTS[self.kind].fullmatch(value))
                or (self.kind == "method" and isinstance(value, Method))
            ):
                raise InvalidSetting(f"{where} must be {self.allowed()}, got {found(value)}.")
            if self.kind == "hosts":
                _check_hosts(str(value), where)
            return
        wanted = int if self.kind in ("count", "size") else int | float
        if not isinstance(value, wanted) or isinstance(value, bool) or not _is_finite(value):
            raise InvalidSetting(f"{where} must be {self.allowed()}, got {found(value)}.")
        too_small = (self.at_least is not None and value < self.at_least) or (
            self.above is not None and value <= self.above
        )
        if too_small or (self.at_most is not None and value > self.at_most):
            advice = f" {self.advice}" if self.advice else ""
            raise InvalidSetting(f"{where} must be {self.allowed()}, got {one_line(self.show(value), 60)}.{advice}")


def _check_hosts(text: str, where: str) -> None:
    """Raise InvalidSetting for a port that does not exist, or an address that is no single host's."""
    for one in text.split("|") if text else ():
        host, _, port = one.rpartition(":")
        if not 1 <= int(port) <= _LAST_PORT:
            raise InvalidSetting(f'{where} must have ports from 1 to {_LAST_PORT}, got "{one_line(one, 60)}".')
        try:
            wildcard = socket.inet_aton(host) == bytes(4)  # "0" and "0.0" mean 0.0.0.0 too
        except OSError:
            wildcard = False  # a name
        if wildcard:
            raise InvalidSetting(
                f'{where} must name one host each, got "{one_line(one, 60)}", which means all interfaces of any host.'
            )


def found(value: object) -> str:
    """Any value a user may have given, for a message."""
    try:
        return one_line(repr(value), 60)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a bottomless table
        return f"something of type {type(value).__name__} that is too long to show"


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond what a float can hold
        return False


def _field(default: Value, setting: Setting) -> object:
    return dataclasses.field(default=default, metadata={"setting": setting})


def count(default: int, *, at_least: int = 0, at_most: int | None = None, advice: str = "") -> int:
    """A whole number."""
    return cast(int, _field(default, Setting(kind="count", at_least=at_least, at_most=at_most, advice=advice)))


def size(default: int, *, at_least: int = 1, advice: str = "") -> int:
    """A number of bytes, written with or without a unit."""
    # A bucket of more than a tebibyte is a typing error, and this stays far from integer overflow in torch.
    return cast(int, _field(default, Setting(kind="size", at_least=at_least, at_most=2**40, advice=advice)))


def number(
    default: float, *, at_least: float | None = None, above: float | None = None, at_most: float | None = None
) -> float:
    """A real number."""
    return cast(float, _field(default, Setting(kind="number", at_least=at_least, above=above, at_most=at_most)))


def share(default: float, *, above: float | None = 0.0, at_least: float | None = None, at_most: float = 1.0) -> float:
    """A fraction, written as 0.01 or 1%."""
    return cast(float, _field(default, Setting(kind="share", above=above, at_least=at_least, at_most=at_most)))


def duration(default: float, *, at_least: float = 0.0) -> float:
    """A number of seconds, written with or without a unit."""
    return cast(float, _field(default, Setting(kind="duration", at_least=at_least)))


def flag(default: bool) -> bool:
    """True or false."""
    return cast(bool, _field(default, Setting(kind="flag")))


def choice(default: str, *choices: str) -> str:
    """One of a closed set of names, the default first."""
    return cast(str, _field(default, Setting(kind="choice", choices=(default, *choices))))


def pattern(default: str) -> str:
    """Names as patterns: * stands for anything, ? for one character, | separates; e.g. *.bias|*norm*."""
    return cast(str, _field(default, Setting(kind="pattern")))


def hosts(default: str) -> str:
    """Where something runs: address:port, several separated by |."""
    return cast(str, _field(default, Setting(kind="hosts")))


def method(default: Chosen, *, wants: type[Method]) -> Chosen:
    """Another method of the same axis, with settings of its own."""
    return cast(Chosen, _field(default, Setting(kind="method", wants=wants)))


@dataclass(frozen=True, kw_only=True)
class Method:
    """One choice on one axis: a name, its settings, and a text that reads back to the same object."""

    axis: ClassVar[str] = ""
    name: ClassVar[str] = ""
    family: ClassVar[str] = ""
    """The family of methods on its axis that it is listed with; empty: all of the axis."""
    good_for: ClassVar[str] = ""
    """When to choose it, in a few words; empty: the summary says that."""
    first_setting: ClassVar[str] = ""
    """The setting that topk(0.01) means, where it is not the first that is declared."""
    shows_on_links: ClassVar[tuple[str, ...]] = ()
    """Settings that act on what is measured on the network, and change nothing where all links are alike."""

    def __post_init__(self) -> None:
        for key, setting in self.declared().items():
            setting.check(getattr(self, key), f"{self.axis}.{self.name}.{key}")

    @classmethod
    def declared(cls) -> Mapping[str, Setting]:
        """Every setting of this method; the one that may be given without its name comes first."""
        # Before its decorator has run, a class still has the fields of its base: that is not kept.
        made = "__dataclass_fields__" in vars(cls)
        return _declared(cls) if made else _declared.__wrapped__(cls)

    @classmethod
    def build(cls, settings: Mapping[str, object], **parts: object) -> Self:
        """Make the method from raw settings (text or TOML values); unknown names are refused."""
        declared = cls.declared()
        values: dict[str, object] = {}
        for key, raw in settings.items():
            where = f"{cls.axis}.{cls.name}.{one_line(key, 40)}"
            if key not in declared:
                raise unknown_setting(cls.axis, cls.name, key, declared)
            values[key] = declared[key].read(raw, where)
        return cls(**values, **parts)

    @classmethod
    def summary(cls) -> str:
        """The first sentence of the docstring."""
        return (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")

    @classmethod
    def setting_help(cls) -> dict[str, str]:
        """The docstring under each field, inherited fields included."""
        texts: dict[str, str] = {}
        for owner in reversed(cls.__mro__[: cls.__mro__.index(Method)]):
            try:
                tree = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
            except (OSError, TypeError):  # typed into an interpreter: there is no source
                continue
            assert isinstance(tree, ast.ClassDef)
            for field, text in zip(tree.body, tree.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(text, ast.Expr)
                    and isinstance(text.value, ast.Constant)
                    and isinstance(text.value.value, str)
                ):
                    texts[field.target.id] = " ".join(text.value.value.split())
        return {key: texts.get(key, "") for key in cls.declared()}

    def settings(self) -> dict[str, Value]:
        """Every setting with its value, defaults included."""
        return {key: getattr(self, key) for key in self.declared()}

    def changed_settings(self) -> dict[str, str]:
        """The settings that differ from their defaults, as canonical text."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return {
            key: setting.show(getattr(self, key))
            for key, setting in self.declared().items()
            if getattr(self, key) != defaults[key]
        }

    def call_text(self) -> str:
        """This method alone as canonical text: the name, then the settings that differ from the defaults."""
        arguments = ", ".join(f"{key}={value}" for key, value in self.changed_settings().items())
        return f"{self.name}({arguments})" if arguments else self.name

    def __str__(self) -> str:
        return self.call_text()


@functools.cache
def _declared(kind: type[Method]) -> Mapping[str, Setting]:
    settings = {
        field.name: field.metadata["setting"] for field in dataclasses.fields(kind) if "setting" in field.metadata
    }
    first = {kind.first_setting: settings[kind.first_setting]} if kind.first_setting in settings else {}
    return MappingProxyType(first | settings)
