"""How `simulate` looks: progress while it runs, then tables with the reasons, or JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from laconic.cli.terminal import printable, stdout_console
from laconic.cluster.place import Setting
from laconic.experiments.comparison import short_name
from laconic.losses.steps_needed import BSP_STEPS, StepsNeeded, steps_needed
from laconic.planner.verdict_of_rows import verdict_of_rows
from laconic.simulator.prediction import Prediction
from laconic.simulator.simulation import Simulation
from laconic.simulator.sweep import Row, Sweep
from laconic.units import format_rate, human_bytes, human_seconds

_SILENT_S = 5.0
"""Without a terminal, a line of progress is printed this often."""
_LONG = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
_GIVE_WAY = ("busy", "sent/step", "samples/s", "exposed", "efficiency")
"""Columns a narrow terminal does without, in this order; JSON and the page have them all."""
_NAME_WIDTHS = (40, 24)
"""Widths of strategies' names, which are cut to the second one before a column is left out."""
_WHY_WIDTH = 28
"""The width that reasons need next to the numbers; where there is less, reasons go below the numbers."""


_WHY = "of a step"
_MEANINGS = {
    "step": "a steady one, on average",
    "exposed": "communication that compute waits for",
    "samples/s": "of all workers together",
    "efficiency": "relative to a single worker without communication",
    "sent/step": "payload bytes of one worker",
    "busy": "share of the time in which the network is in use",
    "median (5-95%)": "of steps whose compute times vary as given",
    "steps needed": "for the loss bsp has, from losses of a tiny GPT at equal steps with 4 workers, with the range "
    "that noise and the curve's slope leave",
    "to bsp's loss": f"time to the loss bsp has after {BSP_STEPS} steps; the last line takes losses for a model of "
    "this size instead, so it may name another strategy",
    _WHY: "where its time goes, along the critical path",
}
"""The meaning of each column."""


def simulated(sweep: Sweep, *, keep: list[Simulation] | None = None) -> list[Row]:
    """Run the whole sweep, with progress on stderr: a bar on a terminal, elsewhere a line now and then.

    keep: gets the tasks and times behind every row that was not refused.
    """
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    rows: list[Row] = []
    told_s = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("simulating", total=len(sweep))
        for row, found in sweep.simulations():
            rows.append(row)
            if keep is not None and found is not None:
                keep.append(found)
            progress.update(bar, advance=1, description=f"simulating, {_short(row.setting)}")
            if not console.is_terminal and time.monotonic() - told_s >= _SILENT_S and len(rows) < len(sweep):
                told_s = time.monotonic()
                print(f"simulated {len(rows)} of {len(sweep)}, {_short(row.setting)}", file=sys.stderr, flush=True)
    return rows


def _short(setting: Setting) -> str:
    return f"{format_rate(setting.bandwidth_bps)}, {setting.workers} workers"


def warnings(rows: Sequence[Row], notes: Sequence[str]) -> list[str]:
    """All warnings, each once."""
    predicted = [row.prediction for row in rows if row.prediction is not None]
    return list(dict.fromkeys([*notes, *(text for prediction in predicted for text in prediction.warnings)]))


# -- tables ----------------------------------------------------------------------------------------------------


def tables(sweep: Sweep, rows: Sequence[Row], notes: Sequence[str], *, target: bool) -> list[RenderableType]:
    """One table; in a sweep it groups rows by setting."""
    drawn, shown = _table(sweep, rows, target)
    sections: list[RenderableType] = [_headline(sweep), *drawn]
    refused = list(dict.fromkeys(f"{_name(row)} cannot run here: {row.refused}" for row in rows if row.refused))
    sections += [Text(printable(text), style="yellow") for text in refused]
    meanings = " ".join(f"{column}: {_MEANINGS[column]}." for column in shown)
    if any(needed.is_product for row in rows if target and (needed := steps_needed(row.strategy)) is not None):
        meanings += " *: synchronization and compression were measured separately, their combination was not."
    sections.append(Text(meanings, style="dim"))
    told = [Text(printable(f"Note: {text}"), style="yellow") for text in warnings(rows, notes)]
    verdict = [Text(printable(words), style="bold")] if (words := verdict_of_rows(rows, sweep.workload)) else []
    return [*sections, *_joined(told), *verdict]


