"""The data of the page's figures as one JSON document; page.js draws them.

runs        [{"letter", "label"}]
strategies  [{"text", "name", "colour", "symbol"}]     colour and symbol are names that page.css and plotly.js know
places      [{"link", "links", "label"}]
rows        [{"run", "strategy", "place", ...}]        the first three are positions in the lists above
curves      [{"run", "strategy", "place", "step", "loss", "seconds", "bytes"}]
targets     [{"run", "loss"}]
timelines   [{"run", "strategy", "place", "step", "ranks": {RANK: {"words", "begin", "ms", "spans": [SPAN]}}}]
                                                       SPAN = [kind, start, duration, bucket, bytes, lane, age, half];
                                                       kind is a position in KINDS; times in milliseconds; age as in
                                                       timeline.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from laconic.errors import LaconicError
from laconic.report.ink import Ink, looks
from laconic.report.results import Links, Results, Row, baseline_of
from laconic.report.sentences import in_words
from laconic.report.timeline import COMMUNICATION_KINDS, TRAINING_KINDS, Span, StepTimeline
from laconic.units import parse_quantity

KINDS = TRAINING_KINDS + COMMUNICATION_KINDS
_SHOWN_RANKS = 8
"""A page for a large job stays small enough to open."""
_LINKS_IN_WORDS: dict[Links, str] = {
    "shaped": "shaped",
    "paced": "paced, not shaped",
    "unlimited": "no limit",
}


@dataclass(frozen=True)
class Place:
    """Links of one speed and one kind."""

    link: str
    links: Links

    @property
    def kind(self) -> str:
        """Whether these are real links."""
        return _LINKS_IN_WORDS[self.links]

    @property
    def label(self) -> str:
        """Speed and kind in a few words; a paced link is never shown as if it were shaped."""
        return self.link if self.link == self.links else f"{self.link} ({self.kind})"


@dataclass(frozen=True)
class DrawnRun:
    """One run as the figures need it."""

    letter: str
    label: str
    results: Results
    timelines: tuple[StepTimeline, ...]


def inks(rows: Iterable[Row]) -> dict[str, Ink]:
    """One look per strategy, by its full text; the baseline always has the same."""
    names = {row.strategy: row.name for row in rows}
    return looks(names, baseline_of(names))


def places(rows: Iterable[Row]) -> list[Place]:
    """Every kind of link, slow ones first."""
    return sorted({Place(row.link, row.links): None for row in rows}, key=_speed)


def document(runs: Sequence[DrawnRun]) -> dict[str, object]:
    """The data of all figures."""
    rows = [row for run in runs for row in run.results.rows]
    strategies, where = inks(rows), places(rows)
    strategy_number = {text: number for number, text in enumerate(strategies)}
    # A curve and an event name the link only; what kind of link it is stands in the rows of the same run.
    kinds = [{row.link: where.index(Place(row.link, row.links)) for row in run.results.rows} for run in runs]

    def placed(run: int, strategy: str, link: str) -> dict[str, object] | None:
        if strategy not in strategy_number or link not in kinds[run]:
            return None
        return {"run": run, "strategy": strategy_number[strategy], "place": kinds[run][link]}

    drawn_rows: list[object] = []
    curves: list[object] = []
    timelines: list[object] = []
    for number, run in enumerate(runs):
        for row in run.results.rows:
            at = placed(number, row.strategy, row.link)
            drawn_rows.append({**(at or {}), **_numbers(row)})
        for curve in run.results.curves:
            at = placed(number, curve.strategy, curve.link)
            if at is not None:
                drawn = {"loss": _six_digits(curve.loss), "seconds": _six_digits(curve.seconds)}
                curves.append({**at, "step": curve.step, **drawn, "bytes": curve.wire_bytes})
        for timeline in run.timelines:
            at = placed(number, timeline.strategy, timeline.link)
            if at is not None:
                timelines.append({**at, **_timeline(timeline)})
    targets = [
        {"run": number, "loss": run.results.target_loss}
        for number, run in enumerate(runs)
        if run.results.target_loss is not None
    ]
    return {
        "runs": [{"letter": run.letter, "label": run.label} for run in runs],
        "strategies": [asdict(ink) for ink in strategies.values()],
        "ddp": baseline_of(strategies),
        "places": [{"link": place.link, "links": place.links, "label": place.label} for place in where],
        "rows": drawn_rows,
        "curves": curves,
        "targets": targets,
        "kinds": KINDS,
        "timelines": timelines,
    }


def _numbers(row: Row) -> dict[str, object]:
    return {
        "step_ms": row.step_ms,
        "low_ms": row.step_ms_low,
        "high_ms": row.step_ms_high,
        "compute_ms": row.compute_ms,
        "encode_ms": row.encode_ms,
        "exposed_ms": row.exposed_ms,
        "wire_bytes": row.wire_bytes_per_step,
        "source": row.wire_bytes_source,
        "counted_bytes": row.counted_bytes_per_step,
        "predicted_bytes": row.predicted_bytes_per_step,
        "speedup": row.speedup_over_ddp,
    }


def _six_digits(values: Iterable[float | None]) -> list[float | None]:
    """More digits than can be seen; all digits of long curves would be most of a page."""
    return [None if value is None else float(f"{value:.6g}") for value in values]


def _timeline(timeline: StepTimeline) -> dict[str, object]:
    ranks = dict(list(timeline.ranks.items())[:_SHOWN_RANKS])
    return {
        "step": timeline.step,
        "ranks": {
            str(rank): {
                "words": in_words(step, timeline.step, timeline.strategy),
                "begin": round(step.begin_s * 1e3, 3),
                "ms": round(step.duration_s * 1e3, 3),
                "spans": [_span(span) for span in step.spans],
            }
            for rank, step in ranks.items()
        },
    }


def _span(span: Span) -> list[object]:
    start_ms, duration_ms = round(span.start_s * 1e3, 3), round(span.duration_s * 1e3, 3)
    about = [span.bucket, span.wire_bytes, span.lane, span.age, span.half]
    return [KINDS.index(span.kind), start_ms, duration_ms, *about]


def _speed(place: Place) -> float:
    try:
        return parse_quantity(place.link, "rate", "link")
    except LaconicError:
        # A cluster file has no one rate; like "unlimited" it stands last, in the order in which it came.
        return math.inf
