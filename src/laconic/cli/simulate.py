"""`laconic simulate [STRATEGY ...]`: what a step costs on a cluster that need not exist, and why.

With --json, one stable document:

    {"workload": str, "batch": int, "fidelity": str,
     "conditions": {"slow": {RANK: factor}, "noise_ratio": float, "interference_ratio": float, "optimizer_s": float},
     "rows": [{"name": str,                the preset's name, or the text
               "strategy": str,            canonical text
               "cluster": str, "workers": int, "bandwidth_bps": float,
               "refused": str or null,     why it cannot run there; then nothing follows
               "step_s", "compute_s", "exposed_s", "samples_per_s", "efficiency", "wire_bytes",
               "busy": {PART: share},
               "critical_path": [{"what": str, "share": float}],
               "spread_s": [5%, median, 95%] or null,
               "target": with --target only; null: not measured
                         {"steps_ratio", "steps_ratio_low", "steps_ratio_high", "seconds", "seconds_low",
                          "seconds_high", "is_product": bool, "because": str}}],
     "warnings": [str],
     "verdict": str}                       the best by time to plain DDP's loss, in a sentence

Rows come setting by setting (bandwidth, then workers), in each the strategies in the order given. With --reference,
an array of the rows of a published table (simulate_reference.py); with --parallel, see simulate_parallel.py; with
--serve, see simulate_serve.py; with --reference quantitative-survey, of the cells of that survey: {"model", "network",
"method", "gpus", "throughput"}.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from laconic.cli.files import check_writable, read_strategies, write_text
from laconic.cli.options.simulate import Arguments
from laconic.cli.simulate_parallel import PARALLEL_ONLY, print_parallel
from laconic.cli.simulate_reference import print_reference
from laconic.cli.simulate_serve import print_serving
from laconic.cli.simulate_view import as_json, simulated, tables, warnings
from laconic.cli.terminal import emit, emit_json, emit_sections, plain_table, printable
from laconic.cluster import parse_bandwidth
from laconic.cluster.place import Place, Setting
from laconic.core.event import Event
from laconic.errors import UsageError, one_line
from laconic.experiments.comparison import short_name
from laconic.report.perfetto import trace
from laconic.simulator.simulation import Conditions, Simulation
from laconic.simulator.sweep import Row, Sweep, parse_counts
from laconic.simulator.trace import events, rank_names
from laconic.strategy import SEVEN, Strategy
from laconic.units import parse_quantity
from laconic.workload import Workload, workload

DEFAULT_STRATEGIES = (
    "ddp",
    "wfbp-a2a",
    "mg-wfbp",
    "bytescheduler-a2a",
    "dear",
    "ddp-bf16",
    "powersgd",
    "topk-int8-ef",
    "local-sgd",
    "d-psgd",
)
"""Ways to send everything, then fewer bytes, then less often or to neighbours only."""

_SURVEY = "quantitative-survey"


def run(arguments: Arguments) -> int:
    """Simulate and print."""
    if arguments.serve is not None:
        _refuse_others(arguments, ("serve", "json"), "--serve, whose line holds every setting.")
        print_serving(arguments.serve, as_json=arguments.json)
        return 0
    if arguments.reference is not None:
        _refuse_others(
            arguments, ("reference", "rows", "calibrate", "json"), "--reference, whose settings are those published."
        )
        for option, given in (("rows", arguments.rows), ("calibrate", arguments.calibrate)):
            if arguments.reference == _SURVEY and given is not None:
                raise UsageError(
                    f"simulate: --{option} has no effect together with --reference {_SURVEY}, which prints every cell."
                )
        if arguments.reference == _SURVEY:
            _print_survey(as_json=arguments.json)
        else:
            print_reference(arguments.reference, arguments.rows, arguments.calibrate, as_json=arguments.json)
        return 0
    if arguments.parallel is not None:
        print_parallel(arguments)
        return 0
    _refuse_without_parallel(arguments)
    for option, given in (("rows", arguments.rows), ("calibrate", arguments.calibrate)):
        if given is not None:
            raise UsageError(
                f"simulate: --{option} has no effect without --reference, which names the table. Give both, or neither."
            )
    places = _places(arguments)
    sweep = Sweep(
        strategies=_strategies(arguments),
        workload=_workload(arguments),
        settings=_settings(places, arguments.workers),
        fidelity=arguments.fidelity,
        conditions=_conditions(arguments),
    )
    if arguments.trace is not None and len(sweep.settings) > 1:
        raise UsageError("simulate: --trace shows one cluster with one number of workers; leave out the sweep.")
    for path in (arguments.trace, arguments.output):
        check_writable(path)
    if arguments.trace is not None and arguments.output is not None and _same(arguments.trace, arguments.output):
        raise UsageError(f"simulate: --trace and --output both name {one_line(arguments.output, 120)}. Give two files.")
    turns: list[Simulation] = []
    rows = simulated(sweep, keep=turns if arguments.trace is not None else None)
    if all(row.prediction is None for row in rows):
        raise UsageError(f"simulate: {rows[0].refused}")
    notes = list(dict.fromkeys(note for place in places for note in place.notes()))
    if arguments.trace is not None:
        write_text(arguments.trace, json.dumps(_trace(turns), separators=(",", ":"), allow_nan=False))
    if arguments.output is not None:
        write_text(arguments.output, _page(sweep, rows, notes, target=arguments.target))
    if arguments.json:
        emit_json(as_json(sweep, rows, notes, target=arguments.target))
        return 0
    emit_sections(*tables(sweep, rows, notes, target=arguments.target))
    if arguments.trace is not None:
        emit(f"\nOpen {printable(arguments.trace)} in ui.perfetto.dev\n")
    if arguments.output is not None:
        emit(f"\nOpen {printable(arguments.output)}\n")
    return 0


def _same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _trace(turns: Sequence[Simulation]) -> dict[str, object]:
    """A trace of all strategies, one after the other."""
    found: list[Event] = []
    began_s = 0.0
    for turn in turns:
        found += events(turn, began_s=began_s)
        # A gap that is seen.
        began_s += 1.05 * turn.outcome.makespan_s
    return trace(found, rank_names(turns[0]))


def _page(sweep: Sweep, rows: Sequence[Row], notes: Sequence[str], *, target: bool) -> str:
    try:
        from laconic.report.sweep_page import render
    except ModuleNotFoundError as exc:
        # The library itself runs with torch and numpy alone, so an installation without jinja2 is legal.
        raise UsageError(f'--output needs {exc.name}. Install it with "pip install jinja2".') from exc
    names = {str(strategy): short_name(str(strategy)) for strategy in sweep.strategies}
    return render(sweep, rows, names=names, warnings=warnings(rows, notes), target=target)


def _refuse_others(arguments: Arguments, allowed: Sequence[str], beside: str) -> None:
    for option in dataclasses.fields(arguments):
        given = getattr(arguments, option.name) != option.default
        if given and option.name not in allowed:
            name = "a strategy" if option.name == "strategy" else f"--{option.name}"
            raise UsageError(f"simulate: {name} has no effect together with {beside}")


def _refuse_without_parallel(arguments: Arguments) -> None:
    for option in dataclasses.fields(arguments):
        if option.name in PARALLEL_ONLY and getattr(arguments, option.name) != option.default:
            raise UsageError(f"simulate: --{option.name} has no effect without --parallel. Leave it out, or give both.")


def _print_survey(*, as_json: bool) -> None:
    from laconic.simulator.reference.quantitative_survey import table

    rows = table()
    if as_json:
        emit_json(rows)
        return
    headers = list(dict.fromkeys(key for row in rows for key in row))
    printed = plain_table(*headers, numbers=("gpus", "throughput"))
    for row in rows:
        printed.add_row(*(_cell(row.get(header, "")) for header in headers))
    emit_sections(printed)


def _cell(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


def _strategies(arguments: Arguments) -> tuple[Strategy, ...]:
    if arguments.preset is not None:
        if arguments.strategy or arguments.strategies:
            raise UsageError("simulate: give --preset or strategies of your own, not both.")
        texts: Sequence[str] = SEVEN
    else:
        texts = read_strategies(arguments.strategy, arguments.strategies, DEFAULT_STRATEGIES)
    # Two spellings of one strategy are one row.
    found = {
        str(strategy): strategy
        for strategy in (Strategy.load(text) if text.endswith(".toml") else Strategy.parse(text) for text in texts)
    }
    return tuple(found.values())


def _workload(arguments: Arguments) -> Workload:
    found = workload(arguments.workload)
    if arguments.compute is None:
        return found
    return found.scaled(compute_s=parse_quantity(arguments.compute, "time", "--compute"))


def _places(arguments: Arguments) -> list[Place]:
    rates = [parse_bandwidth(rate, "--bandwidth") for text in arguments.bandwidth for rate in text.split(",")]
    delay_s = None if arguments.delay is None else parse_quantity(arguments.delay, "time", "--delay")
    inside_bps = None if arguments.inside is None else parse_bandwidth(arguments.inside, "--inside")
    return [
        Place(
            cluster=arguments.cluster,
            hosts=arguments.hosts,
            devices=arguments.devices,
            bandwidth_bps=rate,
            delay_s=delay_s,
            inside_bps=inside_bps,
        )
        for rate in dict.fromkeys(rates) or [None]
    ]


def _settings(places: Sequence[Place], workers: str | None) -> tuple[Setting, ...]:
    counts = (None,) if workers is None else parse_counts(workers, "--workers")
    return tuple(place.setting(count) for place in places for count in counts)


def _conditions(arguments: Arguments) -> Conditions:
    slow: dict[int, float] = {}
    for text in arguments.slow:
        number, _, value = text.partition("=")
        try:
            rank, factor = int(number), float(value)
        except ValueError as exc:
            raise UsageError(
                f'--slow must be RANK=FACTOR, a rank and the factor on its compute time, e.g. 3=2, got "'
                f'{one_line(text, 60)}".'
            ) from exc
        if rank in slow:
            raise UsageError(f"simulate: --slow is given twice for rank {rank}. Give it once.")
        slow[rank] = factor
    return Conditions(
        slow=slow,
        noise_ratio=parse_quantity(arguments.noise, "share", "--noise"),
        interference_ratio=parse_quantity(arguments.interference, "share", "--interference"),
        optimizer_s=parse_quantity(arguments.optimizer, "time", "--optimizer"),
    )
