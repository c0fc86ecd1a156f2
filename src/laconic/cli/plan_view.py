"""How `plan` looks: progress while it searches, then the verdict, the best three and why, or JSON."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from laconic.cli.terminal import plain_table, printable
from laconic.planner import Answer, Choice
from laconic.planner.answer import Progress as Tell
from laconic.planner.crossovers import BandwidthRange
from laconic.planner.words import choice_name, grounds, ranges_in_words, reasons, verdict
from laconic.units import human_bytes, human_count, human_duration, human_factor, human_seconds

_SHOWN = 12
"""Rows of the table."""
_UNKNOWN_SHOWN = 8


@contextlib.contextmanager
def watching() -> Generator[Tell, None, None]:
    """A progress bar on a terminal; elsewhere nothing, as the search takes seconds."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bars: dict[str, object] = {}

        def tell(done: int, total: int, what: str) -> None:
            if what not in bars:
                bars[what] = progress.add_task(f"simulating {what}", total=total)
            progress.update(bars[what], completed=done, total=total)  # type: ignore[arg-type]

        yield tell


def sections(answer: Answer, bands: Sequence[BandwidthRange]) -> list[RenderableType]:
    """The verdict first, then the reasons."""
    found: list[RenderableType] = [_headline(answer), Text(printable(verdict(answer)), style="bold green")]
    for number, choice in enumerate(answer.top, 1):
        title = Text(printable(f"{number}. {choice_name(choice)}"), style="bold")
        found.append(Group(title, *map(_indented, reasons(choice, answer))))
    found.append(_table(answer))
    told = ranges_in_words(bands, inside=answer.question.is_one_host)
    found.append(_listed("Best by bandwidth, everything else as here", told))
    if answer.unknown:
        found.append(_listed("Not enough is known", _unknown(answer)))
    for title, lines in grounds(answer).items():
        found.append(_listed(title.capitalize(), lines))
    best = answer.best
    if best is not answer.baseline:
        group = ', process_group=mesh["replicate"]' if best.islands else ""
        found.append(Text(printable(f'laconic.attach(model, optimizer, "{best.strategy}"{group})'), style="cyan"))
    return found


def _headline(answer: Answer) -> Text:
    question = answer.question
    workload, setting = question.workload, question.setting
    model = (
        f"{workload.name}: {human_count(workload.num_parameters)} parameters, "
        f"{human_bytes(workload.gradient_bytes)} of gradients, {human_seconds(workload.compute_s)} compute per step"
    )
    place = f"{setting.workers} workers on {setting.cluster.describe()}"
    return Text(f"{printable(model)}\n{printable(place)}", style="bold")


def _table(answer: Answer) -> RenderableType:
    headers = ("strategy", "step", "to plain DDP's loss", "steps", "loss", "sent/step", "state")
    table = plain_table(*headers, numbers=headers[1:])
    shown = answer.ranked[:_SHOWN]
    if not any(choice is answer.baseline for choice in shown):
        shown.append(answer.baseline)
    for choice in shown:
        table.add_row(*_row(choice))
    return table


def _row(choice: Choice) -> list[str]:
    loss = choice.loss
    same = loss is None or loss.known == "same"
    times = (
        f"{human_duration(choice.seconds)} ({human_duration(choice.seconds_low)}-{human_duration(choice.seconds_high)})"
    )
    return [
        printable(choice_name(choice)),
        human_seconds(choice.step_s),
        times,
        "1x"
        if loss is None or same
        else f"{human_factor(loss.ratio, 2)}x ({human_factor(loss.ratio_low, 2)}-{human_factor(loss.ratio_high, 2)})",
        "same" if loss is None or same else f"{loss.gap:+.1%}",
        human_bytes(choice.prediction.wire_bytes),
        human_bytes(choice.memory.strategy),
    ]


def _unknown(answer: Answer) -> list[str]:
    unknown = answer.unknown
    told = [
        f"{choice_name(choice)}: {human_seconds(choice.step_s)} a step; {choice.reason}"
        for choice in unknown[:_UNKNOWN_SHOWN]
    ]
    if len(unknown) > _UNKNOWN_SHOWN:
        told.append(f"and {len(unknown) - _UNKNOWN_SHOWN} more (--json has them all)")
    return told


def _listed(title: str, lines: Sequence[str]) -> RenderableType:
    return Group(Text(f"{title}:", style="dim"), *map(_indented, lines))


def _indented(line: str) -> RenderableType:
    return Padding(Text(printable(line)), (0, 0, 0, 3))


# -- JSON ------------------------------------------------------------------------------------------------------


def as_json(answer: Answer, bands: Sequence[BandwidthRange]) -> dict[str, object]:
    """The document of --json, which laconic.cli.plan describes."""
    question = answer.question
    workload = question.workload
    return {
        "verdict": verdict(answer),
        "workload": {
            "name": workload.name,
            "num_parameters": workload.num_parameters,
            "gradient_bytes": workload.gradient_bytes,
            "compute_s": workload.compute_s,
            "batch": workload.batch,
            "source": workload.source,
        },
        "cluster": question.setting.cluster.describe(),
        "workers": question.setting.workers,
        "steps": question.steps,
        "baseline": choice_as_json(answer.baseline),
        "best": choice_as_json(answer.best),
        "choices": [choice_as_json(choice) for choice in answer.choices],
        "crossovers": [
            {
                "from_bps": band.from_bps,
                "to_bps": None if math.isinf(band.to_bps) else band.to_bps,
                "strategy": str(band.choice.strategy),
                "islands": band.choice.islands,
            }
            for band in bands
        ],
        "refused": [{"strategy": text, "reason": reason} for text, reason in answer.refused],
        "hopeless": list(answer.hopeless),
        "grounds": grounds(answer),
    }


def choice_as_json(choice: Choice) -> dict[str, object]:
    """One strategy."""
    loss = choice.loss
    return {
        "name": choice_name(choice),
        "strategy": str(choice.strategy),
        "islands": choice.islands,
        "standing": choice.standing,
        "reason": choice.reason,
        "step_s": choice.step_s,
        "compute_s": choice.prediction.compute_s,
        "exposed_s": choice.prediction.exposed_s,
        "wire_bytes": choice.prediction.wire_bytes,
        "seconds": choice.seconds,
        "seconds_low": choice.seconds_low,
        "seconds_high": choice.seconds_high,
        "memory_bytes": choice.memory.total,
        "state_bytes": choice.memory.strategy,
        "loss": None
        if loss is None
        else {
            "known": loss.known,
            "gap": loss.gap,
            "gap_low": loss.gap_low,
            "gap_high": loss.gap_high,
            "steps_ratio": loss.ratio,
            "steps_ratio_low": loss.ratio_low,
            "steps_ratio_high": loss.ratio_high,
            "because": loss.because,
        },
    }
