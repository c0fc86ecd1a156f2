"""How `compare` and `replay` look: a live table on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from laconic.cli.terminal import plain_table, printable, stdout_console
from laconic.experiments.comparison import Comparison, short_name
from laconic.experiments.contest import BLOCK_STEPS
from laconic.experiments.rank_messages import Progress, Refusal
from laconic.experiments.run import Watcher
from laconic.report.results import Links, Results, Row, baseline_of
from laconic.units import human_bytes

_LINKS: dict[Links, str] = {
    "shaped": "virtual hosts behind shaped links",
    "paced": "paced in software: laconic holds itself back, the links are not real",
    "unlimited": "processes side by side, no bandwidth limit",
}


@dataclass
class _Contest:
    """The progress of the running contest."""

    link: str
    links: Links
    began_s: float
    latest: dict[int, Progress] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    """Contenders that do not take part."""
    current: int | None = None
    """The contender whose turn it is."""

    def take(self, progress: Progress) -> None:
        """Remember a step."""
        self.latest[progress.contender] = progress
        self.current = progress.contender

    def seconds_left(self, comparison: Comparison) -> float | None:
        """An estimate, once every contender has had a turn."""
        if len(self.latest) + len(self.refused) < len(comparison.contenders):
            return None
        left = 0.0
        for progress in self.latest.values():
            if comparison.steps is not None:
                left += (comparison.steps - progress.step) * progress.seconds / progress.step
            else:
                left += max(0.0, (comparison.seconds or 0.0) - progress.seconds)
        trained = sum(progress.seconds for progress in self.latest.values())
        # Turns cost more than their steps: a pass without communication, barriers, start-up.
        return left * (time.monotonic() - self.began_s) / max(trained, 1e-9)


class _PlainWatcher:
    """A line per turn on stderr."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._contest = _Contest("", "unlimited", 0.0)

    def begin(self, link: str, links: Links) -> None:
        """Say where the contest takes place."""
        self._contest = _Contest(link, links, time.monotonic())
        self.note(f"{link}: {_LINKS[links]}")

    def step(self, link: str, progress: Progress) -> None:
        """A line at the end of each turn."""
        self._contest.take(progress)
        if progress.step % BLOCK_STEPS and progress.step != self._comparison.steps:
            return
        goal = f"/{self._comparison.steps}" if self._comparison.steps is not None else ""
        parts = [f"{link:>9} step {progress.step:>3}{goal}", f"{progress.step_ms:8.1f} ms"]
        parts += [f"loss {progress.loss:.4f}"] if progress.loss is not None else []
        parts += [f"{human_bytes(progress.wire_bytes)}/step"] if progress.wire_bytes is not None else []
        left_s = self._contest.seconds_left(self._comparison)
        parts += [f"{left_s:.0f} s left"] if left_s is not None else []
        self.note("  ".join([*parts, short_name(self._comparison.contenders[progress.contender])]))

    def refuse(self, link: str, refusal: Refusal) -> None:
        """A line with the reason."""
        self._contest.refused.add(refusal.contender)
        self.note(_left_out(link, short_name(self._comparison.contenders[refusal.contender]), refusal.reason))

    def note(self, text: str) -> None:
        """One line."""
        print(printable(text), file=sys.stderr, flush=True)


class _LiveWatcher:
    """A table on the terminal that is drawn again several times a second."""

    def __init__(self, comparison: Comparison, console: Console) -> None:
        self._comparison = comparison
        self._console = console
        self._contest: _Contest | None = None

    def begin(self, link: str, links: Links) -> None:
        """Start with an empty table."""
        self._contest = _Contest(link, links, time.monotonic())

    def step(self, link: str, progress: Progress) -> None:
        """Remember the step for the next drawing."""
        assert self._contest is not None
        self._contest.take(progress)

    def refuse(self, link: str, refusal: Refusal) -> None:
        """A line with the reason, and no place in the table."""
        assert self._contest is not None
        self._contest.refused.add(refusal.contender)
        self.note(_left_out(link, short_name(self._comparison.contenders[refusal.contender]), refusal.reason))

    def note(self, text: str) -> None:
        """A line above the table."""
        self._console.print(printable(text))

    def view(self) -> Text | Group:
        """The current table."""
        comparison, contest = self._comparison, self._contest
        if contest is None:
            return Text("looking at what this machine allows ...", style="dim")
        numbers = ("step", "ms/step", "loss", "sent/step", "training time")
        table = plain_table("strategy", *numbers, numbers=numbers)
        for number, strategy in enumerate(comparison.contenders):
            if number in contest.refused:
                continue
            progress = contest.latest.get(number)
            name = Text(short_name(strategy), style="bold" if number == contest.current else "")
            if progress is None:
                table.add_row(name, "-", "", "", "", "")
                continue
            goal = f"/{comparison.steps}" if comparison.steps is not None else ""
            table.add_row(
                name,
                f"{progress.step}{goal}",
                f"{progress.step_ms:.0f}",
                "" if progress.loss is None else f"{progress.loss:.4f}",
                "" if progress.wire_bytes is None else human_bytes(progress.wire_bytes),
                f"{progress.seconds:.1f} s",
            )
        return Group(Text(self._headline(contest), style="bold"), table)

    def _headline(self, contest: _Contest) -> str:
        comparison = self._comparison
        names = [network.name for network in comparison.networks]
        to_go = len(names) - names.index(contest.link) - 1
        parts = [f"{contest.link}, {_LINKS[contest.links]}", f"{time.monotonic() - contest.began_s:.0f} s"]
        left_s = contest.seconds_left(comparison)
        parts.append("starting" if not contest.latest else "" if left_s is None else f"about {left_s:.0f} s left")
        parts.append(f"{to_go} more link{'s' if to_go > 1 else ''} to go" if to_go else "")
        return " - ".join(part for part in parts if part)


