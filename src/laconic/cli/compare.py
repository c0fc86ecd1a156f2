"""`laconic compare`: train the same small GPT with torch DDP and under several strategies, on slow links, side by side.

With --json, one document: {"config": {...}, "rows": [{"strategy", "link", "links": "shaped" | "unlimited", "step_ms",
"step_ms_low", "step_ms_high", "exposed_ms", "wire_bytes_per_step", "counted_bytes_per_step",
"predicted_bytes_per_step", "final_loss", "speedup_over_ddp"}]}.
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
from laconic.cluster import parse_bandwidth
from laconic.errors import UsageError
from laconic.experiments.comparison import DEFAULT_STRATEGIES, Comparison, Row, as_document, run_comparison
from laconic.experiments.comparison import Progress as OnStep
from laconic.lab.capabilities import detect_capabilities
from laconic.strategy import PRESETS
from laconic.units import human_bytes


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train a small GPT on virtual hosts with torch DDP and under several strategies, and print them side by side."""

    strategy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="STRATEGY")] = ()
    """A preset or strategy text; repeat for several. Left out: one of each kind."""
    hosts: int = 4
    """Number of virtual hosts, one process each."""
    bandwidth: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="RATE")] = ()
    """Of every host's link: 10mbit, 1gbit; repeat for several. Left out: 100mbit. "unlimited": no virtual hosts."""
    steps: int = 20
    """Optimizer steps under each strategy."""
    size: str = "small"
    """Model size: tiny, small, medium."""
    batch: int = 2
    """Sequences per host and step."""
    seed: int = 0
    """Initial weights and batches."""
    data: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A text file to train on. Left out: the Python standard library's source."""
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 1800.0
    """How long the training on one link may take."""
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the results to this file as JSON."""
    json: bool = False
    """Print JSON instead of a table."""


def run(arguments: Arguments) -> int:
    """Train and print."""
    comparison = Comparison(
        strategies=arguments.strategy or DEFAULT_STRATEGIES,
        hosts=arguments.hosts,
        bandwidths_bps=_bandwidths(arguments.bandwidth),
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
        emit_sections(*_tables(comparison, rows))
    return 0


def _bandwidths(texts: tuple[str, ...]) -> tuple[float, ...]:
    """Bits per second; "unlimited" alone for none."""
    if "unlimited" in texts:
        if len(texts) > 1:
            raise UsageError("compare: --bandwidth unlimited stands alone; run compare twice.")
        return ()
    if texts:
        return tuple(parse_bandwidth(text, "--bandwidth") for text in texts)
    allowed = detect_capabilities()
    if not allowed.virtual_hosts:
        raise UsageError(
            f"compare: no virtual hosts are possible here ({allowed.reason}). Run as root, allow user namespaces, or "
            "give --bandwidth unlimited to compare without slow links."
        )
    return Comparison.bandwidths_bps


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

        def plain(link: str, strategy: str, step: int, loss: float, step_ms: float) -> None:
            line = f"{link:>9} {step:4}/{comparison.steps}  loss {loss:.4f}  {step_ms:7.1f} ms  {strategy}"
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

        def live(link: str, strategy: str, step: int, loss: float, step_ms: float) -> None:
            name = f"{link}  {_short(strategy)}"
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=comparison.steps, loss=loss, step_ms=step_ms)
            progress.update(tasks[name], completed=step, loss=loss, step_ms=step_ms)

        yield live


def _short(strategy: str) -> str:
    """The preset's name, where a preset says the same."""
    return next((name for name, (text, _) in PRESETS.items() if text == strategy), strategy)


def _tables(comparison: Comparison, rows: Sequence[Row]) -> list[Text | Table]:
    """A table per link, and one line that says what the columns mean."""
    sections: list[Text | Table] = []
    for link in dict.fromkeys(row.link for row in rows):
        of_link = [row for row in rows if row.link == link]
        where = (
            f"{comparison.hosts} processes on this machine, no bandwidth limit"
            if link == "unlimited"
            else f"{comparison.hosts} virtual hosts behind {link} links ({of_link[0].links})"
        )
        sections.append(Text(f"GPT ({comparison.size}), {where}, {comparison.steps} steps each", style="bold"))
        sections.append(_table(of_link))
        best = min(of_link[1:], key=lambda row: row.step_ms)
        cost = best.final_loss / of_link[0].final_loss - 1
        sections.append(
            Text(f"Fastest: {_short(best.strategy)}, {best.speedup_over_ddp:.2f}x torch DDP, loss {cost:+.2%}.")
        )
    notes = (
        "ms/step: median. exposed: what forward and backward take beyond computing alone. wire: bytes each host "
        "sent per step as the kernel counted them, headers included; counted: by laconic's transport, equal to the "
        "prediction unless said. loss: mean over the last tenth of the steps."
    )
    return [*sections, Text(notes, style="dim")]


def _table(rows: Sequence[Row]) -> Table:
    numbers = ("ms/step", "quartiles", "exposed", "wire", "counted", "loss", "vs DDP")
    table = plain_table("strategy", *numbers, numbers=numbers)
    for row in rows:
        counted = _bytes(row.counted_bytes_per_step)
        if row.counted_bytes_per_step != row.predicted_bytes_per_step:
            counted += f" (predicted {_bytes(row.predicted_bytes_per_step)})"
        table.add_row(
            _short(row.strategy),
            f"{row.step_ms:.0f}",
            f"{row.step_ms_low:.0f}..{row.step_ms_high:.0f}",
            f"{row.exposed_ms:.0f}",
            _bytes(row.wire_bytes_per_step),
            counted,
            f"{row.final_loss:.4f}",
            f"{row.speedup_over_ddp:.2f}x",
        )
    return table


def _bytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else human_bytes(num_bytes)
