"""Rows of a published table: read from a CSV file, predicted, and compared with the measurements."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from laconic.errors import ConfigurationError, LaconicError, UsageError, did_you_mean, one_line
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
class Refused:
    """One row that cannot be predicted."""

    row: Row
    problem: str
    """The file and line, what is wrong there, and what is allowed."""


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
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not numbered:
        raise ConfigurationError(f"{name}: there is no header line. Expected: {','.join(table.columns)}.")
    parsed = csv.reader(line for _, line in numbered)
    rows: list[Row] = []
    try:
        header = [column.strip() for column in next(parsed)]
        _check_header(header, table, name)
        for cells in map(_stripped, parsed):
            if any(cells):
                # Of a cell with line breaks, the last line.
                rows.append(_row(header, cells, f"{name}, line {numbered[parsed.line_num - 1][0]}"))
    except csv.Error as exc:
        raise ConfigurationError(f"{name}: not a CSV file: {exc}. Is a quotation mark missing?") from exc
    return rows


def _stripped(cells: Iterable[str]) -> list[str]:
    return [cell.strip() for cell in cells]


def _row(header: Sequence[str], cells: Sequence[str], where: str) -> Row:
    if len(cells) == len(header):
        return Row(dict(zip(header, cells, strict=True)), where)
    unreadable = f"{where}: {len(cells)} cells, but the header has {len(header)} columns."
    return Row(dict(zip(header, cells, strict=False)), where, unreadable=unreadable)


def _check_header(header: Sequence[str], table: PublishedTable, name: str) -> None:
    twice = [column for column in dict.fromkeys(header) if header.count(column) > 1]
    if twice:
        raise ConfigurationError(f"{name}: the column {one_line(twice[0], 40)} occurs twice.")
    known = [*table.columns, *table.measured, *table.carried_along]
    for column in header:
        if not column:
            raise ConfigurationError(
                f"{name}: a column has no name. Name it, or remove it; pandas leaves out its index with index=False."
            )
        if column not in known:
            raise ConfigurationError(
                f'{name}: the table {table.name} has no column "{one_line(column, 40)}". {did_you_mean(column, known)}'
            )
    missing = [column for column in table.columns if column not in header]
    if missing:
        raise ConfigurationError(f"{name}: the columns {', '.join(missing)} are missing; {table.name} needs them.")


def compare(table: PublishedTable, rows: Iterable[Row]) -> list[Compared]:
    """Each row predicted, and compared where it has a measurement; the first that cannot be is an error."""
    return [_compared(table, row) for row in rows]


def compare_each(table: PublishedTable, rows: Iterable[Row]) -> list[Compared | Refused]:
    """Each row predicted and compared, or the reason why it cannot be."""
    found: list[Compared | Refused] = []
    for row in rows:
        try:
            found.append(_compared(table, row))
        except LaconicError as exc:
            found.append(Refused(row, str(exc)))
    return found


def _compared(table: PublishedTable, row: Row) -> Compared:
    if row.unreadable:
        raise ConfigurationError(row.unreadable)
    try:
        predicted = dict(table.predict(row))
        assert set(predicted) == set(table.measured), f"{table.name} predicts {sorted(predicted)}"
        if not all(map(math.isfinite, predicted.values())):
            raise OverflowError
        measured = {column: row.number(column) for column in table.measured if not row.is_empty(column)}
        errors = {column: predicted[column] / value - 1 for column, value in measured.items()}
    except LaconicError as exc:
        raise row.located(exc) from exc
    except OverflowError as exc:
        raise ConfigurationError(f"{row.where}: some number is too large for any prediction. Correct it.") from exc
    return Compared(row, predicted, errors)


def summary(rows: Iterable[Compared], column: str) -> ErrorSummary | None:
    """The errors of one measured column; None where no row has it."""
    sizes = [abs(row.errors[column]) for row in rows if column in row.errors]
    if not sizes:
        return None
    return ErrorSummary(len(sizes), statistics.fmean(sizes), statistics.median(sizes), max(sizes))
