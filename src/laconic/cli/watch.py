"""`laconic watch EVENTS.jsonl`: how a run is going, from its event log, while the log grows.

With --json, one object per line:

    {"strategy": str, "link": str, "world_size": int,     null where the log does not say, as below
     "step": int,                                         -1: no step has been made
     "steps_per_s", "step_s", "compute_s", "wait_s", "sent_bytes",      means over ranks and the last 20 steps
     "loss", "relative_error", "slowest_rank", "slowest_compute_s",
     "events": int, "unreadable_lines": int, "quiet_s": float}

Times and bytes are those of one step on one rank. quiet_s is the age of the last event. A number that is not finite
(a loss that diverged) is null.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from laconic.cli.options.watch import Arguments
from laconic.cli.terminal import emit, emit_sections, plain_table, printable, stdout_console
from laconic.cli.watch_state import RankState, Summary, WatchState
from laconic.errors import UsageError, one_line
from laconic.report.strict_json import strict
from laconic.units import human_bytes, human_seconds, parse_quantity

_POLL_S = 0.5
_QUIET_S = 10.0
"""The view says so if the log has not grown for this long."""
_MOST_ROWS = 16
_NAME = "events.jsonl"


def run(arguments: Arguments) -> int:
    """Show the log until Ctrl-C, or once."""
    every_s = parse_quantity(arguments.every, "time", "--every")
    if every_s <= 0:
        raise UsageError(f"watch: --every must be longer than 0 s, got {arguments.every}.")
    log = GrowingLog(_find(arguments.log))
    log.read()
    if arguments.once:
        log.state.complete()
        _check_it_is_a_log(log)
        _print_once(log, as_json=arguments.json)
    elif stdout_console().is_terminal and not arguments.json:
        _show(log)
    else:
        _print_lines(log, every_s, as_json=arguments.json)
    return 0


class GrowingLog:
    """A file that another process appends lines to, and what they say."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = WatchState()
        self._offset = 0
        self._rest = b""
        """The beginning of a line that is being written."""

    def read(self) -> bool:
        """Take the lines that have come since the last time; False: none."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._offset:  # another run has begun the file anew
                    self.state, self._offset, self._rest = WatchState(), 0, b""
                file.seek(self._offset)
                grown = file.read()
        except OSError as exc:
            raise UsageError(f"watch: cannot read {one_line(self.path, 120)}: {exc.strerror}.") from exc
        self._offset += len(grown)
        *lines, self._rest = (self._rest + grown).split(b"\n")
        for line in lines:
            self.state.take_line(line.decode("utf-8", "replace"))
        return bool(lines)

    def quiet_s(self) -> float:
        """Seconds since something was written."""
        return max(0.0, time.time() - self.path.stat().st_mtime)


def _find(given: str) -> Path:
    path = Path(given)
    try:
        path = path / _NAME if path.is_dir() else path
        exists = path.is_file()
    except (OSError, ValueError) as exc:
        raise UsageError(f"watch: cannot read {one_line(given, 120)}: {one_line(exc)}.") from exc
    if not exists:
        raise UsageError(
            f"watch: there is no file {one_line(path, 120)}. A run writes one with "
            'laconic.attach(..., events=laconic.EventLog("events.jsonl")); comparisons keep theirs in runs/.'
        )
    return path


def _check_it_is_a_log(log: GrowingLog) -> None:
    """Raise for a file that holds lines, but no event."""
    if log.state.num_unreadable and not log.state.num_events:
        raise UsageError(
            f"watch: {one_line(log.path, 120)} is no event log: {log.state.first_unreadable} "
            "Give a file that a laconic.EventLog has written."
        )


def _show(log: GrowingLog) -> None:
    """A view on a terminal that is drawn again twice a second."""
    _check_it_is_a_log(log)
    console = stdout_console()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(Group(*_sections(log)), refresh=True)
            time.sleep(_POLL_S)
            log.read()
            _check_it_is_a_log(log)


def _print_lines(log: GrowingLog, every_s: float, *, as_json: bool) -> None:
    """A line now, and another every few seconds, if the log has grown."""
    grown = True
    while True:
        _check_it_is_a_log(log)
        if grown:
            emit(f"{_as_json(log) if as_json else _line(log)}\n")
        time.sleep(every_s)
        grown = log.read()


def _print_once(log: GrowingLog, *, as_json: bool) -> None:
    if as_json:
        emit(f"{_as_json(log)}\n")
    else:
        emit_sections(*_sections(log))


def _as_json(log: GrowingLog) -> str:
    counts = {"events": log.state.num_events, "unreadable_lines": log.state.num_unreadable}
    found = {**dataclasses.asdict(log.state.summary()), **counts, "quiet_s": round(log.quiet_s(), 1)}
    return json.dumps(strict(found), allow_nan=False)


def _line(log: GrowingLog) -> str:
    return "  ".join([*_words(log.state.summary()), *_problems(log)])


def _words(summary: Summary) -> Iterator[str]:
    """The run in a few words."""
    if summary.step < 0:
        yield "no step yet"
        return
    yield f"step {summary.step}"
    if summary.steps_per_s is not None:
        yield f"{summary.steps_per_s:.3g} steps/s"
    if summary.step_s is not None and summary.compute_s is not None:
        yield f"compute {human_seconds(summary.compute_s)}"
        if summary.wait_s is not None:
            share = f" ({summary.wait_s / summary.step_s:.0%})" if summary.step_s else ""
            yield f"wait {human_seconds(summary.wait_s)}{share}"
    if summary.sent_bytes is not None:
        yield f"{human_bytes(summary.sent_bytes)}/step"
    if summary.loss is not None:
        yield f"loss {summary.loss:.4g}"
    if summary.relative_error is not None:
        yield f"residual {summary.relative_error:.1%}"
    if summary.slowest_rank is not None:
        yield f"slowest rank {summary.slowest_rank} (compute {human_seconds(summary.slowest_compute_s or 0.0)})"


def _problems(log: GrowingLog) -> Iterator[str]:
    if (quiet_s := log.quiet_s()) > _QUIET_S:
        yield f"no event for {quiet_s:.0f} s"
    if log.state.num_unreadable:
        yield printable(f"{log.state.num_unreadable} lines left out: {log.state.first_unreadable}")


def _sections(log: GrowingLog) -> list[Text | Group]:
    """Headline, the run as a whole, a row per rank, and what is wrong."""
    summary = log.state.summary()
    about = [summary.strategy or "", summary.link or "", f"{summary.world_size} ranks" if summary.world_size else ""]
    headline = ", ".join(printable(part) for part in about if part) or printable(str(log.path))
    sections: list[Text | Group] = [Text(headline, style="bold"), Text("  ".join(_words(summary)))]
    if log.state.ranks:
        sections.append(Group(*_rank_table(log)))
    problems = list(_problems(log))
    return [*sections, *([Text("\n".join(problems), style="yellow")] if problems else [])]


def _rank_table(log: GrowingLog) -> Iterator[RenderableType]:
    headers = ("rank", "step", "time/step", "compute", "wait", "encode", "decode", "sent/step", "loss", "residual")
    table = plain_table(*headers, numbers=headers)
    slowest_first = sorted(log.state.ranks.values(), key=lambda rank: -(rank.compute_s or 0.0))
    shown = sorted(slowest_first[:_MOST_ROWS], key=lambda rank: rank.rank)
    for rank in shown:
        table.add_row(str(rank.rank), str(rank.step) if rank.step >= 0 else "-", *_cells(rank))
    yield table
    if len(slowest_first) > _MOST_ROWS:
        yield Text(f"and {len(slowest_first) - _MOST_ROWS} ranks that compute faster", style="dim")


def _cells(rank: RankState) -> Iterator[str]:
    for seconds in (rank.mean("step_s"), rank.compute_s, *map(rank.mean, ("wait_s", "encode_s", "decode_s"))):
        yield "-" if seconds is None else human_seconds(seconds)
    sent_bytes = rank.mean("sent_bytes")
    yield "-" if sent_bytes is None else human_bytes(sent_bytes)
    yield "-" if rank.loss is None else f"{rank.loss:.4g}"
    yield "-" if rank.relative_error is None else f"{rank.relative_error:.1%}"
