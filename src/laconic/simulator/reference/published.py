"""The contract of a table of published measurements: the columns of a configuration, and the predicted columns.

One file per table, one class derived from `PublishedTable`, one line in `tables.py`. `laconic simulate --reference
NAME` predicts the rows that the table carries, and with `--rows FILE` those of a CSV file with the same columns.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from laconic.errors import ConfigurationError, did_you_mean, one_line


class Row(Mapping[str, str]):
    """The cells of one row by column, as text, and as the kind of value that a table expects there."""

    def __init__(self, cells: Mapping[str, str], where: str = "row") -> None:
        self._cells = dict(cells)
        self.where = where
        """The file and line, for messages."""

    def __getitem__(self, column: str) -> str:
        return self._cells[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def whole(self, column: str, *, least: int = 1, empty: int | None = None) -> int:
        """A whole number of at least `least`; an empty cell means `empty`, where that is given."""
        if empty is not None and not self._cells.get(column, ""):
            return empty
        text = self._cells.get(column, "")
        try:
            # Tables that have passed through pandas write 8 as 8.0.
            number = float(text)
            value = int(number)
        except (ValueError, OverflowError):
            raise self.problem(column, f"a whole number of at least {least}") from None
        if value != number or value < least:
            raise self.problem(column, f"a whole number of at least {least}")
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
        """One of the words in `allowed`."""
        known = list(allowed)
        text = self._cells.get(column, "")
        if text not in known:
            raise ConfigurationError(
                f'{self.where}, column {column}: "{one_line(text, 40)}" is not known. {did_you_mean(text, known)}'
            )
        return text

    def problem(self, column: str, expected: str) -> ConfigurationError:
        """The error for an invalid cell, with the expected value."""
        found = one_line(self._cells.get(column, ""), 40)
        return ConfigurationError(f'{self.where}, column {column}: expected {expected}, got "{found}".')


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
    """Columns that are neither in `columns` nor in `measured`: a file of rows may have them, and nothing reads them."""
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
