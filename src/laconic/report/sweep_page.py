"""One offline HTML page about simulated strategies: their cost by number of workers and bandwidth.

The page is made like that of a run: Python writes the tables and hands all numbers over as JSON, sweep_page.js draws
the figures. The data of its figures:

strategies  [{"text", "name", "colour", "symbol"}]
bandwidths  [{"bps", "label"}]                        slow ones first
workers     [number]                                  few first
rows        [{"strategy", "bandwidth", "workers", ...}]    the first three are positions in the lists above
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from laconic.losses.steps_needed import BSP_STEPS, StepsNeeded, steps_needed
from laconic.report.ink import Ink, looks
from laconic.report.standalone_html import render_page
from laconic.simulator.prediction import Prediction
from laconic.simulator.sweep import Row, Sweep
from laconic.strategy import Strategy
from laconic.units import format_rate, human_bytes, human_seconds


@dataclass(frozen=True, kw_only=True)
class _Line:
    """One line of a table."""

    row: Row
    prediction: Prediction | None
    ink: Ink
    needed: StepsNeeded | None
    is_fastest: bool


@dataclass(frozen=True, kw_only=True)
class _Table:
    """All strategies in one setting."""

    cluster: str
    bandwidth: int
    workers: int
    """Bandwidth and workers are positions in the lists of the figures' data."""
    lines: tuple[_Line, ...]


def render(
    sweep: Sweep, rows: Sequence[Row], *, names: Mapping[str, str], warnings: Sequence[str], target: bool
) -> str:
    """The page as text; names: short ones of strategies, by their text."""
    # bsp by an all-reduce is what torch's DDP does, and has its colour.
    inks = looks({text: names.get(text, text) for text in map(str, sweep.strategies)}, str(Strategy()))
    bandwidths = sorted({row.setting.bandwidth_bps for row in rows})
    workers = sorted({row.setting.workers for row in rows})
    drawing = _document(rows, inks, bandwidths, workers, target)
    filters = {"bytes": human_bytes, "seconds": _seconds, "duration": duration}
    cluster = sweep.settings[0].cluster
    values = {
        "title": f"{sweep.workload.name} on {cluster.name or 'a cluster'}",
        "sweep": sweep,
        "conditions": _conditions(sweep),
        "source": cluster.source,
        "inks": list(inks.values()),
        "bandwidths": [format_rate(bandwidth) for bandwidth in bandwidths],
        "workers": workers,
        "tables": _tables(sweep, rows, inks, (bandwidths, workers), target=target),
        "refused": list(dict.fromkeys(f"{inks[str(row.strategy)].name}: {row.refused}" for row in rows if row.refused)),
        "warnings": warnings,
        "has_spread": any(row.prediction is not None and row.prediction.spread is not None for row in rows),
        "target": target,
        "bsp_steps": BSP_STEPS,
    }
    return render_page("sweep_page", drawing, filters, values)


def _document(
    rows: Sequence[Row], inks: Mapping[str, Ink], bandwidths: list[float], workers: list[int], target: bool
) -> dict[str, object]:
    place = {text: number for number, text in enumerate(inks)}
    drawn: list[object] = []
    for row in rows:
        found = row.prediction
        if found is None:
            continue
        drawn.append(
            {
                "strategy": place[str(row.strategy)],
                "bandwidth": bandwidths.index(row.setting.bandwidth_bps),
                "workers": workers.index(row.setting.workers),
                "step_ms": found.step_s * 1e3,
                "compute_ms": min(found.compute_s, found.step_s) * 1e3,
                "exposed_ms": found.exposed_s * 1e3,
                "samples_per_s": found.samples_per_s,
                "efficiency": found.efficiency,
                "spread_ms": None
                if found.spread is None
                else [time_s * 1e3 for time_s in (found.spread.low_s, found.spread.median_s, found.spread.high_s)],
                "why": found.in_words(),
                "target_s": _target(steps_needed(row.strategy), found) if target else None,
            }
        )
    return {
        "strategies": [asdict(ink) for ink in inks.values()],
        "bandwidths": [{"bps": bandwidth, "label": format_rate(bandwidth)} for bandwidth in bandwidths],
        "workers": workers,
        "rows": drawn,
    }


def _target(needed: StepsNeeded | None, found: Prediction) -> list[float] | None:
    """The time to plain DDP's loss, and its range."""
    return None if needed is None else list(needed.seconds(found.step_s))


def _tables(
    sweep: Sweep, rows: Sequence[Row], inks: Mapping[str, Ink], places: tuple[list[float], list[int]], *, target: bool
) -> list[_Table]:
    tables: list[_Table] = []
    bandwidths, workers = places
    for setting in sweep.settings:
        here = [row for row in rows if row.setting is setting]
        steps = [row.prediction.step_s for row in here if row.prediction is not None]
        tables.append(
            _Table(
                cluster=setting.cluster.describe(),
                bandwidth=bandwidths.index(setting.bandwidth_bps),
                workers=workers.index(setting.workers),
                lines=tuple(
                    _Line(
                        row=row,
                        prediction=row.prediction,
                        ink=inks[str(row.strategy)],
                        needed=steps_needed(row.strategy) if target else None,
                        is_fastest=row.prediction is not None and row.prediction.step_s == min(steps),
                    )
                    for row in here
                ),
            )
        )
    return tables


def _conditions(sweep: Sweep) -> list[tuple[str, str]]:
    """The assumptions about compute, in words."""
    conditions = sweep.conditions
    found = [("network", "flow by flow" if sweep.fidelity == "flow" else "formulas and measured tables")]
    if conditions.slow:
        slow = ", ".join(f"rank {rank} takes {factor:g} times as long" for rank, factor in conditions.slow.items())
        found.append(("slow ranks", slow))
    if conditions.noise_ratio:
        found.append(("noise", f"compute times deviate by {conditions.noise_ratio:.3g} of their mean"))
    if conditions.interference_ratio:
        found.append(
            ("interference", f"compute loses {conditions.interference_ratio:.3g} of its speed during communication")
        )
    if conditions.optimizer_s:
        found.append(("optimizer", f"{human_seconds(conditions.optimizer_s)} per step"))
    return found


def _seconds(value: float) -> str:
    """A step's time with three digits or more."""
    if value >= 10:
        return f"{value:,.1f} s"
    if value >= 1:
        return f"{value:.2f} s"
    return human_seconds(value) if value >= 5e-8 else "0"


def duration(seconds: float) -> str:
    """A long time for people: 42 s, 4.3 min, 5.2 h."""
    for unit, factor in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 3 * factor:
            return f"{seconds / factor:,.1f} {unit}"
    return f"{seconds:.0f} s"
