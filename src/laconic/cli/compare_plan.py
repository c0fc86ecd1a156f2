"""`laconic compare --plan`: the planner's first choices, predicted and then measured.

First all ranks train at the same time without communication, which gives the compute time of a step on this machine.
The planner ranks strategies for the model with this time and the links asked for. Its first choices and plain DDP are
then trained in the same run, and each predicted step time is shown next to the measured one.

With --json, and in the run's folder as plan.json, the rows under "plan":

    {"strategy": str, "name": str, "predicted_ms": number, "measured_ms": number, "error": share,
     "predicted_sooner": how many times sooner than plain DDP it was predicted to have plain DDP's loss,
     "measured_sooner": the same with the steps as measured}
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import RenderableType
from rich.text import Text

from laconic.cli.contest_view import tables, watching
from laconic.cli.terminal import emit, emit_json, emit_sections, plain_table, printable
from laconic.cluster.place import Setting
from laconic.errors import UsageError
from laconic.experiments.comparison import UNLIMITED, Comparison, Network
from laconic.experiments.run import run_comparison
from laconic.experiments.tasks import make_task
from laconic.planner import Answer, Choice, Question, answer
from laconic.planner.candidates import DDP
from laconic.planner.choice import beginning
from laconic.planner.words import choice_name, verdict
from laconic.report.results import NO_COMMUNICATION, Results
from laconic.units import human_seconds
from laconic.workload import Workload
from laconic.workload.profiler import Subject, profile

_ALONE_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One strategy as predicted and as measured."""

    strategy: str
    name: str
    predicted_ms: float
    measured_ms: float
    error: float
    predicted_sooner: float
    measured_sooner: float


