"""One offline HTML page for one or several runs.

Python reads the folders, writes the tables and hands all numbers to the page as JSON; page.js draws the figures from
the parts in figures.js, with plotly.js, which is embedded in the page. The page loads nothing: its own security policy
forbids it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from laconic.errors import LaconicError, one_line
from laconic.report.figure_data import DrawnRun, Place, document, inks, places
from laconic.report.ink import Ink
from laconic.report.results import Results, Row, baseline_of
from laconic.report.run_folder import RunFolder
from laconic.report.sentences import milliseconds
from laconic.report.standalone_html import render_page
from laconic.report.timeline import StepTimeline, typical_steps
from laconic.units import human_bytes


@dataclass(frozen=True, kw_only=True)
class _Run:
    letter: str
    label: str
    results: Results
    config: str | None
    environment: tuple[tuple[str, str], ...]
    timelines: tuple[StepTimeline, ...]
    notices: tuple[str, ...]
    """What is wrong with this run or its files."""


@dataclass(frozen=True, kw_only=True)
class _Line:
    """One line of a table."""

    row: Row
    ink: Ink
    is_fastest: bool
    is_first_at_target: bool
    bar_percent: float
    """Its speed-up as a percentage of the largest in the table."""


@dataclass(frozen=True, kw_only=True)
class _Table:
    run: _Run
    run_number: int
    place: Place
    place_number: int
    lines: tuple[_Line, ...]


def render(runs: Sequence[RunFolder]) -> str:
    """The page as text; several runs share their figures."""
    loaded = [_load(run, label, letter) for run, label, letter in zip(runs, _labels(runs), _letters(), strict=False)]
    rows = [row for run in loaded for row in run.results.rows]
    looks, where = inks(rows), places(rows)
    drawing = document([DrawnRun(run.letter, run.label, run.results, run.timelines) for run in loaded])
    filters = {"bytes": human_bytes, "ms": milliseconds, "duration": _duration, "loss": _loss, "date": _date}
    values = {
        "title": _title(loaded),
        "runs": loaded,
        "ddp": baseline_of(row.strategy for row in rows),
        "inks": list(looks.values()),
        "places": where,
        "tables": _tables(loaded, where, looks),
        "has_loss": any(row.final_loss is not None for row in rows),
        "has_target": any(run.results.target_loss is not None for run in loaded),
        "has_encode": any(row.encode_ms > 0 for row in rows),
        "has_loss_curves": any(curve.loss for run in loaded for curve in run.results.curves),
        "has_byte_curves": any(curve.loss and curve.wire_bytes for run in loaded for curve in run.results.curves),
        "has_bytes": any(row.wire_bytes_per_step is not None for row in rows),
        "has_timelines": bool(drawing["timelines"]),
        "ranks": sorted({rank for run in loaded for timeline in run.timelines for rank in timeline.ranks}),
    }
    return render_page("page", drawing, filters, values)


def _load(folder: RunFolder, label: str, letter: str) -> _Run:
    results = folder.results()
    notices: list[str] = [f"The run ended early: {results.problem}"] if results.problem is not None else []
    notices += [f"On {refused.link} {refused.name} was left out: {refused.reason}" for refused in results.refused]
    # A page without the figure or table in question is worth more than no page, if it says what is missing.
    timelines: tuple[StepTimeline, ...] = ()
    try:
        timelines = typical_steps(folder.events)
    except (LaconicError, OSError, UnicodeDecodeError) as exc:
        notices.append(f"The timeline is missing, events.jsonl cannot be read: {one_line(exc)}")
    environment: tuple[tuple[str, str], ...] = ()
    try:
        environment = _as_texts(folder.environment())
    except LaconicError as exc:
        notices.append(f"The environment is missing, env.json cannot be read: {one_line(exc)}")
    has_config = (folder.path / "config.toml").exists()
    return _Run(
        letter=letter,
        label=label,
        results=results,
        config=folder.read_text("config.toml") if has_config else None,
        environment=environment,
        timelines=timelines,
        notices=tuple(notices),
    )


def _tables(runs: Sequence[_Run], where: Sequence[Place], looks: Mapping[str, Ink]) -> list[_Table]:
    tables: list[_Table] = []
    for number, place in enumerate(where):
        for run_number, run in enumerate(runs):
            rows = [row for row in run.results.rows if Place(row.link, row.links) == place]
            if rows:
                lines = _lines(rows, looks)
                tables.append(_Table(run=run, run_number=run_number, place=place, place_number=number, lines=lines))
    return tables


def _lines(rows: Sequence[Row], looks: Mapping[str, Ink]) -> tuple[_Line, ...]:
    fastest = min(rows, key=lambda row: row.step_ms)
    at_target = [row for row in rows if row.seconds_to_target is not None]
    first = min(at_target, key=lambda row: row.seconds_to_target or 0.0, default=None)
    top = max((row.speedup_over_ddp or 0.0 for row in rows), default=0.0)
    return tuple(
        _Line(
            row=row,
            ink=looks[row.strategy],
            is_fastest=row is fastest,
            is_first_at_target=row is first,
            bar_percent=round(100 * (row.speedup_over_ddp or 0.0) / top, 1) if top else 0.0,
        )
        for row in rows
    )


def _title(runs: Sequence[_Run]) -> str:
    titles = dict.fromkeys(run.results.title for run in runs)
    return next(iter(titles)) if len(titles) == 1 else f"{len(runs)} runs side by side"


def _labels(runs: Sequence[RunFolder]) -> list[str]:
    """The name of each folder; where two are alike, the path as given."""
    names = [run.path.resolve().name for run in runs]
    return [str(run.path) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]


def _letters() -> Iterator[str]:
    """A, B, ..., Z, A2, B2, ..."""
    return (chr(ord("A") + n % 26) + (str(n // 26 + 1) if n >= 26 else "") for n in count())


def _as_texts(environment: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """One line per entry: its name, and its value as text."""
    return tuple((name.replace("_", " "), _as_text(value)) for name, value in environment.items())


def _as_text(value: object, name: str = "") -> str:
    if isinstance(value, Mapping):
        named = [(str(key), inner) for key, inner in value.items()]
        return ", ".join(
            f"{key.removesuffix('_bytes').replace('_', ' ')}: {_as_text(inner, key)}" for key, inner in named
        )
    if isinstance(value, list):
        return "; ".join(map(_as_text, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("_bytes"):
        return human_bytes(value)
    return "none" if value is None else str(value)


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "diverged"


def _duration(seconds: float) -> str:
    """A time for people: 9.3 s, 10 min 12 s, 3 h 5 min."""
    if not math.isfinite(seconds):
        return "for ever"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min {int(seconds % 60)} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _date(iso: str) -> str:
    """2026-11-15 09:30."""
    return iso[:16].replace("T", " ")