@contextmanager
def watching(comparison: Comparison) -> Iterator[Watcher]:
    """A live view on a terminal; lines elsewhere. On stderr, so that results can be piped."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        yield _PlainWatcher(comparison)
        return
    watcher = _LiveWatcher(comparison, console)
    with Live(console=console, transient=True, refresh_per_second=4, get_renderable=watcher.view):
        yield watcher


def _left_out(link: str, name: str, reason: str) -> str:
    return f"{link}: {name} is left out: {reason}"


def tables(results: Results) -> list[Text | Table]:
    """A table per link with the sentence that says what to use, and one line that says what the columns mean."""
    console = stdout_console()
    sections: list[Text | Table] = []
    for link in dict.fromkeys(row.link for row in results.rows):
        of_link = [row for row in results.rows if row.link == link]
        steps = sorted({row.steps for row in of_link})
        how_many = f"{steps[0]} steps each" if len(steps) == 1 else f"{steps[0]} to {steps[-1]} steps"
        where = "" if link == "unlimited" else f" at {link}"
        headline = f"{results.title}{where} ({_LINKS[of_link[0].links]}), {how_many}"
        sections += [Text(headline, style="bold"), _fitting(of_link, console)]
    sections += [
        Text(_left_out(refused.link, refused.name, refused.reason), style="yellow") for refused in results.refused
    ]
    sections += [Text(sentence, style="bold green") for sentence in results.advice]
    notes = (
        "ms/step: median of the timed steps; their mean where most exchange nothing, and on a GPU the wall clock of "
        "whole turns. exposed: waiting for the network, beyond what the step computes alone. "
        "encode: waiting for one's own compression. sent: bytes each rank sent per step"
    )
    sources = {row.wire_bytes_source for row in results.rows}
    notes += ", as the kernel counted them, headers included; predicted: from formulas, without headers."
    if "kernel" not in sources:
        notes = notes.replace("as the kernel counted them, headers included", "as laconic's transport counted them")
    if any(row.final_loss is not None for row in results.rows):
        notes += " loss: mean over the last tenth of the steps."
    if results.target_loss is not None:
        notes += f" to target: training time until the smoothed loss is {results.target_loss:.4f}."
    return [*sections, Text(notes, style="dim")]


_GIVE_WAY = ("quartiles", "encode", "predicted", "to target")
"""Columns that are left out on a narrow terminal, in this order; results.json and the page have them all."""


def _fitting(rows: Sequence[Row], console: Console) -> Table:
    """The widest table that fits."""
    for count in range(len(_GIVE_WAY) + 1):
        table = _table(rows, without=_GIVE_WAY[:count])
        if console.measure(table, options=console.options.update(width=10_000)).maximum <= console.width:
            break
    return table


def _table(rows: Sequence[Row], without: Sequence[str]) -> Table:
    learns = any(row.final_loss is not None for row in rows)
    columns = ["ms/step", "quartiles", "exposed", "encode", "sent", "predicted"]
    columns += ["loss", "to target"] if learns else []
    columns.append(f"vs {baseline_of(row.strategy for row in rows).removeprefix('torch ')}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    # The longest names take several lines before numbers do: strategies differ at their ends.
    table.add_column("strategy", overflow="fold")
    for column in columns:
        if column not in without:
            table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            f"{row.step_ms:.0f}",
            f"{row.step_ms_low:.0f}..{row.step_ms_high:.0f}",
            f"{row.exposed_ms:.0f}",
            f"{row.encode_ms:.0f}",
            _bytes(row.wire_bytes_per_step),
            _bytes(row.predicted_bytes_per_step),
        ]
        if learns:
            cells.append("-" if row.final_loss is None else f"{row.final_loss:.4f}")
            cells.append("never" if row.seconds_to_target is None else f"{row.seconds_to_target:.1f} s")
        cells.append("-" if row.speedup_over_ddp is None else f"{row.speedup_over_ddp:.2f}x")
        shown = [cell for column, cell in zip(columns, cells, strict=True) if column not in without]
        table.add_row(row.name, *shown)
    return table


def _bytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else human_bytes(num_bytes)
