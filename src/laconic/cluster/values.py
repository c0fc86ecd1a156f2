"""Values of a cluster file: each kind is read strictly, from TOML or from Python, and written so that it reads back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from laconic.errors import UsageError, did_you_mean, one_line
from laconic.units import format_rate, format_time, parse_quantity

T_co = TypeVar("T_co", covariant=True)


class Kind(Protocol[T_co]):
    """What a key may hold."""

    def read(self, value: object, where: str) -> T_co:
        """Return the value or raise UsageError; a value that has been read may be read again."""
        ...

    def write(self, value: object) -> str:
        """The value as TOML."""
        ...


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A whole number."""

    least: int = 1
    most: int = 65_536

    def read(self, value: object, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not self.least <= value <= self.most:
            raise UsageError(f"{where} must be a whole number from {self.least} to {self.most}, got {shown(value)}.")
        return value

    def write(self, value: object) -> str:
        return str(value)


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number within bounds."""

    least: float
    most: float

    def read(self, value: object, where: str) -> float:
        number = _float(value)
        if number is None or not self.least <= number <= self.most:
            raise UsageError(f"{where} must be a number from {self.least:g} to {self.most:g}, got {shown(value)}.")
        return number

    def write(self, value: object) -> str:
        return repr(value)


@dataclass(frozen=True)
class Seconds:
    """A time: text such as 5ms, or a number of seconds."""

    most: float = 10.0

    def read(self, value: object, where: str) -> float:
        number = _float(value)
        seconds = parse_quantity(str(value), "time", where) if number is None else number
        if not 0 <= seconds <= self.most:
            raise UsageError(f"{where} must be between 0 and {self.most:g} s, got {shown(value)}.")
        return seconds

    def write(self, value: object) -> str:
        assert isinstance(value, int | float)
        return f'"{format_time(value)}"'


@dataclass(frozen=True)
class Rate:
    """A bandwidth: text such as 100mbit, or a number of bits per second."""

    def read(self, value: object, where: str) -> float:
        """A number within the bounds of a Link."""
        number = _float(value)
        return parse_quantity(str(value), "rate", where) if number is None else number

    def write(self, value: object) -> str:
        assert isinstance(value, int | float)
        return f'"{format_rate(value)}"'


@dataclass(frozen=True)
class Text:
    """Text, which may be empty."""

    def read(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise UsageError(f"{where} must be text in quotes, got {shown(value)}.")
        return value

    def write(self, value: object) -> str:
        # JSON's escapes are TOML's, but for one character that TOML does not take as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass(frozen=True)
class Several(Generic[T_co]):
    """A list of values of one kind."""

    of: Kind[T_co]
    least: int = 1
    most: int = 65_536

    def read(self, value: object, where: str) -> tuple[T_co, ...]:
        if not isinstance(value, list | tuple) or not self.least <= len(value) <= self.most:
            raise UsageError(f"{where} must be a list with {self.least} to {self.most} entries, got {shown(value)}.")
        return tuple(self.of.read(entry, f"{where}[{index}]") for index, entry in enumerate(value))

    def write(self, value: object) -> str:
        assert isinstance(value, tuple)
        return f"[{', '.join(map(self.of.write, value))}]"


def check_keys(table: Mapping[str, object], known: tuple[str, ...], where: str) -> None:
    """Refuse keys that are not known."""
    for key in table:
        if key not in known:
            raise UsageError(f'{where}: there is no key "{one_line(key, 40)}". {did_you_mean(key, known)}')


def read_table(table: Mapping[str, object], key: str, where: str) -> Mapping[str, object] | None:
    """The table under a key, if there is one."""
    value = table.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise UsageError(f"{where}: write {key} as a table [{key}], got {shown(value)}.")
    return value


def read_tables(table: Mapping[str, object], key: str, where: str) -> list[Mapping[str, object]]:
    """The list of tables under a key."""
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise UsageError(f"{where}: write {key} as [[{key}]] tables.")
    return value


def shown(value: object) -> str:
    """A value as an error quotes it."""
    if value is None:
        return "nothing"
    try:
        return one_line(repr(value), 40)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a bottomless table
        return f"something of type {type(value).__name__} that is too long to show"


def _float(value: object) -> float | None:
    """A number as a float; one beyond what a float can hold becomes infinite, which every bound refuses."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
