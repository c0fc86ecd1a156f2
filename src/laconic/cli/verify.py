"""`laconic verify STRATEGY`: make real steps and check what the strategy promises; exit code 1 if a check fails.

With --json, one stable document:

    {"passed": bool, "stopped": bool,
     "findings": [{"strategy": str, "workers": int, "where": "threads" | "processes", "passed": bool, "seconds": float,
                   "checks": [{"check": str, "verdict": "passed" | "failed" | "not applicable", "words": str}]}],
     "matrix": [{"methods": {place: name, place: name}, "verdict": "passed" | "refused" | "failed" | "not reached",
                 "rule": str | null, "reason": str | null}]}                          with --matrix only

"matrix" has an entry for every two methods that are registered. "stopped" is true after Ctrl-C, with exit code 130, and
after an error, with exit code 2; all that was found before is printed. "matrix" is empty if Ctrl-C came before the
strategies were chosen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from laconic.cli.explain import parse_count
from laconic.cli.options.verify import Arguments
from laconic.cli.terminal import emit, emit_json, emit_sections
from laconic.cli.verify_view import findings_tables, matrix_tables, watching
from laconic.errors import LaconicError, LaconicWarning, UsageError
from laconic.experiments.verification import Findings, Matrix, Outcome, matrix, verify_at_once, verify_on_threads
from laconic.experiments.verification.at_once import ignoring_ctrl_c
from laconic.experiments.verification.processes import verify_on_processes
from laconic.strategy import Strategy


def run(arguments: Arguments) -> int:
    """Check, print; 1 if something failed, 130 if it was stopped."""
    if arguments.matrix == (arguments.strategy is not None):
        raise UsageError("verify: give either a strategy or --matrix.")
    counts = [
        parse_count(word, "--workers", at_most=1000, example="4 or 2,3,4") for word in arguments.workers.split(",")
    ]
    jobs = parse_count(arguments.jobs, "--jobs", at_most=1000, example="4")
    if jobs > 1 and not arguments.matrix:
        raise UsageError("verify: --jobs has an effect only with --matrix, which checks many strategies.")
    given = None if arguments.matrix else _given(str(arguments.strategy))
    pairs: Matrix | None = None
    findings: list[Findings] = []
    stopped = False
    error: LaconicError | None = None
    try:
        if given is None:
            # Takes seconds, in which Ctrl-C must be answered as well.
            pairs = matrix()
        strategies = [given] if given is not None else list(pairs.rows if pairs is not None else ())
        _verify(strategies, counts, jobs=jobs, processes=arguments.processes, found=findings.append)
    except KeyboardInterrupt:
        stopped = True
    except LaconicError as exc:
        if not findings:
            raise
        # What was found in many minutes is printed first.
        error = exc
    failed = any(one.failures for one in findings)
    # Whoever is impatient and presses Ctrl-C again still gets the results.
    with ignoring_ctrl_c() if stopped else nullcontext():
        if arguments.json:
            document: dict[str, object] = {
                "passed": not failed and not stopped and error is None,
                "stopped": stopped or error is not None,
                "findings": [one.as_json() for one in findings],
            }
            if arguments.matrix:
                document["matrix"] = [] if pairs is None else _as_json(pairs, findings)
            emit_json(document)
        elif not arguments.matrix:
            emit_sections(*findings_tables(findings, stopped=stopped))
        elif pairs is not None:
            emit_sections(*matrix_tables(pairs, findings, stopped=stopped))
        else:
            emit("Stopped by Ctrl-C while strategies were chosen: none was verified.\n")
    if error is not None:
        raise error
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


def _verify(
    strategies: Sequence[Strategy],
    counts: Sequence[int],
    *,
    jobs: int,
    processes: bool,
    found: Callable[[Findings], None],
) -> None:
    """Check each strategy on threads, then each number of workers on processes; `found` gets every finding."""
    on_threads = [strategy for strategy in strategies if not strategy.architecture.holds_shards]
    on_processes = strategies if processes else [one for one in strategies if one.architecture.holds_shards]
    # Ranks are threads already; more threads inside each operation would only get in their way.
    torch.set_num_threads(1)
    with watching((len(on_threads) + len(on_processes)) * len(counts)) as watcher, warnings.catch_warnings():
        # That a method would learn more with error feedback is no news to whoever verifies it without.
        warnings.simplefilter("ignore", LaconicWarning)

        def ended(one: Findings) -> None:
            found(one)
            watcher.end(one)

        if jobs > 1:
            for one in verify_at_once(on_threads, counts, jobs):
                watcher.begin(one.strategy, one.workers, one.where)
                ended(one)
        for strategy in on_threads if jobs == 1 else ():
            for workers in counts:
                watcher.begin(str(strategy), workers, "threads")
                ended(verify_on_threads(strategy, workers, on_check=watcher.check))
        for workers in counts if on_processes else ():

            def told(number: int, name: str, outcome: Outcome, workers: int = workers) -> None:
                watcher.begin(str(on_processes[number]), workers, "processes")
                watcher.check(name, outcome)

            verify_on_processes(on_processes, workers, on_check=told, on_found=ended)
