"""The contract of a table of published measurements: the columns of a configuration, and the predicted columns.

One file per table, one class derived from `PublishedTable`, one line in `tables.py`. `laconic simulate --reference
NAME` predicts the rows that the table carries, and with `--rows FILE` those of a CSV file with the same columns.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from laconic.errors import ConfigurationError, LaconicError, did_you_mean, one_line

_EMPTY = frozenset({"", "-", "na", "n/a", "nan", "none", "null"})
"""What programs and people write into a cell without a value, in lower case."""
_YES, _NO = ("true", "1", "yes"), ("false", "0", "no")
_MOST = 10**15
"""Larger numbers are mistakes; floats still count to this one by ones."""


class Row(Mapping[str, str]):
    """The cells of one row by column, as text, and as the kind of value that a table expects there."""

    def __init__(self, cells: Mapping[str, str], where: str = "row", *, unreadable: str = "") -> None:
        self._cells = dict(cells)
        self.where = where
        """The file and line, for messages."""
        self.unreadable = unreadable
        """Why the line could not be divided into cells; "" if it could."""
        self.warnings: list[str] = []
        """What was assumed about cells whose meaning is not modelled."""

    def __getitem__(self, column: str) -> str:
        return self._cells[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def is_empty(self, column: str) -> bool:
        """Whether the cell is missing, or says that there is no value."""
        return self._cells.get(column, "").lower() in _EMPTY

    def whole(self, column: str, *, least: int = 1, most: int = _MOST, empty: int | None = None) -> int:
        """A whole number from `least` to `most`; an empty cell means `empty`, where that is given."""
        if empty is not None and self.is_empty(column):
            return empty
        text = self._cells.get(column, "")
        if re.fullmatch(r"\d{1,3}(,\d{3})+", text):
            text = text.replace(",", "")
        try:
            # Tables that have passed through pandas write 8 as 8.0.
            number = float(text)
            value = int(number)
        except (ValueError, OverflowError):
            raise self.problem(column, f"a whole number of at least {least}") from None
        if value != number or value < least:
            raise self.problem(column, f"a whole number of at least {least}")
        if value > most:
            raise self.problem(column, f"a whole number of at most {most}")
        return value

    def number(self, column: str) -> float:
        """A positive, finite number."""
        try:
            value = float(self._cells.get(column, ""))
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise self.problem(column, "a positive number")
        return value

    def choice(self, column: str, allowed: Iterable[str]) -> str:
        """The word of `allowed` that the cell has; upper and lower case, spaces, "-" and "_" need not be the same."""
        known = list(allowed)
        text = self._cells.get(column, "")
        if text in known:
            return text
        alike = [word for word in known if _plain(word) == _plain(text)]
        if len(alike) == 1:
            return alike[0]
        raise ConfigurationError(
            f'{self.where}, column {column}: "{one_line(text, 40)}" is not known. {did_you_mean(text, known)}'
        )

    def flag(self, column: str, *, empty: bool | None = None) -> bool:
        """True or False; also 1 or 0, yes or no. An empty cell means `empty`, where that is given."""
        if empty is not None and self.is_empty(column):
            return empty
        text = self._cells.get(column, "").lower().removesuffix(".0")
        if text not in (*_YES, *_NO):
            raise self.problem(column, "True or False")
        return text in _YES

    def problem(self, column: str, expected: str) -> ConfigurationError:
        """The error for an invalid cell, with the expected value."""
        found = one_line(self._cells.get(column, ""), 40)
        return ConfigurationError(f'{self.where}, column {column}: expected {expected}, got "{found}".')

    def assume(self, column: str, what: str) -> None:
        """Warn that this cell is not modelled, and what the prediction assumes."""
        found = one_line(self._cells.get(column, ""), 40)
        text = f'{self.where}, column {column}: "{found}" is not modelled; predicted {what}.'
        if text not in self.warnings:
            self.warnings.append(text)

    def located(self, error: LaconicError) -> ConfigurationError:
        """The error with the row that it is about, if it does not name the row yet."""
        text = str(error)
        return ConfigurationError(text if text.startswith(self.where) else f"{self.where}: {text}")


def _plain(word: str) -> str:
    return re.sub(r"[\s_-]+", "", word).casefold()


@dataclass(frozen=True)
class Likeness:
    """By what rows of a table resemble each other; every row of a table has the same numbers of words and counts."""

    group: str
    """Rows of different groups say nothing about each other."""
    words: tuple[str, ...]
    """Compared for equality."""
    counts: tuple[float, ...]
    """Positive numbers, compared by their ratio."""


class PublishedTable(ABC):
    """One published table; a class per table, made without arguments."""

    name: ClassVar[str]
    """Its name for `--reference`."""
    source: ClassVar[str]
    """The citation, in words."""
    columns: ClassVar[tuple[str, ...]]
    """The columns that name a configuration; a file of rows must have all of them."""
    measured: ClassVar[tuple[str, ...]]
    """The columns that are predicted, the most important first; a file of rows may have them or not."""
    carried_along: ClassVar[tuple[str, ...]] = ()
    """Columns that are in neither of these: a file may have them, and no prediction depends on them."""
    calibrated_on: ClassVar[str]
    """Which rows or figures were used, in words."""

    @abstractmethod
    def predict(self, row: Row) -> Mapping[str, float]:
        """A prediction for each column in `measured`; ConfigurationError names the column that is wrong."""

    def likeness(self, row: Row) -> Likeness | None:
        """By what the row resembles others; None where predictions of the table cannot be calibrated."""
        return None

    def carried_rows(self) -> list[dict[str, str]]:
        """The rows that the package carries because it is calibrated on them, measured columns included."""
        return []
