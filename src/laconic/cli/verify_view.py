"""How `verify` looks: a line or a live view while checks are made, tables at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from laconic.cli.terminal import plain_table, printable
from laconic.experiments.verification import CHECKS, Cell, Findings, Outcome, Verdict, Where

_STYLES: dict[Verdict, str] = {"passed": "green", "failed": "bold red", "not applicable": "dim"}
_WHERE: dict[Where, str] = {"threads": "threads of one process", "processes": "processes over Gloo"}


class Watcher(Protocol):
    """Is told what happens."""

    def begin(self, strategy: str, workers: int, where: Where) -> None:
        """Checks of a strategy begin."""
        ...

    def check(self, name: str, outcome: Outcome) -> None:
        """A check was made."""
        ...

    def end(self, findings: Findings) -> None:
        """All checks of a strategy were made."""
        ...


class _PlainWatcher:
    """A line per strategy and number of workers on stderr."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0

    def begin(self, strategy: str, workers: int, where: Where) -> None:
        """See Watcher; nothing is said before there is something to say."""

    def check(self, name: str, outcome: Outcome) -> None:
        """See Watcher; likewise."""

    def end(self, findings: Findings) -> None:
        """See Watcher."""
        self._done += 1
        print(f"{self._done:>3}/{self._total}  {_line(findings)}", file=sys.stderr, flush=True)


class _LiveWatcher:
    """One line on the terminal that changes, and a line for every failure."""

    def __init__(self, total: int, console: Console) -> None:
        self._total = total
        self._console = console
        self._done = 0
        self._began_s = time.monotonic()
        self._now = ""
        self._made: list[str] = []

    def begin(self, strategy: str, workers: int, where: Where) -> None:
        """See Watcher."""
        now = f"{strategy}, {workers} {where}"
        if now != self._now:
            self._now, self._made = now, []

    def check(self, name: str, outcome: Outcome) -> None:
        """See Watcher."""
        self._made.append(name)

    def end(self, findings: Findings) -> None:
        """See Watcher."""
        self._done += 1
        self._made = []
        if findings.failures:
            self._console.print(_line(findings))

    def view(self) -> Text:
        """What is to be seen now."""
        seconds = time.monotonic() - self._began_s
        left = f", about {seconds / self._done * (self._total - self._done):.0f} s left" if self._done else ""
        made = ", ".join(self._made)
        return Text(printable(f"{self._done}/{self._total} in {seconds:.0f} s{left} - {self._now}: {made} ..."))


def _line(findings: Findings) -> str:
    told = f"failed: {', '.join(findings.failures)}" if findings.failures else "passed"
    return printable(f"{findings.workers} {findings.where:<9}  {findings.seconds:5.1f} s  {told}  {findings.strategy}")


@contextmanager
def watching(total: int) -> Iterator[Watcher]:
    """A live view on a terminal; lines elsewhere. On stderr, so that results can be piped."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        yield _PlainWatcher(total)
        return
    watcher = _LiveWatcher(total, console)
    with Live(console=console, transient=True, refresh_per_second=4, get_renderable=watcher.view):
        yield watcher


def findings_tables(findings: Sequence[Findings]) -> list[Text | Table]:
    """A headline and a table of checks for each number of workers."""
    sections: list[Text | Table] = []
    for one in findings:
        headline = f"{one.strategy}, {one.workers} workers ({_WHERE[one.where]}), {one.seconds:.1f} s"
        table = plain_table("check", "verdict", "what was seen")
        for name, outcome in one.outcomes.items():
            table.add_row(name, Text(outcome.verdict, style=_STYLES[outcome.verdict]), printable(outcome.words))
        sections += [Text(headline, style="bold"), table]
    failures = sum(len(one.failures) for one in findings)
    total = "Nothing that is promised is missing." if not failures else f"{failures} checks failed."
    return [*sections, Text(total, style="bold green" if not failures else "bold red")]


def matrix_table(matrix: Sequence[Cell], findings: Sequence[Findings]) -> list[Text | Table]:
    """One table with a row per entry and a column per check, then what failed, and why some entries are others."""
    table = plain_table("strategy", *CHECKS)
    notes: dict[str, list[str]] = {}
    heading = ""
    for cell in matrix:
        *first, what = cell.asked.split(" / ")
        if " / ".join(first) != heading:
            heading = " / ".join(first)
            table.add_row(Text(heading, style="bold"))
        if cell.strategy is None:
            table.add_row(f"  {what}", Text("refused", style="dim"))
            notes.setdefault(f"refused: {cell.reason}", []).append(cell.asked)
            continue
        if cell.reason is not None:
            what = f"{cell.strategy.architecture} / {cell.strategy.compression}"
            notes.setdefault(f"checked as {what}: {cell.reason}", []).append(cell.asked)
        own = [one for one in findings if one.strategy == str(cell.strategy)]
        table.add_row(f"  {what}", *(_mark(own, name) for name in CHECKS))
    counts = ", ".join(dict.fromkeys(f"{one.workers} {one.where}" for one in findings))
    seconds = sum(one.seconds for one in findings)
    failures = [
        Text(f"{one.strategy}, {one.workers} {one.where}: {name}: {words}", style="red")
        for one in findings
        for name, words in one.failures.items()
    ]
    made = sum(outcome.verdict != "not applicable" for one in findings for outcome in one.outcomes.values())
    summary = f"{made} checks of {len(findings)} runs ({counts}) in {seconds:.0f} s, {len(failures)} failed."
    style = "bold green" if not failures else "bold red"
    told = "\n".join(f"{', '.join(asked)} - {words}." for words, asked in notes.items())
    return [table, *failures, Text(summary, style=style), Text(told, style="dim")]


def _mark(findings: Sequence[Findings], check: str) -> Text:
    """One word for all numbers of workers."""
    bad = [one.workers for one in findings if one.outcomes[check].verdict == "failed"]
    if bad:
        return Text(f"FAILED {','.join(map(str, bad))}", style=_STYLES["failed"])
    if all(one.outcomes[check].verdict == "not applicable" for one in findings):
        return Text("-", style=_STYLES["not applicable"])
    return Text("ok", style=_STYLES["passed"])
