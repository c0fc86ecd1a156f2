"""How commands print: colour on a terminal, the same words without it in a pipe, JSON on request."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING

from laconic.errors import UsageError
from laconic.report.strict_json import strict

_PIPE_WIDTH = 120
_WIDEST_ASSIGNMENT = 24
"""The longest "name=value" that has its text next to it; the text of a longer one goes below it."""

_LEAST_TEXT = 30
"""Columns next to an assignment below which its text goes below it."""

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text


def emit(text: str) -> None:
    """Write to standard output now, so that a full disk or a closed pipe is noticed here and not at exit."""
    if sys.stdout is None:
        return
    # A third-party method may describe itself in letters this terminal does not have.
    encoding = sys.stdout.encoding or "utf-8"
    with _write_errors_explained():
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()


@contextlib.contextmanager
def _write_errors_explained() -> Generator[None, None, None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as exc:
        silence_stdout()
        raise UsageError(f"cannot write the output: {exc.strerror}.") from exc


def emit_json(value: object) -> None:
    """Write `value` as indented JSON; a number that is not finite is null."""
    emit(f"{json.dumps(strict(value), indent=2, allow_nan=False)}\n")


def emit_sections(*sections: RenderableType) -> None:
    """Write rich tables and texts with an empty line between them."""
    console = stdout_console()
    # Rich ends the process by itself on a broken pipe; captured text goes through `emit`, which raises instead.
    with _write_errors_explained(), console.capture() as capture:
        for index, section in enumerate(sections):
            if index:
                console.print()
            console.print(section, crop=False)
    emit("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def stdout_console() -> Console:
    """A rich console that never reads user text as markup."""
    from rich.console import Console

    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # A pipe or a file has no edge; rich would take it for 80 columns and cut tables to fit.
        console.width = _PIPE_WIDTH
    return console


def plain_table(*headers: str, numbers: Iterable[str] = ()) -> Table:
    """A table of words and spaces, so that a pipe gets the same text; columns in `numbers` are set to the right."""
    from rich.table import Table

    table = Table(box=None, show_header=bool(headers), pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in headers:
        # Where a word is wider than its column, it continues on the next line: a name that is cut off is useless.
        table.add_column(header, justify="right" if header in set(numbers) else "left", overflow="fold")
    return table


def names_and_texts() -> Table:
    """A table of two columns; where there is little room, it is taken from the texts and never from the names."""
    table = plain_table()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def natural_width(table: Table) -> int:
    """The width at which nothing in the table is cut off or wrapped."""
    from rich.console import Console

    wide = Console(width=10_000)
    return wide.measure(table).maximum


def summary_with_settings(summary: Text, settings: Mapping[str, str]) -> RenderableType:
    """A method's summary, and beneath it each "name=value" with what there is to say about it."""
    from rich.console import Group

    return Group(summary, _Settings(settings)) if settings else summary


class _Settings:
    """Each assignment beside what there is to say about it, or above it where the terminal has no room for both."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._settings = settings

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.padding import Padding
        from rich.text import Text

        widest = max(map(len, self._settings))
        if widest > _WIDEST_ASSIGNMENT or options.max_width - widest < _LEAST_TEXT:
            for assignment, about in self._settings.items():
                yield Text(f"  {assignment}", style="bold")
                yield Padding(Text(about, style="dim"), (0, 0, 0, 4))
            return
        table = names_and_texts()
        for assignment, about in self._settings.items():
            table.add_row(Text(f"  {assignment}", style="bold"), Text(about, style="dim"))
        yield table


def printable(text: str) -> str:
    """`text` with control characters spelled out, so that what a user typed cannot steer the terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def silence_stdout() -> None:
    """Point standard output at nothing, so that the interpreter's last flush at exit has nowhere to fail."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
