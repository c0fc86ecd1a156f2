"""`laconic schedule --trace JOBS --cluster C --policy P [--policy ...]`: many jobs on one cluster.

With --json, one document:

    {"trace": str, "jobs": int, "cluster": str, "gpus": int, "fidelity": str,
     "costs": {"round_s", "start_s", "checkpoint_s", "migration_s", "ahead_s", "stops_to_grow": bool},
     "policies": [{"policy": str, "makespan_s", "avg_jct_s", "geo_jct_s", "p95_jct_s", "unfair_share", "worst_fairness",
                   "gpu_utilization", "starts": int,
                   "busiest_link": str or null, "busiest_link_load", "mean_link_load": null without links,
                   "strategies": {TEXT: seconds},
                   "services": [{"service": str, "requests", "late_share", "gpu_s", "most_replicas": int}],
                   "jobs": [{"job": str, "arrival_s", "finish_s", "completion_s", "fairness"}]}]}

avg_jct_s is the mean of completion times, from arrival to end. With --reference, an array of {"policy", "makespan_s",
"avg_jct_s"}.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from laconic.cli.files import check_writable, write_text
from laconic.cli.options.schedule import Arguments
from laconic.cli.terminal import emit, emit_json, emit_sections, plain_table, printable
from laconic.cluster import Cluster, parse_bandwidth
from laconic.cluster.place import Place
from laconic.errors import UsageError, one_line
from laconic.jobs import Costs, Job, Outcome, Policy, Served, Throughputs, parse_policy, read_services, read_trace
from laconic.jobs import run as run_jobs
from laconic.jobs.shockwave import CALIBRATED_ON, PREDICTED, Tables, calibrate, predict
from laconic.units import human_duration, parse_quantity

if TYPE_CHECKING:
    from rich.console import RenderableType

DEFAULT_POLICIES = ("fifo", "srtf", "las", "max_min_fairness")
TABLES_VARIABLE = "LACONIC_TABLES"
_WITH_REFERENCE = ("reference", "tables", "policy", "json")


def run(arguments: Arguments) -> int:
    """Schedule and print."""
    policies = [parse_policy(text) for text in dict.fromkeys(arguments.policy or DEFAULT_POLICIES)]
    if arguments.reference is not None:
        return _print_reference(arguments)
    if arguments.tables is not None:
        raise UsageError("schedule: --tables has no effect without --reference. Give both, or leave --tables out.")
    if arguments.trace is None:
        raise UsageError("schedule: no jobs were given. Give --trace FILE.csv (docs/schedule.md describes the file).")
    if arguments.worker and arguments.throughputs is None:
        raise UsageError("schedule: --worker has no effect without --throughputs.")
    if arguments.output is not None:
        check_writable(arguments.output)
    costs, place = _costs(arguments), _place(arguments)
    cluster = place.setting().cluster
    throughputs = None if arguments.throughputs is None else Throughputs.load(arguments.throughputs, arguments.worker)
    jobs = read_trace(arguments.trace, throughputs)
    services = [] if arguments.services is None else read_services(arguments.services)
    outcomes = [
        run_jobs(jobs, cluster, policy, costs, fidelity=arguments.fidelity, services=services) for policy in policies
    ]
    notes = [*place.notes(), *_notes(jobs, policies, arguments)]
    if arguments.output is not None:
        _write_page(arguments, outcomes, cluster, costs, notes)
    if arguments.json:
        emit_json(_document(arguments, outcomes, cluster, costs))
        return 0
    emit_sections(*_tables(outcomes, cluster, notes))
    if arguments.output is not None:
        emit(f"\nOpen {printable(arguments.output)}\n")
    return 0


def _costs(arguments: Arguments) -> Costs:
    def seconds(name: str) -> float:
        return parse_quantity(getattr(arguments, name), "time", f"--{name}")

    return Costs(
        round_s=seconds("round"),
        start_s=seconds("start"),
        checkpoint_s=seconds("checkpoint"),
        migration_s=seconds("migration"),
        ahead_s=seconds("ahead"),
    )


def _place(arguments: Arguments) -> Place:
    rates = {
        name: None if text is None else parse_bandwidth(text, f"--{name}")
        for name, text in (("bandwidth", arguments.bandwidth), ("inside", arguments.inside))
    }
    return Place(
        cluster=arguments.cluster,
        hosts=arguments.hosts,
        devices=arguments.devices,
        bandwidth_bps=rates["bandwidth"],
        inside_bps=rates["inside"],
    )


def _notes(jobs: Sequence[Job], policies: Sequence[Policy], arguments: Arguments) -> list[str]:
    found: list[str] = []
    unknown = sum(job.traffic is None for job in jobs if job.most_gpus > 1)
    if arguments.fidelity == "flow" and unknown:
        found.append(
            f"{unknown} jobs with several GPUs do not say what they send, so links do not slow them down. Give the "
            "trace a column gradient_bytes or workload."
        )
    aware = [policy.name for policy in policies if policy.interleaves or policy.chooses_strategies]
    if arguments.fidelity == "throughput" and aware:
        found.append(f"{', '.join(aware)}: without links (--fidelity throughput) this orders jobs and nothing else.")
    return found


# -- printing --------------------------------------------------------------------------------------------------


def _tables(outcomes: Sequence[Outcome], cluster: Cluster, notes: Sequence[str]) -> list[RenderableType]:
    first = outcomes[0]
    head = f"{len(first.jobs)} jobs on {first.num_gpus} GPUs: {cluster.describe()}."
    columns = ("makespan", "mean completion", "95%", "unfair", "worst", "GPUs", "starts", "busiest link")
    table = plain_table("policy", *columns, numbers=columns)
    for outcome in outcomes:
        _, load = _busiest(outcome)
        table.add_row(
            outcome.policy,
            human_duration(outcome.makespan_s),
            human_duration(outcome.average_completion_s),
            human_duration(float(np.percentile(outcome.completion_s, 95))),
            f"{outcome.unfair_share:.0%}",
            f"{outcome.fairness.max():.1f}",
            f"{outcome.gpu_utilization:.0%}",
            f"{outcome.num_starts:,}",
            f"{load:.0%}" if outcome.link_load.size else "",
        )
    words = [
        "completion: from arrival to end. unfair: jobs that take over 1.1 times as long as on a share of the cluster "
        "of their own; worst: the largest such factor. GPUs: share of their time given to jobs."
    ]
    words += [
        f"{outcome.policy}: {_busiest(outcome)[0]} was the busiest link." for outcome in outcomes[:1] if _used(outcome)
    ]
    for outcome in outcomes:
        chosen = outcome.strategy_seconds()
        total_s = sum(chosen.values())
        if total_s:
            told = ", ".join(f"{text} {seconds / total_s:.0%}" for text, seconds in list(chosen.items())[:4])
            words.append(f"{outcome.policy}: on several hosts jobs used {told}.")
    # Services come before jobs, so that they fare alike under all policies.
    served = [_services(first.served)] if first.served else []
    return [head, table, *served, "\n".join([*words, *(f"Note: {note}" for note in notes)])]


def _services(found: Sequence[Served]) -> RenderableType:
    columns = ("requests", "late", "target", "GPU hours", "most replicas")
    table = plain_table("service", *columns, numbers=columns)
    for served in found:
        table.add_row(
            printable(served.service.name),
            f"{served.requests:,.0f}",
            f"{served.late_share:.2%}",
            f"{served.service.latency_s:g} s",
            f"{served.gpu_s / 3600:,.1f}",
            str(served.most_replicas),
        )
    return table


def _used(outcome: Outcome) -> bool:
    return bool(outcome.link_load.size and outcome.link_load.max() > 0)


def _busiest(outcome: Outcome) -> tuple[str | None, float]:
    if not outcome.link_load.size:
        return None, 0.0
    mean = outcome.mean_link_load
    link = int(mean.argmax())
    return outcome.link_names[link], float(mean[link])


def _document(arguments: Arguments, outcomes: Sequence[Outcome], cluster: Cluster, costs: Costs) -> dict[str, object]:
    return {
        "trace": arguments.trace,
        "jobs": len(outcomes[0].jobs),
        "cluster": cluster.describe(),
        "gpus": cluster.num_devices,
        "fidelity": arguments.fidelity,
        "costs": dataclasses.asdict(costs),
        "policies": [_record(outcome) for outcome in outcomes],
    }


def _record(outcome: Outcome) -> dict[str, object]:
    link, load = _busiest(outcome)
    fairness = outcome.fairness
    return {
        "policy": outcome.policy,
        "makespan_s": outcome.makespan_s,
        "avg_jct_s": outcome.average_completion_s,
        "geo_jct_s": outcome.geometric_completion_s,
        "p95_jct_s": float(np.percentile(outcome.completion_s, 95)),
        "unfair_share": outcome.unfair_share,
        "worst_fairness": float(fairness.max()),
        "gpu_utilization": outcome.gpu_utilization,
        "starts": outcome.num_starts,
        "busiest_link": link,
        "busiest_link_load": None if link is None else load,
        "mean_link_load": None if link is None else float(outcome.mean_link_load.mean()),
        "strategies": outcome.strategy_seconds(),
        "services": [
            {
                "service": served.service.name,
                "requests": served.requests,
                "late_share": served.late_share,
                "gpu_s": served.gpu_s,
                "most_replicas": served.most_replicas,
            }
            for served in outcome.served
        ],
        "jobs": [
            {
                "job": job.name,
                "arrival_s": float(arrival_s),
                "finish_s": float(finish_s),
                "completion_s": float(finish_s - arrival_s),
                "fairness": float(ratio),
            }
            for job, arrival_s, finish_s, ratio in zip(
                outcome.jobs, outcome.arrival_s, outcome.finish_s, fairness, strict=True
            )
        ],
    }


def _write_page(
    arguments: Arguments, outcomes: Sequence[Outcome], cluster: Cluster, costs: Costs, notes: Sequence[str]
) -> None:
    try:
        from laconic.report.schedule_page import render
    except ModuleNotFoundError as exc:
        # The library itself runs with torch and numpy alone, so an installation without jinja2 is legal.
        raise UsageError(f'--output needs {exc.name}. Install it with "pip install jinja2".') from exc
    assert arguments.output is not None
    assert arguments.trace is not None
    text = render(outcomes, cluster=cluster, costs=costs, trace=Path(arguments.trace).name, notes=notes)
    write_text(arguments.output, text)


# -- a published run -------------------------------------------------------------------------------------------


def _print_reference(arguments: Arguments) -> int:
    for option in dataclasses.fields(arguments):
        if option.name not in _WITH_REFERENCE and getattr(arguments, option.name) != option.default:
            raise UsageError(
                f"schedule: --{option.name} has no effect together with --reference, which has settings of its own."
            )
    folder = arguments.tables or os.environ.get(TABLES_VARIABLE)
    if not folder:
        raise UsageError(
            f"schedule: --reference {arguments.reference} needs its tables. Give --tables FOLDER, or set the "
            f"environment variable {TABLES_VARIABLE}."
        )
    if not Path(folder).is_dir():
        raise UsageError(f"schedule: there is no folder {one_line(folder, 120)}.")
    tables = Tables(Path(folder))
    found = calibrate(tables)
    jobs = tables.jobs()
    names = list(dict.fromkeys(arguments.policy or (CALIBRATED_ON, *PREDICTED)))
    outcomes = [predict(jobs, name, found.start_s) for name in names]
    rows = [
        {
            "policy": name,
            "makespan_s": round(outcome.makespan_s, 1),
            "avg_jct_s": round(outcome.average_completion_s, 1),
        }
        for name, outcome in zip(names, outcomes, strict=True)
    ]
    if arguments.json:
        emit_json(rows)
        return 0
    table = plain_table(
        "policy", "makespan (s)", "mean completion (s)", numbers=("makespan (s)", "mean completion (s)")
    )
    for row in rows:
        table.add_row(str(row["policy"]), f"{row['makespan_s']:,.0f}", f"{row['avg_jct_s']:,.0f}")
    emit_sections(
        table,
        f"One constant, read off {CALIBRATED_ON} alone: a start takes {found.start_s:g} s (makespan "
        f"{found.makespan_error:+.1%}, mean completion {found.completion_error:+.1%} of what was measured). All other "
        "policies are predicted. Nothing was fitted to the jobs' own GPU-seconds: they are "
        f"{found.own_gpu_s_error:+.1%} off those of the authors' simulation.",
    )
    return 0
