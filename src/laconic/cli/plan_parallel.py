"""`laconic plan --parallel --model llama3-70b ...`: the parallel plan and the strategy to train a large model with.

With --json, one stable document:

    {"verdict": str, "why": [str],
     "model": str, "parameters": int, "gpus": int, "device": str, "cluster": str, "sites": int,
     "sequence": int, "batch": int, "steps": int,
     "tried": int, "fitting": int,                    plans
     "best": CHOICE, "next": [CHOICE],                the five that follow
     "lossless": CHOICE or null,                      the fastest that computes what plain DDP computes
     "unknown": [CHOICE],                             faster ones whose loss is not known well enough
     "assumed": [str], "not modelled": [str]}

    CHOICE = {"plan": str, "islands": int, "strategy": str or null,    null: the framework's own exchange
              "step_s", "tokens_per_s", "mfu", "seconds", "gpu_hours",
              "steps_ratio", "steps_ratio_low", "steps_ratio_high": number or null,
              "time_s": {PART: seconds}, "memory_gib": number}

seconds and gpu_hours are those to the loss that plain DDP would have after `steps` steps.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from laconic.cli.options.plan import Arguments
from laconic.cli.plan_view import watching
from laconic.cli.terminal import emit_json, emit_sections, plain_table
from laconic.cluster import Link, parse_bandwidth
from laconic.cluster.place import Place
from laconic.errors import UsageError, did_you_mean, one_line
from laconic.planner import Limits
from laconic.planner.parallel import ParallelAnswer, ParallelChoice, ParallelQuestion, plan_in_parallel
from laconic.planner.question import likely_steps
from laconic.simulator.parallel.accelerator import ACCELERATORS, Accelerator
from laconic.simulator.parallel.extrapolations import extrapolations
from laconic.simulator.parallel.system import Job
from laconic.units import human_bytes, human_duration, human_factor, human_rate, human_seconds, parse_quantity
from laconic.workload.transformer_presets import transformer

if TYPE_CHECKING:
    from rich.table import Table

_USUAL_DEVICE, _USUAL_BATCH, _USUAL_SEQUENCE = "h200", 1024, 8192
_SITE_DELAY_S = 0.01
"""One-way delay between sites: an assumption."""
_WITHOUT_EFFECT = ("params", "dtype", "compute", "task", "output")
_PARTS = {
    "compute_s": "compute",
    "launch_s": "launching kernels",
    "tensor_s": "tensor parallelism",
    "context_s": "context parallelism",
    "expert_s": "tokens to experts",
    "shard_s": "gathering and scattering shards",
    "pipeline_s": "messages between stages",
    "bubble_s": "pipeline bubbles",
    "exchange_s": "the exchange among replicas",
    "optimizer_s": "the optimizer",
}
_NOT_MODELLED = (
    "stragglers, failures and congestion by other jobs",
    "oversubscribed networks",
    "exchanges inside and between islands that slow each other on the same NICs",
    "a loss that depends on how hosts are grouped, beyond the number of replicas",
)


def run_parallel(arguments: Arguments) -> int:
    """Search and print."""
    question = _question(arguments)
    with watching() as progress:
        found = plan_in_parallel(question, progress)
    if arguments.json:
        emit_json(_document(found))
    else:
        emit_sections(*_sections(found))
    return 0


# -- the question ----------------------------------------------------------------------------------------------


def _question(arguments: Arguments) -> ParallelQuestion:
    if not arguments.parallel:
        given = "--sites" if arguments.sites != 1 else "--uplink"
        raise UsageError(f"plan: {given} has an effect only with --parallel.")
    for option in dataclasses.fields(arguments):
        if option.name in _WITHOUT_EFFECT and getattr(arguments, option.name) != option.default:
            raise UsageError(
                f"plan: --{option.name.replace('_', '-')} has no effect together with --parallel. Leave it out."
            )
    if arguments.model is None:
        raise UsageError("plan: --parallel needs a large model: --model llama3-70b, or a config.json.")
    if arguments.hosts is None and arguments.cluster is None:
        raise UsageError(
            "plan: say where to train: --cluster dgx-h100 --hosts 8, or --hosts 8 --gpus-per-host 8 --bandwidth 10gbit."
        )
    job = Job(
        model=transformer(arguments.model),
        sequence=_USUAL_SEQUENCE if arguments.sequence is None else arguments.sequence,
        global_batch=_USUAL_BATCH if arguments.batch is None else arguments.batch,
    )
    place = Place(
        cluster=arguments.cluster or "ethernet-1g",
        hosts=arguments.hosts,
        devices=arguments.gpus_per_host,
        bandwidth_bps=None if arguments.bandwidth is None else parse_bandwidth(arguments.bandwidth, "--bandwidth"),
        delay_s=None if arguments.delay is None else parse_quantity(arguments.delay, "time", "--delay"),
        inside_bps=None if arguments.inside is None else parse_bandwidth(arguments.inside, "--inside"),
    )
    if arguments.cluster is None and arguments.bandwidth is None and (arguments.hosts or 1) > 1:
        raise UsageError("plan: several hosts need --bandwidth RATE, e.g. 10gbit, or --cluster NAME.")
    uplink = None
    if arguments.uplink is not None:
        uplink = Link(bandwidth_bps=parse_bandwidth(arguments.uplink, "--uplink"), delay_s=_SITE_DELAY_S)
    return ParallelQuestion(
        job=job,
        cluster=place.setting().cluster,
        accelerator=_accelerator(arguments.device or _USUAL_DEVICE),
        sites=arguments.sites,
        uplink=uplink,
        steps=likely_steps(job.model.num_parameters, job.tokens) if arguments.steps is None else arguments.steps,
        limits=Limits(
            max_loss_gap=None
            if arguments.max_loss_gap is None
            else parse_quantity(arguments.max_loss_gap, "share", "--max-loss-gap"),
            lossless=arguments.lossless,
            memory_bytes=None
            if arguments.memory is None
            else int(parse_quantity(arguments.memory, "size", "--memory")),
        ),
    )


def _accelerator(name: str) -> Accelerator:
    if name not in ACCELERATORS:
        raise UsageError(
            f'plan: how long a large model computes on "{one_line(name, 40)}" is not known. '
            f"{did_you_mean(name, ACCELERATORS)}"
        )
    return ACCELERATORS[name]


# -- the answer ------------------------------------------------------------------------------------------------


def verdict(found: ParallelAnswer) -> str:
    """In one sentence: what to use, and what that gains."""
    best, own = found.best, found.own
    text = f"Use {_named(best)}: {_rate(best, found):,.0f} tokens/s."
    if own is None or own is best:
        return text
    times = own.seconds / best.seconds
    sooner = f"{human_factor(times, 2)} times as soon as without loss"
    return f"{text} The loss of plain DDP is reached {sooner}, by {_named(own)}."


def why(found: ParallelAnswer) -> list[str]:
    """The reasons for the choice."""
    best, question = found.best, found.question
    lines = [
        f"{found.tried:,} plans tried, {found.fitting:,} fit into {question.system.accelerator.memory_bytes / 1e9:.0f} "
        f"GB; this one takes {human_bytes(best.memory.total)}.",
        f"A step takes {human_seconds(best.time.total_s)}: {_where_time_goes(best)}.",
    ]
    if best.loss is not None and not best.loses_nothing:
        lines.append(
            f"Loss: {best.loss.because}; {best.loss.ratio:.2f} times the steps "
            f"({best.loss.ratio_low:.2f} to {best.loss.ratio_high:.2f})."
        )
    own = found.own
    if own is not None and own is not best:
        lines.append(
            f"Without loss, {_named(own)} takes {human_seconds(own.time.total_s)} per step: {_where_time_goes(own)}."
        )
    elif best.strategy is None:
        other = next((one for one in found.choices[1:] if one.strategy is not None), None)
        if other is not None:
            lines.append(
                f"The best with a strategy, {_named(other)}, takes {other.seconds / best.seconds:.2f} times as long to "
                "the same loss."
            )
    return lines


def _named(choice: ParallelChoice) -> str:
    plan = f'"{choice.plan}"'
    if choice.strategy is None:
        return f"{plan} with the framework's own exchange"
    if choice.islands == 1:
        return f"{plan} with {choice.strategy} among its replicas"
    return f"{plan} on each of {choice.islands} islands with {choice.strategy} between them"


def _where_time_goes(choice: ParallelChoice) -> str:
    total_s = choice.time.total_s
    parts = sorted(((getattr(choice.time, name), word) for name, word in _PARTS.items()), reverse=True)
    return ", ".join(f"{word} {value / total_s:.0%}" for value, word in parts if value >= 0.005 * total_s)


def _rate(choice: ParallelChoice, found: ParallelAnswer) -> float:
    return found.question.job.tokens / choice.time.total_s


def _mfu(choice: ParallelChoice, found: ParallelAnswer) -> float:
    question = found.question
    flops = question.job.model.model_flops(question.job.tokens, question.job.sequence)
    return flops / choice.time.total_s / question.gpus / question.accelerator.flops_per_s


def _gpu_hours(choice: ParallelChoice, found: ParallelAnswer) -> float:
    return found.question.gpus * choice.seconds / 3600


def _assumed(found: ParallelAnswer) -> list[str]:
    question = found.question
    system = question.system
    lines = [
        f"{question.steps:,} steps of {question.job.tokens:,} tokens",
        f"shares of the peak as in published runs of {question.software.name} (docs/results/large_models.md)",
    ]
    if system.fabric.measured:
        lines.append(f"collectives inside a node as measured on {system.fabric.measured}")
    lines += [warning.removesuffix(".") for warning in extrapolations(question.job, found.best.plan, system)]
    if question.uplink is not None:
        lines.append(
            f"{human_rate(question.uplink.bandwidth_bps)} and {human_seconds(question.uplink.delay_s)} one way between "
            "sites, all of it usable"
        )
    return lines


def _sections(found: ParallelAnswer) -> list[str | Table]:
    question = found.question
    sites = f" on each of {question.sites} sites" if question.sites > 1 else ""
    head = (
        f"{question.job.model.name}, {question.job.model.num_parameters / 1e9:,.1f}B parameters, "
        f"{question.job.global_batch} sequences of {question.job.sequence} tokens per step, "
        f"{question.gpus} {question.accelerator.name}: {question.cluster.describe()}{sites}"
    )
    headers = (
        "plan of an island",
        "islands",
        "strategy",
        "step",
        "tokens/s",
        "MFU",
        "steps",
        "to the loss",
        "GPU-hours",
    )
    table = plain_table(*headers, numbers=("islands", *headers[3:]))
    for choice in (found.best, *found.runners_up):
        table.add_row(
            str(choice.plan),
            str(choice.islands),
            "" if choice.strategy is None else str(choice.strategy),
            human_seconds(choice.time.total_s),
            f"{_rate(choice, found):,.0f}",
            f"{_mfu(choice, found):.1%}",
            "" if choice.loss is None else f"x {choice.loss.ratio:.2f}",
            human_duration(choice.seconds),
            f"{_gpu_hours(choice, found):,.0f}",
        )
    grounds = [*(f"Assumed: {line}." for line in _assumed(found)), f"Not modelled: {'; '.join(_NOT_MODELLED)}."]
    return [head, verdict(found), "\n".join(why(found)), table, "\n".join(grounds)]


def _document(found: ParallelAnswer) -> dict[str, object]:
    question = found.question
    return {
        "verdict": verdict(found),
        "why": why(found),
        "model": question.job.model.name,
        "parameters": question.job.model.num_parameters,
        "gpus": question.gpus,
        "device": question.accelerator.name,
        "cluster": question.cluster.name,
        "sites": question.sites,
        "sequence": question.job.sequence,
        "batch": question.job.global_batch,
        "steps": question.steps,
        "tried": found.tried,
        "fitting": found.fitting,
        "best": _record(found.best, found),
        "next": [_record(choice, found) for choice in found.runners_up],
        "lossless": None if found.own is None else _record(found.own, found),
        "unknown": [
            _record(choice, found) for choice in found.unknown if choice.time.total_s < found.best.time.total_s
        ],
        "assumed": _assumed(found),
        "not modelled": list(_NOT_MODELLED),
    }


def _record(choice: ParallelChoice, found: ParallelAnswer) -> dict[str, object]:
    loss = choice.loss
    return {
        "plan": str(choice.plan),
        "islands": choice.islands,
        "strategy": None if choice.strategy is None else str(choice.strategy),
        "step_s": choice.time.total_s,
        "tokens_per_s": _rate(choice, found),
        "mfu": _mfu(choice, found),
        "seconds": choice.seconds,
        "gpu_hours": _gpu_hours(choice, found),
        "steps_ratio": None if loss is None else loss.ratio,
        "steps_ratio_low": None if loss is None else loss.ratio_low,
        "steps_ratio_high": None if loss is None else loss.ratio_high,
        "time_s": {name.removesuffix("_s"): value for name, value in vars(choice.time).items()},
        "memory_gib": choice.memory.total_gib,
    }
