"""`laconic simulate --reference NAME [--rows FILE [--calibrate FILE]]`: published configurations, predicted, compared.

With --json, an array of the rows as they were read, numbers as numbers, and for each:

    "predicted": float             the table's first measured column
    "predicted_COLUMN": float      every further one
    "error": float                 predicted / measured - 1, where the row has the measurement
    "error_COLUMN": float          likewise

With --calibrate, whose file has measured rows with the same columns (reference/residuals.py), also for each:

    "uncalibrated": float          the first prediction without the correction
    "uncalibrated_COLUMN": float   likewise
    "similar_measured": int        the number of similar measured rows; near 0, there is hardly any correction
    "also_measured": bool          whether the file has a row with the same configuration, so that the error says little
"""

from __future__ import annotations

from collections.abc import Sequence

from laconic.cli.terminal import emit_json, emit_sections, plain_table
from laconic.errors import ConfigurationError, UsageError, one_line
from laconic.simulator.reference.published import PublishedTable
from laconic.simulator.reference.residuals import Calibrated, calibrated
from laconic.simulator.reference.rows import Compared, carried, compare, read_rows, summary
from laconic.simulator.reference.tables import published_table


def print_reference(name: str, rows_file: str | None, measured_file: str | None = None, *, as_json: bool) -> None:
    """Predict the rows of `rows_file`, or those that come with the package, and print them."""
    table = published_table(name)
    if measured_file is not None and rows_file is None:
        raise UsageError("simulate: --calibrate needs --rows, which names the file of the rows to predict.")
    rows = carried(table) if rows_file is None else read_rows(rows_file, table)
    found = compare(table, rows)
    records = [_record(table, row) for row in found]
    sections = _words(table, found)
    if measured_file is not None:
        basis = _measured(table, measured_file)
        corrected = calibrated(table, found, basis)
        found = [row.compared for row in corrected]
        records = [{**_record(table, row.compared), **_basis(table, row)} for row in corrected]
        sections = [*_words(table, found), _basis_in_words(table, corrected, basis)]
    if as_json:
        emit_json(records)
        return
    headers = list(dict.fromkeys(key for record in records for key in record))
    numbers = [header for header in headers if any(not isinstance(record.get(header), str) for record in records)]
    printed = plain_table(*headers, numbers=numbers)
    for record in records:
        printed.add_row(*(_cell(header, record.get(header, "")) for header in headers))
    emit_sections(printed, *sections)


def _measured(table: PublishedTable, path: str) -> list[Compared]:
    rows = read_rows(path, table)
    if not any(column in row for row in rows for column in table.measured):
        raise ConfigurationError(
            f"--calibrate: {one_line(path, 120)} has no measured column. Add {' or '.join(table.measured)}, with "
            "measurements, and at least one row."
        )
    return compare(table, rows)


def _basis(table: PublishedTable, row: Calibrated) -> dict[str, int | float | bool]:
    found: dict[str, int | float | bool] = {
        f"uncalibrated_{column}" if index else "uncalibrated": row.uncalibrated[column]
        for index, column in enumerate(table.measured)
    }
    return {**found, "similar_measured": row.similar, "also_measured": row.also_measured}


def _basis_in_words(table: PublishedTable, rows: Sequence[Calibrated], measured: Sequence[Compared]) -> str:
    alone = sum(not row.similar for row in rows)
    lines = [
        f"Calibrated with {len(measured)} measured rows; {alone} of {len(rows)} predicted rows have no similar one."
    ]
    lines += [
        f"{column} is not corrected: no row to calibrate on has a measurement."
        for column in table.measured
        if not any(column in row.errors for row in measured)
    ]
    seen = sum(row.also_measured for row in rows)
    if seen:
        lines.append(f"{seen} predicted rows were also measured, with the same configuration; their errors say little.")
    return "\n".join(lines)


def _record(table: PublishedTable, found: Compared) -> dict[str, str | int | float | bool]:
    record: dict[str, str | int | float | bool] = {column: _value(text) for column, text in found.row.items()}
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
    return (
        f"{value:.4g}" if isinstance(value, float) and header.startswith(("predicted", "uncalibrated")) else str(value)
    )


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
