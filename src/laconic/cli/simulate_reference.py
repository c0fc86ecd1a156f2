"""`laconic simulate --reference NAME [--rows FILE [--calibrate FILE]]`: published configurations, predicted, compared.

With --json, an array of the rows as they were read, numbers as numbers, and for each:

    "predicted": float             the table's first measured column
    "predicted_COLUMN": float      every further one
    "error": float                 predicted / measured - 1, where the row has the measurement
    "error_COLUMN": float          likewise
    "warning": str                 what was assumed about cells that are not modelled, if there are any
    "problem": str                 instead of all these: why the row cannot be predicted, and what is allowed

The other rows are predicted nevertheless; stderr says how many were not. If no row can be predicted, that is an error.

With --calibrate, whose file has measured rows with the same columns (reference/residuals.py), also for each:

    "uncalibrated": float          the first prediction without the correction
    "uncalibrated_COLUMN": float   likewise
    "similar_measured": int        the number of similar rows with a measurement; others correct less (residuals.py)
    "similar_measured_COLUMN": int likewise
    "also_measured": bool          whether the file has a row with the same configuration, so that the error says little

The text leaves out the columns "uncalibrated" and "similar_measured", columns that are empty in every row and those
that nothing reads, and says above the table what is the same in every row.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from laconic.cli.terminal import emit_json, emit_sections, natural_width, plain_table, printable
from laconic.errors import ConfigurationError, UsageError, one_line
from laconic.simulator.reference.published import PublishedTable
from laconic.simulator.reference.residuals import Calibrated, calibrated
from laconic.simulator.reference.rows import Compared, Refused, carried, compare, compare_each, read_rows, summary
from laconic.simulator.reference.tables import published_table

if TYPE_CHECKING:
    from rich.table import Table


_MOST_NAMED = 20
"""Rows whose problem is printed."""


def print_reference(name: str, rows_file: str | None, measured_file: str | None = None, *, as_json: bool) -> None:
    """Predict the rows of `rows_file`, or those that come with the package, and print them."""
    table = published_table(name)
    if measured_file is not None and rows_file is None:
        raise UsageError("simulate: --calibrate needs --rows, which names the file of the rows to predict.")
    rows = carried(table) if rows_file is None else read_rows(rows_file, table)
    every = compare_each(table, rows)
    found = [one for one in every if isinstance(one, Compared)]
    refused = [one for one in every if isinstance(one, Refused)]
    if refused and not found:
        raise ConfigurationError(_in_all(refused))
    predicted = [_record(table, row) for row in found]
    sections = _words(table, found)
    if measured_file is not None:
        basis = _measured(table, measured_file)
        corrected = calibrated(table, found, basis)
        found = [row.compared for row in corrected]
        predicted = [{**_record(table, row.compared), **_basis(table, row)} for row in corrected]
        sections = [*_words(table, found), _basis_in_words(table, corrected, basis)]
    if refused:
        for line in _not_predicted(refused, len(every)):
            print(printable(line), file=sys.stderr)
    for line in _assumed(found):
        print(printable(line), file=sys.stderr)
    if as_json:
        ready = iter(predicted)
        emit_json([_refusal(one) if isinstance(one, Refused) else next(ready) for one in every])
        return
    shown = [{key: row[key] for key in row if _is_shown(table, key)} for row in predicted]
    alike, differing = _alike(shown)
    in_all = [f"In every row: {', '.join(f'{name} {value}' for name, value in alike.items())}"] if alike else []
    emit_sections(*in_all, _printed(shown, differing), *sections)


def _refusal(row: Refused) -> dict[str, str | int | float]:
    return {**{column: _value(text) for column, text in row.row.items()}, "problem": row.problem}


def _in_all(refused: Sequence[Refused]) -> str:
    """The problem of a file no row of which can be predicted: that of its first row."""
    others = f" No other of the {len(refused)} rows can be predicted either." if len(refused) > 1 else ""
    return f"{refused[0].problem}{others}"


def _not_predicted(refused: Sequence[Refused], total: int) -> list[str]:
    lines = [
        f"laconic: {len(refused)} of {total} rows cannot be predicted:",
        *(one_line(row.problem, 2000) for row in refused[:_MOST_NAMED]),
    ]
    if len(refused) > _MOST_NAMED:
        lines.append(f"... and {len(refused) - _MOST_NAMED} more; --json has the problem of each.")
    return lines


def _assumed(found: Sequence[Compared]) -> list[str]:
    texts = [one_line(text, 2000) for row in found for text in row.row.warnings]
    if len(texts) > _MOST_NAMED:
        texts[_MOST_NAMED:] = [f"... and {len(texts) - _MOST_NAMED} more; --json has the warning of each row."]
    return [f"laconic: {text}" for text in texts]


def _is_shown(table: PublishedTable, header: str) -> bool:
    return header not in table.carried_along and not header.startswith(("uncalibrated", "similar"))


def _printed(records: Sequence[Mapping[str, object]], columns: Sequence[str]) -> Table:
    """A table as wide as it needs to be: a number that is cut off is another number."""
    numbers = [column for column in columns if any(not isinstance(record.get(column), str) for record in records)]
    # In lines that end with an underscore, so that long names of short numbers take little room.
    table = plain_table(*(column.replace("_", "_\n") for column in columns), numbers=())
    for column, name in zip(table.columns, columns, strict=True):
        column.justify = "right" if name in numbers else "left"
        column.vertical = "bottom"
        column.no_wrap = True
    for record in records:
        table.add_row(*(_cell(name, record.get(name, "")) for name in columns))
    table.width = max(natural_width(table), 1)
    return table


def _alike(records: Sequence[Mapping[str, object]]) -> tuple[dict[str, str], list[str]]:
    """The cells that are the same in every row, by column, and the columns that differ; without empty columns."""
    headers = list(dict.fromkeys(key for record in records for key in record))
    cells = {header: {_cell(header, record.get(header, "")) for record in records} for header in headers}
    differing = [header for header in headers if len(cells[header]) > 1 or (len(records) == 1 and _computed(header))]
    alike = {header: next(iter(cells[header])) for header in headers if header not in differing}
    return {header: cell for header, cell in alike.items() if cell}, differing


def _measured(table: PublishedTable, path: str) -> list[Compared]:
    rows = read_rows(path, table)
    if not rows:
        raise ConfigurationError(
            f"--calibrate: {one_line(path, 120)} has no rows. Give at least one that was measured."
        )
    if not any(column in row for row in rows for column in table.measured):
        raise ConfigurationError(
            f"--calibrate: {one_line(path, 120)} has no measured column. Add {' or '.join(table.measured)}, with "
            "measurements."
        )
    return compare(table, rows)


def _basis(table: PublishedTable, row: Calibrated) -> dict[str, int | float | bool]:
    found: dict[str, int | float | bool] = {}
    for index, column in enumerate(table.measured):
        ending = f"_{column}" if index else ""
        found |= {f"uncalibrated{ending}": row.uncalibrated[column], f"similar_measured{ending}": row.similar[column]}
    return {**found, "also_measured": row.also_measured}


def _basis_in_words(table: PublishedTable, rows: Sequence[Calibrated], measured: Sequence[Compared]) -> str:
    lines = [f"Calibrated with {_counted(len(measured), 'measured row')}."]
    for column in table.measured:
        if not any(column in row.errors for row in measured):
            lines.append(f"{column} is not corrected: no row to calibrate on has a measurement.")
        elif with_similar := sum(bool(row.similar[column]) for row in rows):
            lines.append(f"{column}: {with_similar} of {len(rows)} predictions have a similar measured row.")
        else:
            lines.append(f"{column}: no prediction has a similar measured row; less similar ones correct little.")
    if seen := sum(row.also_measured for row in rows):
        line = f"{_counted(seen, 'predicted row')} had been measured with the same configuration"
        if any(row.also_measured and row.compared.errors for row in rows):
            line += ", so errors there say little"
        lines.append(f"{line}.")
    return "\n".join(lines)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _record(table: PublishedTable, found: Compared) -> dict[str, str | int | float | bool]:
    record: dict[str, str | int | float | bool] = {column: _value(text) for column, text in found.row.items()}
    for index, column in enumerate(table.measured):
        ending = f"_{column}" if index else ""
        record[f"predicted{ending}"] = found.predicted[column]
        if column in found.errors:
            record[f"error{ending}"] = found.errors[column]
    if found.row.warnings:
        record["warning"] = " ".join(found.row.warnings)
    return record


def _value(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        # JSON has no other numbers.
        return value if math.isfinite(value) else text
    return text


def _computed(header: str) -> bool:
    return header.startswith(("predicted", "uncalibrated", "error", "similar", "also"))


def _cell(header: str, value: object) -> str:
    if isinstance(value, float) and header.partition("_")[0] == "error":
        return f"{value:+.1%}"
    return f"{value:.4g}" if isinstance(value, float) and _computed(header) else str(value)


def _words(table: PublishedTable, found: Sequence[Compared]) -> list[str]:
    lines = []
    for column in table.measured:
        errors = summary(found, column)
        if errors is not None:
            lines.append(
                f"{column}: mean error {errors.mean:.1%}, median {errors.median:.1%}, largest {errors.largest:.1%} "
                f"({errors.count} rows)"
            )
    return [
        *(["\n".join(lines)] if lines else []),
        f"Calibrated on: {table.calibrated_on}\nMeasured by: {table.source}",
    ]
