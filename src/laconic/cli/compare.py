"""`laconic compare`: train the same small GPT with torch DDP and under several strategies, side by side.

With --json, one document: {"config": {...}, "rows": [{"strategy", "step_ms", "step_ms_low", "step_ms_high",
"exposed_ms", "wire_bytes_per_step", "predicted_bytes_per_step", "final_loss", "speedup_over_ddp"}]}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from laconic.cli.terminal import emit_json, emit_sections, plain_table
from laconic.errors import UsageError
from laconic.experiments.comparison import DEFAULT_STRATEGIES, Comparison, Row, as_document, run_comparison
from laconic.experiments.comparison import Progress as OnStep
from laconic.strategy import PRESETS
from laconic.units import human_bytes


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train a small GPT on this machine with torch DDP and under several strategies, and print them side by side."""

    strategy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="STRATEGY")] = ()
    """A preset or strategy text; repeat for several. Left out: one of each kind."""
    workers: int = 2
    """Number of processes that train together."""
    steps: int = 30
    """Optimizer steps under each strategy."""
    size: str = "small"
    """Model size: tiny, small, medium."""
    batch: int = 4
    """Sequences per worker and step."""
    seed: int = 0
    """Initial weights and batches."""
    data: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A text file to train on. Left out: the Python standard library's source."""
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 600.0
    """How long the whole run may take."""
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the results to this file as JSON."""
    json: bool = False
    """Print JSON instead of a table."""


def run(arguments: Arguments) -> int:
    """Train and print."""
    comparison = Comparison(
        strategies=arguments.strategy or DEFAULT_STRATEGIES,
        workers=arguments.workers,
        steps=arguments.steps,
        size=arguments.size,
        batch=arguments.batch,
        seed=arguments.seed,
        data=arguments.data,
        timeout_s=arguments.timeout,
    )
    if arguments.out is not None:
        _write(Path(arguments.out), as_document(comparison, []))  # now, not after minutes of training
    with _shown_progress(comparison) as on_step:
        rows = run_comparison(comparison, on_step)
    document = as_document(comparison, rows)
    if arguments.out is not None:
        _write(Path(arguments.out), document)
    if arguments.json:
        emit_json(document)
    else:
        emit_sections(*_table(comparison, rows))
    return 0


def _write(path: Path, document: object) -> None:
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"cannot write the results to {path}: {exc.strerror}.") from exc


@contextmanager
def _shown_progress(comparison: Comparison) -> Iterator[OnStep]:
    """A live bar per strategy on a terminal; a line per strategy elsewhere. On stderr, so results can be piped."""
    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:

        def plain(strategy: str, step: int, loss: float, step_ms: float) -> None:
            line = f"{step:4}/{comparison.steps}  loss {loss:.4f}  {step_ms:7.1f} ms  {strategy}"
            print(line, file=sys.stderr, flush=True)

        yield plain
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[step_ms]:.0f} ms"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def live(strategy: str, step: int, loss: float, step_ms: float) -> None:
            if strategy not in tasks:
                tasks[strategy] = progress.add_task(strategy, total=comparison.steps, loss=loss, step_ms=step_ms)
            progress.update(tasks[strategy], completed=step, loss=loss, step_ms=step_ms)

        yield live


def _short(strategy: str) -> str:
    """The preset's name, where a preset says the same."""
    return next((name for name, (text, _) in PRESETS.items() if text == strategy), strategy)


def _table(comparison: Comparison, rows: Sequence[Row]) -> tuple[Text, Table, Text]:
    numbers = ("ms/step", "quartiles", "exposed ms", "bytes/step", "loss", "speed-up")
    table = plain_table("strategy", *numbers, numbers=numbers)
    for row in rows:
        sent = "?" if row.wire_bytes_per_step is None else human_bytes(row.wire_bytes_per_step)
        if row.wire_bytes_per_step != row.predicted_bytes_per_step:
            sent += f" (predicted {human_bytes(row.predicted_bytes_per_step or 0)})"
        table.add_row(
            _short(row.strategy),
            f"{row.step_ms:.1f}",
            f"{row.step_ms_low:.0f}..{row.step_ms_high:.0f}",
            f"{row.exposed_ms:.1f}",
            sent,
            f"{row.final_loss:.4f}",
            f"{row.speedup_over_ddp:.2f}x",
        )
    title = (
        f"GPT ({comparison.size}), {comparison.workers} processes on this machine, no bandwidth limit, "
        f"{comparison.steps} steps on the same batches"
    )
    notes = (
        "ms/step: median. exposed: what a step takes beyond computing alone. bytes/step: what each worker sends, "
        "counted, and equal to the prediction unless said; torch DDP does not count. loss: mean over the last tenth."
    )
    return Text(title, style="bold"), table, Text(notes, style="dim")
