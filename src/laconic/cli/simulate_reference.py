"""`laconic simulate --reference NAME [--rows FILE]`: published configurations, predicted and compared.

With --json, an array of the rows as they were read, numbers as numbers, and for each:

    "predicted": float             the table's first measured column
    "predicted_COLUMN": float      every further one
    "error": float                 predicted / measured - 1, where the row has the measurement
    "error_COLUMN": float          likewise
"""

from __future__ import annotations

from collections.abc import Sequence

from laconic.cli.terminal import emit_json, emit_sections, plain_table
from laconic.simulator.reference.published import PublishedTable
from laconic.simulator.reference.rows import Compared, carried, compare, read_rows, summary
from laconic.simulator.reference.tables import published_table


def print_reference(name: str, rows_file: str | None, *, as_json: bool) -> None:
    """Predict the rows of `rows_file`, or those that come with the package, and print them."""
    table = published_table(name)
    rows = carried(table) if rows_file is None else read_rows(rows_file, table)
    found = compare(table, rows)
    records = [_record(table, row) for row in found]
    if as_json:
        emit_json(records)
        return
    headers = list(dict.fromkeys(key for record in records for key in record))
    numbers = [header for header in headers if any(not isinstance(record.get(header), str) for record in records)]
    printed = plain_table(*headers, numbers=numbers)
    for record in records:
        printed.add_row(*(_cell(header, record.get(header, "")) for header in headers))
    emit_sections(printed, *_words(table, found))


def _record(table: PublishedTable, found: Compared) -> dict[str, str | int | float]:
    record: dict[str, str | int | float] = {column: _value(text) for column, text in found.row.items()}
    for index, column in enumerate(table.measured):
        ending = f"_{column}" if index else ""
        record[f"predicted{ending}"] = found.predicted[column]
        if column in found.errors:
            record[f"error{ending}"] = found.errors[column]
    return record


def _value(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _cell(header: str, value: object) -> str:
    if isinstance(value, float) and header.partition("_")[0] == "error":
        return f"{value:+.1%}"
    return f"{value:.4g}" if isinstance(value, float) and header.startswith("predicted") else str(value)


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
