"""`laconic verify STRATEGY`: make real steps and check what the strategy promises; exit code 1 if a check fails.

With --json, one stable document:

    {"passed": bool, "stopped": bool,
     "findings": [{"strategy": str, "workers": int, "where": "threads" | "processes", "passed": bool, "seconds": float,
                   "checks": [{"check": str, "verdict": "passed" | "failed" | "not applicable", "words": str}]}],
     "matrix": [{"methods": {place: name, place: name}, "verdict": "passed" | "refused" | "failed" | "not reached",
                 "rule": str | null, "reason": str | null}]}                          with --matrix only

"matrix" has an entry for every two methods that are registered. "stopped" is true after Ctrl-C; the exit code is then
130, and all that was found before is printed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch

from laconic.cli.explain import parse_count
from laconic.cli.options.verify import Arguments
from laconic.cli.terminal import emit_json, emit_sections
from laconic.cli.verify_view import findings_tables, matrix_tables, watching
from laconic.errors import LaconicWarning, UsageError
from laconic.experiments.verification import Findings, Matrix, Outcome, matrix, verify_on_threads
from laconic.experiments.verification.processes import verify_on_processes
from laconic.strategy import Strategy


def run(arguments: Arguments) -> int:
    """Check, print; 1 if something failed, 130 if it was stopped."""
    if arguments.matrix == (arguments.strategy is not None):
        raise UsageError("verify: give a strategy or --matrix, one of the two.")
    counts = [
        parse_count(word, "--workers", at_most=1000, example="4 or 2,3,4") for word in arguments.workers.split(",")
    ]
    pairs = matrix() if arguments.matrix else None
    strategies = list(pairs.rows) if pairs is not None else [_given(str(arguments.strategy))]
    findings: list[Findings] = []
    stopped = False
    try:
        for one in _verified(strategies, counts, processes=arguments.processes):
            findings.append(one)
    except KeyboardInterrupt:
        stopped = True
    failed = any(one.failures for one in findings)
    if arguments.json:
        document: dict[str, object] = {
            "passed": not failed and not stopped,
            "stopped": stopped,
            "findings": [one.as_json() for one in findings],
        }
        if pairs is not None:
            document["matrix"] = _as_json(pairs, findings)
        emit_json(document)
    elif pairs is not None:
        emit_sections(*matrix_tables(pairs, findings))
    else:
        emit_sections(*findings_tables(findings))
    return 130 if stopped else int(failed)


def _given(text: str) -> Strategy:
    return Strategy.load(text) if text.endswith(".toml") else Strategy.parse(text)


def _as_json(pairs: Matrix, findings: Sequence[Findings]) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    for pair, verdict in pairs.verdicts(findings).items():
        refused = pairs.refused.get(pair)
        why = {"rule": None, "reason": None} if refused is None else {"rule": refused.rule, "reason": refused.reason}
        entries.append({"methods": {name.place: name.name for name in pair}, "verdict": verdict, **why})
    return entries


def _verified(strategies: Sequence[Strategy], counts: Sequence[int], *, processes: bool) -> Iterator[Findings]:
    """All findings, strategy by strategy on threads, then number by number on processes."""
    on_threads = [strategy for strategy in strategies if not strategy.architecture.holds_shards]
    on_processes = strategies if processes else [one for one in strategies if one.architecture.holds_shards]
    # Ranks are threads already; more threads inside each operation would only get in their way.
    torch.set_num_threads(1)
    with watching((len(on_threads) + len(on_processes)) * len(counts)) as watcher, warnings.catch_warnings():
        # That a method would learn more with error feedback is no news to whoever verifies it without.
        warnings.simplefilter("ignore", LaconicWarning)
        for strategy in on_threads:
            for workers in counts:
                watcher.begin(str(strategy), workers, "threads")
                found = verify_on_threads(strategy, workers, on_check=watcher.check)
                watcher.end(found)
                yield found
        for workers in counts if on_processes else ():

            def told(number: int, name: str, outcome: Outcome, workers: int = workers) -> None:
                watcher.begin(str(on_processes[number]), workers, "processes")
                watcher.check(name, outcome)

            for found in verify_on_processes(on_processes, workers, on_check=told):
                watcher.end(found)
                yield found
