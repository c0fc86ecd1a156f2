"""How `verify` looks: a line or a live view while checks are made, tables at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from laconic.cli.terminal import plain_table, printable
from laconic.experiments.verification import PLACES, Findings, Matrix, Outcome, PairVerdict, Verdict, Where

_STYLES: dict[Verdict, str] = {"passed": "green", "failed": "bold red", "not applicable": "dim"}
_PAIR_STYLES: dict[PairVerdict, str] = {
    "passed": "green",
    "refused": "dim",
    "failed": "bold red",
    "not reached": "yellow",
}
_WHERE: dict[Where, str] = {"threads": "threads of one process", "processes": "processes over Gloo"}


class Watcher(Protocol):
    """Receives the progress of the checks."""

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
        """Nothing is shown before the first outcome of a strategy."""

    def check(self, name: str, outcome: Outcome) -> None:
        """Nothing is shown before all checks of a strategy are done."""

    def end(self, findings: Findings) -> None:
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
        now = f"{strategy}, {workers} {where}"
        if now != self._now:
            self._now, self._made = now, []

    def check(self, name: str, outcome: Outcome) -> None:
        self._made.append(name)

    def end(self, findings: Findings) -> None:
        self._done += 1
        self._made = []
        if findings.failures:
            self._console.print(_line(findings))

    def view(self) -> Text:
        """The current view."""
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


def findings_tables(findings: Sequence[Findings], *, stopped: bool) -> list[Text | Table]:
    """A headline and a table of checks for each number of workers."""
    sections: list[Text | Table] = []
    for one in findings:
        headline = f"{one.strategy}, {one.workers} workers ({_WHERE[one.where]}), {one.seconds:.1f} s"
        table = plain_table("check", "verdict", "what was seen")
        for name, outcome in one.outcomes.items():
            table.add_row(name, Text(outcome.verdict, style=_STYLES[outcome.verdict]), printable(outcome.words))
        sections += [Text(headline, style="bold"), table]
    failures = sum(len(one.failures) for one in findings)
    total = "All promises are kept." if not failures else f"{failures} checks failed."
    if stopped:
        total = f"Stopped by Ctrl-C before all checks were made. {total if failures else ''}".rstrip()
    return [*sections, Text(total, style=_style(failures, stopped=stopped))]


def matrix_tables(pairs: Matrix, findings: Sequence[Findings], *, stopped: bool) -> list[Text | Table]:
    """How many pairs of methods passed, were refused and failed; by which rules; and what failed."""
    verdicts = pairs.verdicts(findings)
    shown = [verdict for verdict in _PAIR_STYLES if verdict != "not reached" or verdict in verdicts.values()]
    table = plain_table("methods", "pairs", *shown, numbers=["pairs", *shown])
    for one, other in combinations(PLACES, 2):
        found = [told for (left, right), told in verdicts.items() if (left.place, right.place) == (one, other)]
        table.add_row(f"{one} x {other}", str(len(found)), *(_count(found, verdict) for verdict in shown))
    found = list(verdicts.values())
    table.add_row("all", str(len(found)), *(_count(found, verdict) for verdict in shown), style="bold")
    rules = plain_table("refused by design", "pairs", "for example", numbers=["pairs"])
    by_rule: dict[str, list[str]] = {}
    for refused in pairs.refused.values():
        by_rule.setdefault(refused.rule, []).append(refused.reason)
    for rule, reasons in sorted(by_rule.items(), key=lambda entry: -len(entry[1])):
        rules.add_row(printable(rule), str(len(reasons)), Text(printable(reasons[0]), style="dim"))
    failures = [
        Text(printable(f"{one.strategy}, {one.workers} {one.where}: {name}: {words}"), style="red")
        for one in findings
        for name, words in one.failures.items()
    ]
    counts = ", ".join(dict.fromkeys(f"{one.workers} {one.where}" for one in findings))
    seconds = sum(one.seconds for one in findings)
    made = sum(outcome.verdict != "not applicable" for one in findings for outcome in one.outcomes.values())
    verified = len({one.strategy for one in findings})
    summary = (
        f"{verified} of {len(pairs.rows)} strategies, {made} checks ({counts or 'none'}), {seconds:.0f} s of checks, "
        f"{len(failures)} failed."
    )
    if stopped:
        summary = f"Stopped by Ctrl-C: {summary}"
    return [table, rules, *failures, Text(summary, style=_style(len(failures), stopped=stopped))]


def _style(failures: int, *, stopped: bool) -> str:
    return "bold red" if failures else "bold yellow" if stopped else "bold green"


def _count(verdicts: Sequence[PairVerdict], verdict: PairVerdict) -> Text:
    number = verdicts.count(verdict)
    return Text(str(number), style=_PAIR_STYLES[verdict] if number else "dim")
