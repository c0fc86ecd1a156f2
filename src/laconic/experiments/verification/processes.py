"""All checks on processes that communicate over Gloo: one launch for all checks of one number of workers.

Started once per rank as `python -m laconic.experiments.verification.processes STRATEGIES.json`. Rank 0 prints one JSON
line per check.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from laconic.core.hosts import HOST_VARIABLE
from laconic.errors import LaconicError, one_line
from laconic.experiments.verification.all_checks import CHECKS, check_possible, raised
from laconic.experiments.verification.outcome import Findings, Outcome, failed
from laconic.experiments.verification.stage import on_this_process, virtual_hosts
from laconic.experiments.verification.trainee import Trainee
from laconic.lab.launch import Place, RankFailed, places_here, run_ranks
from laconic.strategy import Strategy

_LIMIT_S = 900.0
"""How long all checks of one strategy may take: servers are processes too, and each must first import torch."""


def verify_on_processes(
    strategies: Sequence[Strategy],
    workers: int,
    *,
    on_check: Callable[[int, str, Outcome], None] = lambda number, name, outcome: None,
    on_found: Callable[[Findings], None] = lambda findings: None,
) -> list[Findings]:
    """Run every check of every strategy with that many processes as workers.

    on_check: gets the number of the strategy, the check and its result, as soon as that is known. on_found: gets the
    findings of a strategy, as soon as all its checks were made. Other threads may call both.
    """
    for strategy in strategies:
        check_possible(strategy, workers)
    outcomes: list[dict[str, Outcome]] = [{} for _ in strategies]
    results: list[Findings] = []
    began_s = time.monotonic()

    def note(number: int, name: str, outcome: Outcome) -> None:
        nonlocal began_s
        outcomes[number][name] = outcome
        on_check(number, name, outcome)
        if len(outcomes[number]) == len(CHECKS):
            ended_s = time.monotonic()
            results.append(
                Findings(
                    strategy=str(strategies[number]),
                    workers=workers,
                    where="processes",
                    outcomes={name: outcomes[number][name] for name in CHECKS},
                    seconds=ended_s - began_s,
                )
            )
            began_s = ended_s
            on_found(results[-1])

    def on_line(rank: int, line: str) -> None:
        if rank == 0 and line.startswith('{"strategy"'):
            told = json.loads(line)
            note(int(told["strategy"]), str(told["check"]), Outcome(**told["outcome"]))

    problem = "did not run"
    with tempfile.TemporaryDirectory(prefix="laconic-") as scratch:
        path = Path(scratch) / "strategies.json"
        path.write_text(json.dumps([str(strategy) for strategy in strategies]), encoding="utf-8")
        try:
            run_ranks(
                [sys.executable, "-m", "laconic.experiments.verification.processes", str(path)],
                _places(workers),
                timeout_s=_LIMIT_S * len(strategies),
                environment={"OMP_NUM_THREADS": "1"},
                on_line=on_line,
            )
        except RankFailed as exc:
            problem = f"did not run: {one_line(exc, 300)}"
    for number, made in enumerate(outcomes):
        for name in CHECKS:
            if name not in made:
                note(number, name, failed(problem))
    return results


def _places(workers: int) -> list[Place]:
    """Ranks on this machine, which count as being on virtual hosts."""
    host_of = {rank: number for number, host in enumerate(virtual_hosts(workers)) for rank in host}
    return [
        replace(place, environment={**place.environment, HOST_VARIABLE: f"virtual host {host_of[rank]}"})
        for rank, place in enumerate(places_here(workers))
    ]


def _be_rank(strategies: list[Strategy]) -> int:
    """Run all checks as one rank; return the exit code."""
    stage = on_this_process()
    # Modules that torch loads at the first optimizer step would look like a slow worker.
    Trainee(stage, Strategy()).train([0])
    for number, strategy in enumerate(strategies):
        for name, check in CHECKS.items():
            going_on = True
            try:
                outcome = check(stage, strategy)
            except Exception as exc:  # noqa: BLE001 - a method may fail in any way; the failure is the result
                outcome, going_on = failed(raised(exc)), False
            if stage.rank == 0:
                line = {"strategy": number, "check": name, "outcome": asdict(outcome)}
                print(json.dumps(line), flush=True)  # noqa: T201 - read by whoever started this rank
            if not going_on:
                # Other ranks may still be in the middle of the check, so later results would be meaningless.
                print(outcome.words, flush=True)  # noqa: T201 - likewise
                return 1
    return 0


def main() -> int:
    """Run one rank."""
    torch.set_num_threads(1)
    texts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        dist.init_process_group("gloo")
    except (RuntimeError, ValueError) as exc:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        print(f"cannot start the process group at {where}: {one_line(exc)}", flush=True)  # noqa: T201
        return 2
    try:
        code = _be_rank([Strategy.parse(text) for text in texts])
    except LaconicError as exc:
        print(f"{type(exc).__name__}: {exc}", flush=True)  # noqa: T201
        return 2
    if code == 0:
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