def _joined(lines: Sequence[Text]) -> list[Text]:
    """Lines without empty ones between them."""
    return [Text("\n").join(lines)] if lines else []


def _headline(sweep: Sweep) -> Text:
    settings, workload = sweep.settings, sweep.workload
    first = settings[0]
    what = f"{workload.name}, {workload.batch} samples per worker and step, {human_seconds(workload.compute_s)} compute"
    if len(settings) == 1:
        where = f"{first.workers} workers on {first.cluster.name or 'a cluster'}: {first.cluster.describe()}"
    else:
        where = f"{first.cluster.name or 'a cluster'}, {len(settings)} settings; the first: {first.cluster.describe()}"
    return Text(f"{printable(what)}\n{printable(where)}", style="bold")


Cell = Callable[[Row, Prediction], str]


def _rate(per_s: float) -> str:
    """A rate with three digits or more."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _columns(sweep: Sweep, target: bool) -> dict[str, Cell]:
    columns: dict[str, Cell] = {
        "step": lambda _, found: _time(found.step_s),
        "exposed": lambda _, found: _time(found.exposed_s),
        "samples/s": lambda _, found: _rate(found.samples_per_s),
        "efficiency": lambda _, found: f"{found.efficiency:.0%}",
        "sent/step": lambda _, found: human_bytes(found.wire_bytes),
        "busy": lambda _, found: _busy(found),
    }
    if sweep.conditions.noise_ratio:
        columns["median (5-95%)"] = lambda _, found: _spread(found)
    if target:
        columns["steps needed"] = lambda row, _: _steps(steps_needed(row.strategy))
        columns["to bsp's loss"] = lambda row, found: _seconds(steps_needed(row.strategy), found.step_s)
    return columns


def _table(sweep: Sweep, rows: Sequence[Row], target: bool) -> tuple[list[RenderableType], list[str]]:
    """The widest table that fits, with the reasons in a column of their own, or beneath; and the columns it has."""
    console, is_sweep = stdout_console(), len(sweep.settings) > 1
    columns = _columns(sweep, target)
    width = 0
    for dropped, name_width in [(dropped, width) for dropped in ("", *_GIVE_WAY) for width in _NAME_WIDTHS]:
        columns.pop(dropped, None)
        table = _drawn(rows, columns, is_sweep, name_width=name_width)
        width = console.measure(table, options=console.options.update(width=10_000)).maximum
        if width <= console.width:
            break
    # Two spaces stand between columns.
    if (left := console.width - width - 2) >= _WHY_WIDTH:
        return [_drawn(rows, columns, is_sweep, name_width=name_width, why_width=left)], [*columns, _WHY]
    if is_sweep:
        return [table], list(columns)
    lines = [Text(printable(f"{_name(row)}: of a step {_why(row)}")) for row in rows if row.prediction is not None]
    return [table, *_joined(lines)], [*columns, _WHY]


def _drawn(
    rows: Sequence[Row], columns: dict[str, Cell], is_sweep: bool, *, name_width: int, why_width: int = 0
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in ("bandwidth", "workers") if is_sweep else ():
        table.add_column(header, justify="right", no_wrap=True, min_width=len(header))
    # The longest names take a second line before numbers give way.
    table.add_column("strategy", overflow="fold", max_width=name_width)
    cells = [_cells(row, columns) for row in rows]
    for number, header in enumerate(columns):
        needed = max(len(header), *(len(line[number]) for line in cells))
        table.add_column(header, justify="right", no_wrap=True, min_width=needed)
    if why_width:
        table.add_column(_WHY, no_wrap=is_sweep, overflow="ellipsis", max_width=why_width)
    for number, row in enumerate(rows):
        setting = row.setting
        line = [printable(_name(row)), *cells[number], *([_why(row)] if why_width else [])]
        if is_sweep:
            # Said once, where it begins.
            begins = number == 0 or rows[number - 1].setting is not setting
            line = [*([format_rate(setting.bandwidth_bps), str(setting.workers)] if begins else ["", ""]), *line]
        table.add_row(*line)
    return table


def _cells(row: Row, columns: dict[str, Cell]) -> list[str]:
    if row.prediction is None:
        return ["refused", *[""] * (len(columns) - 1)]
    return [cell(row, row.prediction) for cell in columns.values()]


def _name(row: Row) -> str:
    return short_name(str(row.strategy))


def _why(row: Row) -> str:
    if row.prediction is None:
        return ""
    return row.prediction.in_words().removeprefix("Of a step ").removesuffix(".")


def _busy(found: Prediction) -> str:
    """The busiest part of the network, by name where there are several."""
    if not found.busy:
        return "0%"
    name, share = max(found.busy.items(), key=lambda part: part[1])
    return f"{share:.0%}" if len(found.busy) == 1 else f"{name} {share:.0%}"


def _spread(found: Prediction) -> str:
    spread = found.spread
    if spread is None:
        return ""
    unit, factor = ("s", 1.0) if spread.median_s >= 1 else ("ms", 1e-3)
    return _ranged(spread.median_s, spread.low_s, spread.high_s, unit, factor)


def _steps(needed: StepsNeeded | None) -> str:
    if needed is None:
        return "not measured"
    if needed.low == needed.high:
        return f"{needed.ratio:.1f}x"
    return f"{needed.ratio:.1f}x ({needed.low:.1f}-{needed.high:.1f}){' *' if needed.is_product else ''}"


def _seconds(needed: StepsNeeded | None, step_s: float) -> str:
    if needed is None:
        return "not measured"
    found_s, low_s, high_s = needed.seconds(step_s)
    unit, factor = next((unit for unit in _LONG if found_s >= 3 * unit[1]), _LONG[-1])
    return _ranged(found_s, low_s, high_s, unit, factor)


def _ranged(found_s: float, low_s: float, high_s: float, unit: str, factor: float) -> str:
    """A value with its range, as in 4.3 (3.9-5.0) min."""
    digits = 2 if found_s < 10 * factor else 1
    found, low, high = (f"{time_s / factor:,.{digits}f}" for time_s in (found_s, low_s, high_s))
    return f"{found} {unit}" if low == high else f"{found} ({low}-{high}) {unit}"


def _time(seconds: float) -> str:
    """A time with three digits or more."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return human_seconds(seconds) if seconds >= 5e-8 else "0"


