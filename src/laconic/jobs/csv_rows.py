"""Lines of a CSV file with a header; every error names the file, the line and the column."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from laconic.errors import UsageError, did_you_mean, one_line


@dataclass(frozen=True)
class Line:
    """The cells of one line by column."""

    cells: Mapping[str, str]
    where: str

    def text(self, column: str) -> str:
        """The text of a cell; empty if there is none."""
        return self.cells.get(column, "")

    def number(self, column: str) -> float:
        """A finite number."""
        try:
            value = float(self.cells[column])
        except (KeyError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise self.wrong(column, "a number")
        return value

    def whole(self, column: str) -> int:
        """A whole number."""
        value = self.number(column)
        if not value.is_integer() or abs(value) > 2**53:
            raise self.wrong(column, "a whole number")
        return int(value)

    def wrong(self, column: str, wanted: str) -> UsageError:
        """The error for an invalid cell."""
        return UsageError(f'{self.where}: {column} must be {wanted}, got "{one_line(self.text(column), 60)}".')


def read_lines(
    path: str | Path, needed: Sequence[str], allowed: Sequence[str], other_names: Mapping[str, str] | None = None
) -> list[Line]:
    """Read a file; `other_names`: columns that other programs call differently, by their name."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read {one_line(path, 120)}: {reason}.") from exc
    return parse_lines(text, Path(path).name, needed, allowed, other_names)


def parse_lines(
    text: str, name: str, needed: Sequence[str], allowed: Sequence[str], other_names: Mapping[str, str] | None = None
) -> list[Line]:
    """The lines of a text; `name` is what errors call it."""
    numbered = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not numbered:
        raise UsageError(f"{name}: there is no header line. Expected at least: {','.join(needed)}.")
    try:
        rows = list(csv.reader((line for _, line in numbered), strict=True))
    except csv.Error as exc:
        raise UsageError(f"{name}: this is not CSV: {one_line(exc, 100)}.") from exc
    if len(rows) != len(numbered):
        raise UsageError(f"{name}: a quoted cell spans several lines. Close its quotes.")
    header = [(other_names or {}).get(column.strip(), column.strip()) for column in rows[0]]
    _check_header(header, name, needed, allowed)
    lines: list[Line] = []
    for (number, _), cells in zip(numbered[1:], rows[1:], strict=True):
        where = f"{name}, line {number}"
        if len(cells) != len(header):
            raise UsageError(f"{where}: {len(cells)} cells, but the header has {len(header)} columns.")
        lines.append(Line(dict(zip(header, map(str.strip, cells), strict=True)), where))
    return lines


def _check_header(header: Sequence[str], name: str, needed: Sequence[str], allowed: Sequence[str]) -> None:
    known = [*needed, *allowed]
    for column in header:
        if column not in known:
            raise UsageError(f'{name}: there is no column "{one_line(column, 40)}". {did_you_mean(column, known)}')
        if header.count(column) > 1:
            raise UsageError(f"{name}: the column {column} occurs twice.")
    missing = [column for column in needed if column not in header]
    if missing:
        raise UsageError(f"{name}: the columns {', '.join(missing)} are missing.")
