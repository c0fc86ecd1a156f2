"""`laconic verify STRATEGY`: make real steps and check what the strategy promises; exit code 1 if a check fails.

With --json, one stable document:

    {"passed": bool,
     "findings": [{"strategy": str, "workers": int, "where": "threads" | "processes", "passed": bool, "seconds": float,
                   "checks": [{"check": str, "verdict": "passed" | "failed" | "not applicable", "words": str}]}],
     "matrix": [{"asked": str, "strategy": str | null, "reason": str | null}]}       with --matrix only

"matrix" says for each of its entries what was verified: what was asked for, the nearest strategy that does the same, or
nothing because there is none.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict

import torch

from laconic.cli.explain import parse_count
from laconic.cli.options.verify import Arguments
from laconic.cli.terminal import emit_json, emit_sections
from laconic.cli.verify_view import findings_tables, matrix_table, watching
from laconic.errors import LaconicWarning, UsageError
from laconic.experiments.verification import Cell, Findings, Outcome, cells, verify_on_threads
from laconic.experiments.verification.processes import verify_on_processes
from laconic.strategy import Strategy

_WORKERS, _MATRIX_WORKERS = "2", "2,3,4"


def run(arguments: Arguments) -> int:
    """Check, print; 1 if something failed."""
    if arguments.matrix == (arguments.strategy is not None):
        raise UsageError("verify: give a strategy or --matrix, one of the two.")
    matrix = cells() if arguments.matrix else [_given(str(arguments.strategy))]
    counts = [
        parse_count(word, "--workers", at_most=1000, example="4 or 2,3,4")
        for word in (arguments.workers or (_MATRIX_WORKERS if arguments.matrix else _WORKERS)).split(",")
    ]
    findings = _verified(matrix, counts, processes=arguments.processes)
    if arguments.json:
        document: dict[str, object] = {
            "passed": not any(one.failures for one in findings),
            "findings": [one.as_json() for one in findings],
        }
        if arguments.matrix:
            document["matrix"] = [{**asdict(cell), "strategy": _text(cell)} for cell in matrix]
        emit_json(document)
    elif arguments.matrix:
        emit_sections(*matrix_table(matrix, findings))
    else:
        emit_sections(*findings_tables(findings))
    return 1 if any(one.failures for one in findings) else 0


def _given(text: str) -> Cell:
    strategy = Strategy.load(text) if text.endswith(".toml") else Strategy.parse(text)
    return Cell(text, strategy, None)


def _text(cell: Cell) -> str | None:
    return None if cell.strategy is None else str(cell.strategy)


def _verified(matrix: list[Cell], counts: list[int], *, processes: bool) -> list[Findings]:
    """All findings, strategy by strategy on threads, then number by number on processes."""
    strategies = list(dict.fromkeys(cell.strategy for cell in matrix if cell.strategy is not None))
    on_threads = [strategy for strategy in strategies if not strategy.architecture.holds_shards]
    on_processes = strategies if processes else [one for one in strategies if one.architecture.holds_shards]
    findings: list[Findings] = []
    # Ranks are threads already; more threads inside each operation would only get in their way.
    torch.set_num_threads(1)
    with watching((len(on_threads) + len(on_processes)) * len(counts)) as watcher, warnings.catch_warnings():
        # That a method would learn more with error feedback is no news to whoever verifies it without.
        warnings.simplefilter("ignore", LaconicWarning)
        for strategy in on_threads:
            for workers in counts:
                watcher.begin(str(strategy), workers, "threads")
                findings.append(verify_on_threads(strategy, workers, on_check=watcher.check))
                watcher.end(findings[-1])
        for workers in counts if on_processes else ():

            def told(number: int, name: str, outcome: Outcome, workers: int = workers) -> None:
                watcher.begin(str(on_processes[number]), workers, "processes")
                watcher.check(name, outcome)

            made = verify_on_processes(on_processes, workers, on_check=told)
            for one in made:
                watcher.end(one)
            findings += made
    return findings
