"""Jobs from a CSV file, one line each.

job          a name, each once
arrival_s    when it arrives, in seconds from the beginning
gpus         the number of GPUs it asks for
steps        optimizer steps, with duration_s, steps_per_s or a model of a table of throughputs
steps_per_s  on its GPUs, all on one host
duration_s   how long it takes on its GPUs; without steps nothing is known about links
model        a name; with a table of throughputs, one of its models
mode         static, accordion or gns: whether its batch grows (batch_growth.py); needs a table of throughputs
max_gpus     an elastic job may run on 1 to this many GPUs
after        a job that must have ended before this one starts
gradient_bytes   bytes that it exchanges in each step, uncompressed; or
workload     a known model, or a .json file, with these bytes
strategy     how it exchanges gradients; default: ddp

Traces of Gavel, Shockwave and Tiresias name columns differently; these names are known, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from laconic.errors import UsageError, did_you_mean, one_line
from laconic.jobs import batch_growth
from laconic.jobs.csv_rows import Line, parse_lines, read_lines
from laconic.jobs.job import Job, Phase, Traffic
from laconic.jobs.throughputs import Throughputs, split_batch

_NEEDED = ("job", "arrival_s", "gpus")
_ALLOWED = (
    *("steps", "steps_per_s", "duration_s", "model", "mode", "max_gpus", "after", "gradient_bytes", "workload"),
    *("strategy", "interval"),
)
_OTHER_NAMES = {
    "job_id": "job",
    "num_gpu": "gpus",
    "submit_time": "arrival_s",
    "total_steps": "steps",
    "iterations": "steps",
    "model_name": "model",
    "duration": "duration_s",
}

_AFTER_SHARE = batch_growth.AfterShare()
BytesOf = Callable[[str], float]
"""The gradient bytes of a model by its name."""


def read_trace(
    path: str | Path,
    throughputs: Throughputs | None = None,
    *,
    growth: batch_growth.Rule = _AFTER_SHARE,
    bytes_of: BytesOf | None = None,
) -> list[Job]:
    """The jobs of a file; growth: the rule by which batches grow, for jobs whose mode is not static."""
    lines = read_lines(path, _NEEDED, _ALLOWED, _OTHER_NAMES)
    return checked([_job(line, throughputs, growth, bytes_of) for line in lines], Path(path).name)


def parse_trace(
    text: str, throughputs: Throughputs | None = None, *, growth: batch_growth.Rule = _AFTER_SHARE
) -> list[Job]:
    """The jobs of a text, as read_trace reads those of a file."""
    lines = parse_lines(text, "trace", _NEEDED, _ALLOWED, _OTHER_NAMES)
    return checked([_job(line, throughputs, growth, None) for line in lines], "trace")


def checked(jobs: Sequence[Job], where: str = "trace") -> list[Job]:
    """The jobs; raises unless names are unique and every job can begin."""
    if not jobs:
        raise UsageError(f"{where}: there is no job. Give at least one line.")
    by_name: dict[str, Job] = {}
    for job in jobs:
        if job.name in by_name:
            raise UsageError(f'{where}: two jobs are called "{one_line(job.name, 60)}". Give each a name of its own.')
        by_name[job.name] = job
    for job in jobs:
        if job.after and job.after not in by_name:
            raise UsageError(
                f'{where}: job "{one_line(job.name, 60)}" comes after "{one_line(job.after, 60)}", which is missing.'
            )
    _check_no_cycle(by_name, where)
    return list(jobs)


def _check_no_cycle(by_name: dict[str, Job], where: str) -> None:
    begun: set[str] = set()
    for first in by_name:
        chain: dict[str, None] = {}
        name = first
        while name and name not in begun:
            if name in chain:
                loop = [*list(chain)[list(chain).index(name) :], name]
                raise UsageError(
                    f"{where}: jobs wait for each other in a circle, so none can begin: "
                    f"{one_line(' after '.join(loop), 200)}."
                )
            chain[name] = None
            name = by_name[name].after
        begun.update(chain)


def _job(line: Line, throughputs: Throughputs | None, growth: batch_growth.Rule, bytes_of: BytesOf | None) -> Job:
    name, model, gpus = line.text("job"), line.text("model"), line.whole("gpus")
    if not name:
        raise line.wrong("job", "a name")
    known = throughputs if throughputs is not None and throughputs.speed(model, max(1, gpus)) else None
    if throughputs is not None and known is None and not line.text("steps_per_s"):
        models = dict.fromkeys(other for other, _ in throughputs.steps_per_s)
        raise UsageError(
            f"{line.where}: {one_line(model, 60)} on {gpus} GPUs is not in the table of throughputs. "
            f"{did_you_mean(model, models)}"
        )
    try:
        return Job(
            name=name,
            arrival_s=line.number("arrival_s"),
            gpus=gpus,
            phases=_phases(line, known, growth),
            model=model,
            after=line.text("after"),
            max_gpus=line.whole("max_gpus") if line.text("max_gpus") else 0,
            scaling=known.scaling(model) if known else (),
            spread_slowdown=known.spread_slowdown(model, gpus) if known else 1.0,
            traffic=_traffic(line, bytes_of),
        )
    except UsageError as exc:
        if str(exc).startswith(line.where):
            raise
        raise UsageError(f"{line.where}: {exc}") from exc


def _phases(line: Line, throughputs: Throughputs | None, rule: batch_growth.Rule) -> tuple[Phase, ...]:
    mode, gpus, model = line.text("mode") or "static", line.whole("gpus"), line.text("model")
    if mode not in batch_growth.GROWTHS:
        raise UsageError(
            f'{line.where}: there is no mode "{one_line(mode, 40)}". {did_you_mean(mode, batch_growth.GROWTHS)}'
        )
    if throughputs is None and mode != "static":
        raise UsageError(f"{line.where}: mode {mode} needs a table of throughputs by batch. Give --throughputs FILE.")
    if not line.text("steps") and not line.text("duration_s"):
        raise UsageError(f"{line.where}: the job has no length. Give steps or duration_s.")
    steps = line.number("steps") if line.text("steps") else 0.0
    if line.text("steps") and steps <= 0:
        raise line.wrong("steps", "above 0")
    if throughputs is not None and not line.text("steps_per_s") and steps:
        family, batch = split_batch(model)
        measured = throughputs.batches(model, gpus) or [(batch, throughputs.steps_per_s[model, gpus])]
        training = batch_growth.Training(
            growth=cast(batch_growth.Growth, mode),
            model=family,
            batch=batch,
            gpus=gpus,
            samples=steps * batch,
            measured=[size for size, _ in measured],
        )
        return batch_growth.phases(rule, training, [speed for _, speed in measured])
    if line.text("steps_per_s"):
        speed = line.number("steps_per_s")
        if speed <= 0 or not steps:
            raise line.wrong("steps_per_s", "above 0, with the number of steps")
        return (Phase(until=1.0, work_per_s=speed / steps, steps_per_s=speed),)
    if not line.text("duration_s"):
        raise UsageError(f"{line.where}: steps need a speed. Give steps_per_s, duration_s, or a table of throughputs.")
    duration_s = line.number("duration_s")
    if duration_s <= 0:
        raise line.wrong("duration_s", "above 0")
    return (Phase(until=1.0, work_per_s=1 / duration_s, steps_per_s=(steps or duration_s) / duration_s),)


def _traffic(line: Line, bytes_of: BytesOf | None) -> Traffic | None:
    strategy = line.text("strategy") or "ddp"
    if (line.text("gradient_bytes") or line.text("workload")) and not line.text("steps"):
        raise UsageError(f"{line.where}: a job with gradient_bytes or workload needs steps. Give the number of steps.")
    if line.text("gradient_bytes"):
        nbytes = line.number("gradient_bytes")
        if nbytes < 0:
            raise line.wrong("gradient_bytes", "at least 0")
        return Traffic(gradient_bytes=nbytes, strategy=strategy)
    if line.text("workload"):
        # Known models need torch for their shapes.
        from laconic.workload import workload  # noqa: PLC0415

        return Traffic(gradient_bytes=workload(line.text("workload")).gradient_bytes, strategy=strategy)
    if bytes_of is not None:
        return Traffic(gradient_bytes=bytes_of(line.text("model")), strategy=strategy)
    if line.text("strategy"):
        raise UsageError(f"{line.where}: a strategy has no effect without gradient_bytes or workload. Give one.")
    return None
