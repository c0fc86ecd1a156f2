"""Rows of a published table: read from a CSV file, predicted, and compared with the measurements."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from laconic.errors import ConfigurationError, UsageError, did_you_mean, one_line
from laconic.simulator.reference.published import PublishedTable, Row


@dataclass(frozen=True)
class Compared:
    """One row with its predictions."""

    row: Row
    predicted: dict[str, float]
    """By measured column."""
    errors: dict[str, float]
    """predicted / measured - 1, for the measured columns that the row has."""


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of predictions: statistics of |predicted / measured - 1| over `count` rows."""

    count: int
    mean: float
    median: float
    largest: float


def carried(table: PublishedTable) -> list[Row]:
    """The rows that come with the package."""
    return [Row(cells, f"{table.name}, carried row {index}") for index, cells in enumerate(table.carried_rows(), 1)]


def read_rows(path: str | Path, table: PublishedTable) -> list[Row]:
    """The rows of a CSV file with the columns of `table`; lines that begin with # are comments."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read {one_line(path, 120)}: {reason}.") from exc
    name = Path(path).name
    numbered = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not numbered:
        raise ConfigurationError(f"{name}: there is no header line. Expected: {','.join(table.columns)}.")
    parsed = csv.reader(line for _, line in numbered)
    header = [column.strip() for column in next(parsed)]
    _check_header(header, table, name)
    rows: list[Row] = []
    for (number, _), cells in zip(numbered[1:], parsed, strict=False):
        if len(cells) != len(header):
            raise ConfigurationError(
                f"{name}, line {number}: {len(cells)} cells, but the header has {len(header)} columns."
            )
        rows.append(Row(dict(zip(header, map(str.strip, cells), strict=True)), f"{name}, line {number}"))
    return rows


def _check_header(header: Sequence[str], table: PublishedTable, name: str) -> None:
    twice = [column for column in dict.fromkeys(header) if header.count(column) > 1]
    if twice:
        raise ConfigurationError(f"{name}: the column {one_line(twice[0], 40)} occurs twice.")
    known = [*table.columns, *table.measured, *table.carried_along]
    for column in header:
        if column not in known:
            raise ConfigurationError(
                f'{name}: the table {table.name} has no column "{one_line(column, 40)}". {did_you_mean(column, known)}'
            )
    missing = [column for column in table.columns if column not in header]
    if missing:
        raise ConfigurationError(f"{name}: the columns {', '.join(missing)} are missing; {table.name} needs them.")


def compare(table: PublishedTable, rows: Iterable[Row]) -> list[Compared]:
    """Each row predicted, and compared where it has a measurement."""
    found: list[Compared] = []
    for row in rows:
        predicted = dict(table.predict(row))
        assert set(predicted) == set(table.measured), f"{table.name} predicts {sorted(predicted)}"
        assert all(math.isfinite(value) for value in predicted.values()), (row.where, predicted)
        measured = {column: row.number(column) for column in table.measured if row.get(column, "")}
        errors = {column: predicted[column] / value - 1 for column, value in measured.items()}
        found.append(Compared(row, predicted, errors))
    return found


def summary(rows: Iterable[Compared], column: str) -> ErrorSummary | None:
    """The errors of one measured column; None where no row has it."""
    sizes = [abs(row.errors[column]) for row in rows if column in row.errors]
    if not sizes:
        return None
    return ErrorSummary(len(sizes), statistics.fmean(sizes), statistics.median(sizes), max(sizes))
