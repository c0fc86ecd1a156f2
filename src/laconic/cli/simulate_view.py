"""How `simulate` looks: progress while it runs, then tables with the reasons, or JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from laconic.cli.terminal import printable, stdout_console
from laconic.experiments.comparison import short_name
from laconic.simulator.prediction import Prediction
from laconic.simulator.sweep import Row, Setting, Sweep
from laconic.simulator.time_to_target import BSP_STEPS, StepsNeeded, steps_needed
from laconic.units import format_rate, human_bytes, human_seconds

_SILENT_S = 5.0
"""Without a terminal, a line of progress so often."""
_WHY_WIDTH = 32
"""Columns that reasons need beside the numbers; with less they go beneath them."""


def simulated(sweep: Sweep) -> list[Row]:
    """Run all of it; on a terminal with a bar, elsewhere with a line now and then, both on stderr."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        return list(_with_lines(sweep))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    rows: list[Row] = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=len(sweep))
        for row in sweep.rows():
            rows.append(row)
            progress.update(task, advance=1, description=f"simulating, {_short(row.setting)}")
    return rows


def _with_lines(sweep: Sweep) -> Iterator[Row]:
    told_s = time.monotonic()
    for number, row in enumerate(sweep.rows(), start=1):
        yield row
        if time.monotonic() - told_s >= _SILENT_S and number < len(sweep):
            told_s = time.monotonic()
            print(f"simulated {number} of {len(sweep)}, {_short(row.setting)}", file=sys.stderr, flush=True)


def _short(setting: Setting) -> str:
    return f"{format_rate(setting.bandwidth_bps)}, {setting.workers} workers"


def warnings(rows: Sequence[Row], notes: Sequence[str]) -> list[str]:
    """All of them, each once."""
    predicted = [row.prediction for row in rows if row.prediction is not None]
    return list(dict.fromkeys([*notes, *(text for prediction in predicted for text in prediction.warnings)]))


# -- tables ----------------------------------------------------------------------------------------------------


def tables(sweep: Sweep, rows: Sequence[Row], notes: Sequence[str], *, target: bool) -> list[RenderableType]:
    """One table; in a sweep each setting's rows stand together in it."""
    sections: list[RenderableType] = [_headline(sweep), *_table(sweep, rows, target)]
    refused = list(dict.fromkeys(f"{_name(row)} cannot run here: {row.refused}" for row in rows if row.refused))
    sections += [Text(printable(text), style="yellow") for text in refused]
    sections.append(Text(_meaning(sweep, rows, target), style="dim"))
    told = [Text(printable(f"Note: {text}"), style="yellow") for text in warnings(rows, notes)]
    return [*sections, *_joined(told)]


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


def _columns(sweep: Sweep, target: bool) -> dict[str, Cell]:
    columns: dict[str, Cell] = {
        "step": lambda _, found: human_seconds(found.step_s),
        "exposed": lambda _, found: human_seconds(found.exposed_s) if found.exposed_s >= 5e-8 else "0",
        "samples/s": lambda _, found: f"{found.samples_per_s:,.0f}",
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


def _table(sweep: Sweep, rows: Sequence[Row], target: bool) -> list[RenderableType]:
    """With the reasons in a column of their own, or beneath where that is too narrow."""
    console = stdout_console()
    is_sweep = len(sweep.settings) > 1
    columns = _columns(sweep, target)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in ("bandwidth", "workers") if is_sweep else ():
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("strategy", overflow="ellipsis", no_wrap=True, max_width=40)
    for header in columns:
        table.add_column(header, justify="right", no_wrap=True)
    cells = [_cells(row, columns, previous, is_sweep) for row, previous in zip(rows, [None, *rows], strict=False)]
    for line in cells:
        table.add_row(*line)
    width = console.measure(table, options=console.options.update(width=10_000)).maximum
    whys = [_why(row) for row in rows]
    if console.width - width >= _WHY_WIDTH:
        table.add_column("of a step", no_wrap=is_sweep, overflow="ellipsis" if is_sweep else "fold")
        # rich has no way to fill a column of rows that are there.
        full = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        full.columns = [column.copy() for column in table.columns]
        for line, why in zip(cells, whys, strict=True):
            full.add_row(*line, why)
        return [full]
    if is_sweep:
        return [table]
    lines = [Text(printable(f"{_name(row)}: of a step {why}")) for row, why in zip(rows, whys, strict=True) if why]
    return [table, *_joined(lines)]


def _cells(row: Row, columns: dict[str, Cell], previous: Row | None, is_sweep: bool) -> list[str]:
    setting = row.setting
    cells: list[str] = []
    if is_sweep:
        is_first = previous is None or previous.setting is not setting
        cells += [format_rate(setting.bandwidth_bps), str(setting.workers)] if is_first else ["", ""]
    cells.append(printable(_name(row)))
    if row.prediction is None:
        return [*cells, "refused", *[""] * (len(columns) - 1)]
    return [*cells, *(cell(row, row.prediction) for cell in columns.values())]


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
    return f"{human_seconds(spread.median_s)} ({human_seconds(spread.low_s)}-{human_seconds(spread.high_s)})"


def _steps(needed: StepsNeeded | None) -> str:
    if needed is None:
        return "not measured"
    if needed.low == needed.high:
        return f"{needed.ratio:.1f}x"
    return f"{needed.ratio:.1f}x ({needed.low:.1f}-{needed.high:.1f}){' *' if needed.is_product else ''}"


def _seconds(needed: StepsNeeded | None, step_s: float) -> str:
    if needed is None:
        return "not measured"
    found, low, high = map(_duration, needed.seconds(step_s))
    return found if low == high else f"{found} ({low}-{high})"


def _duration(seconds: float) -> str:
    """A long time for people: 42 s, 4.3 min, 5.2 h."""
    for unit, factor in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 3 * factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds:.0f} s"


def _meaning(sweep: Sweep, rows: Sequence[Row], target: bool) -> str:
    text = (
        "step: of a steady step, on average. exposed: communication that compute waits for. efficiency: beside one "
        "worker that does not communicate. sent: payload bytes of one worker. busy: share of the time in which the "
        "network is. of a step: what its time goes to, along the critical path."
    )
    if sweep.conditions.noise_ratio:
        text += " median (5-95%): of steps whose compute times vary as given."
    if target:
        text += (
            " steps needed: for the loss bsp has, from losses of a tiny GPT at equal steps with 4 workers, with the range "
            f"that noise and the curve's slope leave. to bsp's loss: time to the loss bsp has after {BSP_STEPS} steps."
        )
        if any(needed.is_product for row in rows if (needed := steps_needed(row.strategy)) is not None):
            text += " *: only its parts were measured, their product was not."
    return text


# -- JSON ------------------------------------------------------------------------------------------------------


def as_json(sweep: Sweep, rows: Sequence[Row], notes: Sequence[str], *, target: bool) -> dict[str, object]:
    """What laconic.cli.simulate says that --json prints."""
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
