"""`laconic simulate --parallel PLAN|search --workload MODEL`: a large model under a parallel plan.

With --json, one stable document:

    {"model": str, "parameters": int, "active_parameters": int, "gpus": int, "accelerator": str, "cluster": str,
     "sequence": int, "batch": int, "sites": int,
     "tried": int, "fitting": int,            plans; 1 and 0 or 1 without a search
     "rows": [{"plan": str, "strategy": str or null,      null: the framework's own exchange
               "fits": bool, "step_s": float, "tokens_per_s": float, "mfu": float,
               "time_s": {PART: seconds},     parts of step_s; communication where it is exposed
               "memory_gib": {PART: GiB},
               "sent_bytes": {DIMENSION: bytes per step of one rank}}],
     "collectives": str or null,              the measured system whose collectives are taken inside a node
     "warnings": [str]}                       collectives that the first row needs and were not measured

Rows come fastest first. mfu counts the operations of the model, with half of the attention's scores and without
recomputation.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laconic.cli.options.simulate import Arguments
from laconic.cli.terminal import emit_json, emit_sections, plain_table
from laconic.cluster import Link, parse_bandwidth
from laconic.cluster.place import Place
from laconic.errors import ConfigurationError, UsageError, one_line
from laconic.simulator.parallel.accelerator import ACCELERATORS
from laconic.simulator.parallel.exchange import Islands, StrategyExchange
from laconic.simulator.parallel.extrapolations import extrapolations
from laconic.simulator.parallel.fabric import fabric_of
from laconic.simulator.parallel.memory import Memory, fits, memory
from laconic.simulator.parallel.plan import Plan, parse_plan
from laconic.simulator.parallel.search import search
from laconic.simulator.parallel.software import MEGATRON_CORE
from laconic.simulator.parallel.step import Exchange, StepTime, step_time
from laconic.simulator.parallel.system import Job, System
from laconic.simulator.parallel.traffic import step_traffic
from laconic.strategy import Strategy
from laconic.units import human_bytes, human_seconds, parse_quantity
from laconic.workload.transformer import Transformer
from laconic.workload.transformer_presets import transformer

if TYPE_CHECKING:
    from rich.table import Table

PARALLEL_ONLY = ("sequence", "batch", "accelerator", "sites", "uplink")
_USED = {
    *PARALLEL_ONLY,
    *(
        "strategy",
        "workload",
        "cluster",
        "hosts",
        "devices",
        "bandwidth",
        "delay",
        "inside",
        "workers",
        "parallel",
        "json",
    ),
}
_GIB = 2.0**30
_SITE_DELAY_S = 0.01
"""One-way delay between sites: an assumption."""


@dataclass(frozen=True)
class _Row:
    plan: Plan
    strategy: Strategy | None
    time: StepTime
    memory: Memory
    fits: bool


def print_parallel(arguments: Arguments) -> None:
    """Simulate a plan, or search for one, and print it."""
    _refuse_unused(arguments)
    job = Job(model=_model(arguments), sequence=arguments.sequence, global_batch=arguments.batch)
    is_search = arguments.parallel == "search"
    plan = None if is_search else _plan(arguments.parallel or "")
    gpus = _gpus(arguments, plan)
    place = Place(
        cluster=arguments.cluster,
        hosts=arguments.hosts,
        devices=arguments.devices,
        bandwidth_bps=_bandwidth(arguments),
        delay_s=None if arguments.delay is None else parse_quantity(arguments.delay, "time", "--delay"),
        inside_bps=None if arguments.inside is None else parse_bandwidth(arguments.inside, "--inside"),
    )
    cluster = place.setting(gpus).cluster
    device = ACCELERATORS[arguments.accelerator]
    system = System(accelerator=device, fabric=fabric_of(cluster, device.name), software=MEGATRON_CORE)
    rows: list[_Row] = []
    tried = fitting = 0
    for strategy, exchange in _exchanges(arguments):
        if plan is None:
            found = search(job, gpus, system, exchange=exchange)
            tried, fitting = tried + found.tried, fitting + found.fitting
            rows += [_Row(one.plan, strategy, one.time, one.memory, True) for one in found.best]
        else:
            plan.check(job.model, gpus=gpus, sequence=job.sequence)
            kept = 0.0 if exchange is None else exchange.kept_bytes(job, plan, system)
            needed = memory(job, plan, system.software, residual_bytes=kept)
            fitting_one = fits(needed, system)
            tried, fitting = tried + 1, fitting + fitting_one
            rows.append(_Row(plan, strategy, step_time(job, plan, system, exchange=exchange), needed, fitting_one))
    if not rows:
        raise ConfigurationError(
            f"{job.model.name} does not fit into the memory of {gpus} GPUs under any of {tried} plans. Give more "
            "--workers, or an --accelerator with more memory."
        )
    rows.sort(key=lambda row: row.time.total_s)
    sites = arguments.sites
    document: dict[str, object] = {
        "model": job.model.name,
        "parameters": job.model.num_parameters,
        "active_parameters": job.model.num_active_parameters,
        "gpus": gpus * sites,
        "accelerator": arguments.accelerator,
        "cluster": cluster.name,
        "sequence": job.sequence,
        "batch": job.global_batch * sites,
        "sites": sites,
        "tried": tried,
        "fitting": fitting,
        "rows": [_record(row, job, system, sites) for row in rows],
        "collectives": system.fabric.measured or None,
        "warnings": extrapolations(job, rows[0].plan, system),
    }
    if arguments.json:
        emit_json(document)
    else:
        _print(document, rows, job, system)


def _refuse_unused(arguments: Arguments) -> None:
    for option in dataclasses.fields(arguments):
        if option.name not in _USED and getattr(arguments, option.name) != option.default:
            raise UsageError(f"simulate: --{option.name} has no effect together with --parallel. Leave it out.")
    if (arguments.uplink is None) != (arguments.sites == 1):
        raise UsageError(
            "simulate: --sites and --uplink go together: how many sites, and the rate of each site's link."
        )
    if arguments.sites < 1:
        raise UsageError(f"simulate: --sites must be at least 1, got {arguments.sites}.")
    if arguments.sites > 1 and not arguments.strategy:
        raise UsageError(
            'simulate: --sites needs a strategy for the exchange between sites, e.g. "diloco(period=100)".'
        )


def _model(arguments: Arguments) -> Transformer:
    default = next(option.default for option in dataclasses.fields(arguments) if option.name == "workload")
    if arguments.workload == default:
        raise UsageError("simulate: --parallel needs a large model, e.g. --workload llama3-70b.")
    return transformer(arguments.workload)


def _plan(text: str) -> Plan:
    if text.strip() and "=" not in text and difflib.get_close_matches(text.strip().lower(), ["search"]):
        raise UsageError(f'simulate: --parallel cannot be "{one_line(text, 40)}". Did you mean "search"?')
    return parse_plan(text)


def _gpus(arguments: Arguments, plan: Plan | None) -> int:
    if arguments.workers is None:
        if plan is None:
            raise UsageError("simulate: --parallel search needs the number of GPUs: --workers N.")
        return plan.gpus
    try:
        found = int(arguments.workers)
    except ValueError:
        found = 0
    if found < 1:
        raise UsageError(
            f'simulate: with --parallel, --workers must be one whole number of at least 1, got "'
            f'{one_line(arguments.workers, 40)}".'
        )
    return found


def _bandwidth(arguments: Arguments) -> float | None:
    if len(arguments.bandwidth) > 1 or any("," in text for text in arguments.bandwidth):
        raise UsageError("simulate: with --parallel, --bandwidth must be one rate.")
    return parse_bandwidth(arguments.bandwidth[0], "--bandwidth") if arguments.bandwidth else None


def _exchanges(arguments: Arguments) -> list[tuple[Strategy | None, Exchange | None]]:
    strategies = [
        Strategy.load(text) if text.endswith(".toml") else Strategy.parse(text) for text in arguments.strategy
    ]
    if arguments.uplink is not None:
        link = Link(bandwidth_bps=parse_bandwidth(arguments.uplink, "--uplink"), delay_s=_SITE_DELAY_S)
        return [(strategy, Islands(strategy, arguments.sites, link)) for strategy in strategies]
    return [(strategy, StrategyExchange(strategy)) for strategy in strategies] or [(None, None)]


def _mfu(row: _Row, job: Job, system: System) -> float:
    flops = job.model.model_flops(job.tokens, job.sequence)
    return flops / row.time.total_s / row.plan.gpus / system.accelerator.flops_per_s


def _record(row: _Row, job: Job, system: System, sites: int) -> dict[str, object]:
    return {
        "plan": str(row.plan),
        "strategy": None if row.strategy is None else str(row.strategy),
        "fits": row.fits,
        "step_s": row.time.total_s,
        "tokens_per_s": sites * job.tokens / row.time.total_s,
        "mfu": _mfu(row, job, system),
        "time_s": {name.removesuffix("_s"): value for name, value in vars(row.time).items()},
        "memory_gib": {
            **{name: value / _GIB for name, value in vars(row.memory).items()},
            "total": row.memory.total_gib,
        },
        "sent_bytes": step_traffic(job, row.plan, system.software)._asdict(),
    }


def _print(document: dict[str, object], rows: list[_Row], job: Job, system: System) -> None:
    sites = document["sites"]
    head = (
        f"{document['model']}, {job.model.num_parameters / 1e9:,.1f}B parameters, {document['batch']} sequences of "
        f"{job.sequence} tokens per step, {document['gpus']} {system.accelerator.name} on {document['cluster']}"
        + (f", {sites} sites" if sites != 1 else "")
        + f"\n{document['tried']} plans tried, {document['fitting']} fit"
    )
    table = plain_table(
        "plan", "strategy", "step", "tokens/s", "MFU", "memory", numbers=("step", "tokens/s", "MFU", "memory")
    )
    for row in rows:
        rate = job.tokens / row.time.total_s * (sites if isinstance(sites, int) else 1)
        table.add_row(
            str(row.plan),
            "" if row.strategy is None else str(row.strategy),
            human_seconds(row.time.total_s),
            f"{rate:,.0f}",
            f"{_mfu(row, job, system):.1%}",
            human_bytes(row.memory.total) + ("" if row.fits else ", does not fit"),
        )
    warnings = extrapolations(job, rows[0].plan, system)
    notes = ["\n".join(f"Note: {warning}" for warning in warnings)] if warnings else []
    emit_sections(head, table, _parts(rows[0], job, system), *notes)


def _parts(row: _Row, job: Job, system: System) -> Table:
    """Where the time, the memory and the bytes of the first row go."""
    table = plain_table("of the first", "", numbers=())
    total_s = row.time.total_s
    times = sorted(((value, name) for name, value in vars(row.time).items() if value), reverse=True)
    table.add_row("time", ", ".join(f"{name.removesuffix('_s')} {value / total_s:.1%}" for value, name in times))
    parts = sorted(((value, name) for name, value in vars(row.memory).items() if value), reverse=True)
    table.add_row("memory", ", ".join(f"{name} {human_bytes(value)}" for value, name in parts))
    sent = step_traffic(job, row.plan, system.software)._asdict()
    table.add_row(
        "sent per rank", ", ".join(f"{name} {human_bytes(value)}" for name, value in sent.items() if value) or "nothing"
    )
    return table