def hold_with_plan(comparison: Comparison, *, out: str | None, as_json: bool) -> int:
    """Plan, run, print both."""
    network = _check(comparison)
    found = answer(_question(comparison, network, _alone(comparison)))
    chosen = first_choices(found, comparison.steps)
    texts = tuple(str(choice.strategy) for choice in chosen)
    with watching(comparison) as watcher:
        watcher.note(f"planned: {verdict(found)}")
        results, folder = run_comparison(replace(comparison, strategies=texts), watcher, out)
    rows = checked(chosen, found, results)
    folder.write_text("plan.json", json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    if as_json:
        emit_json({**json.loads(results.to_json()), "plan": [asdict(row) for row in rows]})
        return 0
    emit_sections(*tables(results), Text(printable(f"Planned: {verdict(found)}"), style="bold"), *sections(rows))
    emit(f"\nEverything is in {folder.path}\n")
    return 0


def first_choices(found: Answer, steps: int | None) -> list[Choice]:
    """Plain DDP, and the planner's best of each kind among those that exchange in these steps and have no warm-up."""

    def has_round(choice: Choice) -> bool:
        rule = choice.strategy.synchronization
        early = beginning(choice.strategy, found.question.steps)
        return not choice.islands and early is None and (steps is None or steps >= rule.interval + rule.delay)

    ddp = next(choice for choice in found.choices if choice.strategy == DDP)
    kinds: dict[str, Choice] = {}
    for choice in found.ranked:
        if has_round(choice) and not choice.strategy.architecture.holds_shards:
            rule, whom, code = (getattr(choice.strategy, axis).name for axis in _KIND)
            kinds.setdefault(f"{rule} {whom} {code}", choice)
    return [ddp, *(choice for choice in kinds.values() if choice is not ddp)][: 1 + _CHOICES]


_KIND = ("synchronization", "architecture", "compression")
_CHOICES = 3


def checked(chosen: Sequence[Choice], found: Answer, results: Results) -> list[Checked]:
    """The strategies that were measured: plain DDP, then the others in the planner's order."""
    took_ms = {row.strategy: row.step_ms for row in results.rows}
    ddp = chosen[0]
    rows: list[Checked] = []
    for choice in chosen:
        text, ratio = str(choice.strategy), 1.0 if choice.loss is None else choice.loss.ratio
        if text not in took_ms or str(ddp.strategy) not in took_ms:
            continue  # refused, which the results say
        rows.append(
            Checked(
                strategy=text,
                name=choice_name(choice),
                predicted_ms=1e3 * choice.step_s,
                measured_ms=took_ms[text],
                error=1e3 * choice.step_s / took_ms[text] - 1,
                predicted_sooner=found.baseline.seconds / choice.seconds,
                measured_sooner=took_ms[str(ddp.strategy)] / (took_ms[text] * ratio),
            )
        )
    return rows


def sections(rows: Sequence[Checked]) -> list[RenderableType]:
    """The table, and a sentence that sums it up."""
    headers = ("strategy", "predicted", "measured", "off by", "sooner, predicted", "sooner, measured")
    table = plain_table(*headers, numbers=headers[1:])
    for row in rows:
        table.add_row(
            printable(row.name),
            human_seconds(row.predicted_ms / 1e3),
            human_seconds(row.measured_ms / 1e3),
            f"{row.error:+.1%}",
            f"{row.predicted_sooner:.2f}x",
            f"{row.measured_sooner:.2f}x",
        )
    if len(rows) < 2:
        return [table]
    best, first = max(rows, key=lambda row: row.measured_sooner), max(rows, key=lambda row: row.predicted_sooner)
    lost = best.measured_sooner / first.measured_sooner - 1
    said = (
        f"The planner's choice, {first.name}, is also the best of these as measured."
        if best is first
        else f"The planner's choice, {first.name}, takes {lost:.1%} longer to plain DDP's loss than {best.name}, the "
        "best of these with steps as measured."
    )
    return [table, Text(printable(said), style="bold green")]


def _check(comparison: Comparison) -> Network:
    if comparison.kind != "compare" or comparison.sharded or comparison.ranks_per_host > 1:
        raise UsageError(
            "compare: --plan needs one rank per host and a model that is not sharded. Leave out --plan, or "
            "--ranks-per-host and --sharded."
        )
    if len(comparison.networks) != 1 or comparison.networks[0].cluster is None:
        raise UsageError(
            "compare: --plan needs one setting of the links: --bandwidth RATE once, e.g. 100mbit, or --cluster FILE."
        )
    if comparison.device == "cuda":
        raise UsageError("compare: --plan works with ranks on CPUs only; give --device cpu.")
    return comparison.networks[0]


def _alone(comparison: Comparison) -> float:
    """The time of a step when ranks compute at the same time without communication."""
    alone = replace(
        comparison,
        strategies=("ddp",),
        networks=(Network(name=UNLIMITED, cluster=None),),
        torch_ddp=False,
        torch_hooks=(),
        no_communication=True,
        target_loss=None,
        steps=_ALONE_STEPS,
        seconds=None,
    )
    with tempfile.TemporaryDirectory(prefix="laconic-") as folder, watching(alone) as watcher:
        watcher.note("what a step computes, without communication:")
        results, _ = run_comparison(alone, watcher, f"{folder}/alone")
    return next(row.step_ms for row in results.rows if row.strategy == NO_COMMUNICATION) / 1e3


def _question(comparison: Comparison, network: Network, compute_s: float) -> Question:
    assert network.cluster is not None
    task = make_task(comparison.task)
    inputs, targets = task.batch(0, 0)
    subject = Subject(model=task.model(), batch=inputs, loss=lambda model, batch: task.loss(model(batch), targets))
    made: Workload = profile(subject, name=task.title, device="cpu", steps=3).workload.scaled(compute_s=compute_s)
    cluster = network.cluster
    rate = max(link.bandwidth_bps for link in cluster.links)
    return Question(
        workload=made,
        setting=Setting(cluster=cluster, workers=cluster.num_devices, bandwidth_bps=rate),
        device=None,
        learns_text=comparison.task.kind == "text",
    )