# -- JSON ------------------------------------------------------------------------------------------------------


def as_json(sweep: Sweep, rows: Sequence[Row], notes: Sequence[str], *, target: bool) -> dict[str, object]:
    """The document of --json, which laconic.cli.simulate describes."""
    conditions = sweep.conditions
    return {
        "workload": sweep.workload.name,
        "batch": sweep.workload.batch,
        "fidelity": sweep.fidelity,
        "conditions": {
            "slow": {str(rank): factor for rank, factor in (conditions.slow or {}).items()},
            "noise_ratio": conditions.noise_ratio,
            "interference_ratio": conditions.interference_ratio,
            "optimizer_s": conditions.optimizer_s,
        },
        "rows": [_row_as_json(row, target) for row in rows],
        "warnings": warnings(rows, notes),
        "verdict": verdict_of_rows(rows, sweep.workload),
    }


def _row_as_json(row: Row, target: bool) -> dict[str, object]:
    head: dict[str, object] = {
        "name": _name(row),
        "strategy": str(row.strategy),
        "cluster": row.setting.cluster.describe(),
        "workers": row.setting.workers,
        "bandwidth_bps": row.setting.bandwidth_bps,
        "refused": row.refused or None,
    }
    if row.prediction is None:
        return head
    left_out = {*head, "workload", "warnings"}
    found = {key: value for key, value in row.prediction.as_json().items() if key not in left_out}
    if target:
        found["target"] = _target_as_json(steps_needed(row.strategy), row.prediction.step_s)
    return {**head, **found}


def _target_as_json(needed: StepsNeeded | None, step_s: float) -> dict[str, object] | None:
    if needed is None:
        return None
    seconds, low_s, high_s = needed.seconds(step_s)
    return {
        "steps_ratio": needed.ratio,
        "steps_ratio_low": needed.low,
        "steps_ratio_high": needed.high,
        "seconds": seconds,
        "seconds_low": low_s,
        "seconds_high": high_s,
        "is_product": needed.is_product,
        "because": needed.because,
    }
