"""Strike training jobs with random faults and see whether everybody else ends as promised.

    python -m benchmarks.chaos --faults 500 [--jobs 4] [--out FILE]

Every job is 3 or 4 real processes over Gloo. One rank is killed, stopped, ended, raises, or is frozen for 5 s and goes
on, while it attaches, computes, is between two steps, saves, averages or detaches. The others must end within the
job's time limit plus 2 s with an error of laconic's that names that rank, and leave no thread and no process; where the
rank goes on, all must finish with the result of a run without the fault.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.chaos.job import Ended, Job
from benchmarks.chaos.scenario import FAULTS, MOMENTS, STRATEGIES, Scenario, draw
from benchmarks.chaos.verdict import problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=3, help="jobs at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further job after this long")
    parser.add_argument("--only", help="strategies whose name contains this")
    parser.add_argument("--number", type=int, action="append", help="only the scenario with this number")
    parser.add_argument("--out", type=Path, help="one JSON line per fault; those there count and are not repeated")
    parser.add_argument("--keep", type=Path, help="keep the folders of jobs that were not right here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # torch's store looks up the names of its clients; without a name server each of them takes 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    # What every rank would load by itself, once for all that are forked from here.
    for name in ("torch._dynamo", "numba", "laconic.runtime", "laconic.compression.kernels.numba_cpu.quantizers"):
        importlib.import_module(name)
    numbers = options.number or range(options.faults)
    chaos = Chaos([draw(number, options.seed, options.only) for number in numbers], options)
    try:
        chaos.run()
    except KeyboardInterrupt:
        chaos.print()
        print("stopped" + ("; what was done is kept." if options.out is not None else "."), file=sys.stderr)
        return 130
    chaos.print()
    return 1 if chaos.wrong else 0


class Chaos:
    """Runs scenarios a few at a time and keeps count."""

    def __init__(self, scenarios: list[Scenario], options: argparse.Namespace) -> None:
        self._waiting = scenarios[::-1]
        self._total = len(scenarios)
        self._options = options
        self._work = Path(tempfile.mkdtemp(prefix="laconic-chaos-"))
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._references: dict[tuple[object, ...], Job] = {}
        self._over: set[int] = set()
        """Scenarios whose reference has ended."""
        self._began_s = time.monotonic()
        self.wrong: list[str] = []
        self._done = 0
        if options.out is not None and options.out.exists():
            self._count_earlier(options.out.read_text(encoding="utf-8").splitlines())

    def _count_earlier(self, lines: list[str]) -> None:
        """Scenarios of an earlier run are not run again."""
        known = {json.dumps(record["scenario"]): record["problems"] for record in map(json.loads, lines)}
        for scenario in list(self._waiting):
            found = known.get(json.dumps(vars(scenario)))
            if found is not None:
                self._waiting.remove(scenario)
                self._count(scenario, found)

    def run(self) -> None:
        """All of them, with a line of progress."""
        running: list[Job] = []
        ending: list[tuple[Job, Ended]] = []
        try:
            while self._waiting or running or ending:
                if time.monotonic() - self._began_s > self._options.seconds:
                    self._waiting.clear()
                while self._waiting and len(running) < self._options.jobs:
                    scenario = self._waiting.pop()
                    self._start_reference(scenario)
                    running.append(Job(scenario, self._work / f"job{scenario.number}"))
                for reference in self._references.values():
                    if id(reference) not in self._over and reference.poll():
                        self._over.add(id(reference))
                        reference.end()
                for job in [job for job in running if job.poll()]:
                    running.remove(job)
                    ending.append((job, job.end()))
                for job, ended in list(ending):
                    reference = self._references.get(_kind(job.scenario))
                    if reference is not None and id(reference) not in self._over:
                        continue
                    left = job.leftover()
                    if left is not None:
                        ending.remove((job, ended))
                        ended.leftover = left
                        self._judge(job, ended)
                time.sleep(0.02)
        finally:
            for job in (*running, *(job for job in self._references.values() if id(job) not in self._over)):
                job.end()
            shutil.rmtree(self._work, ignore_errors=True)

    def _start_reference(self, scenario: Scenario) -> None:
        """A run without the fault, for scenarios that must come to the same; it goes on beside them."""
        key = _kind(scenario)
        if scenario.fault == "frozen" and key not in self._references:
            folder = self._work / f"reference{len(self._references)}"
            self._references[key] = Job(scenario, folder, strikes=False)

    def _judge(self, job: Job, ended: Ended) -> None:
        scenario = job.scenario
        reference = self._references.get(_kind(scenario))
        found = problems(scenario, ended, job.folder, None if reference is None else reference.folder)
        if self._count(scenario, found) and self._options.keep is not None:
            shutil.copytree(job.folder, self._options.keep / job.folder.name, dirs_exist_ok=True)
        if self._options.out is not None:
            with self._options.out.open("a", encoding="utf-8") as lines:
                record = {"scenario": vars(scenario), "problems": found, "ranks": ended.ranks}
                lines.write(json.dumps(record) + "\n")
        shutil.rmtree(job.folder, ignore_errors=True)
        if sys.stderr.isatty() or self._done % 25 == 0:
            took_s = time.monotonic() - self._began_s
            print(f"{self._done} of {self._total} faults, {len(self.wrong)} not right, {took_s:.0f} s", file=sys.stderr)

    def _count(self, scenario: Scenario, found: list[str]) -> bool:
        """Whether something was not right; it is told."""
        self._done += 1
        kinds = {problem.partition(":")[0] for problem in found} or {"right"}
        for key in (scenario.fault, scenario.moment, scenario.strategy, "all"):
            self._counts[key].update(["faults", *kinds])
        if not found or kinds == {"not struck"}:
            return False
        self.wrong.append(f"{scenario.text}\n    " + "\n    ".join(found))
        print(self.wrong[-1], flush=True)
        return True

    def print(self) -> None:
        """The table, by fault, moment and strategy."""
        kinds = sorted({kind for counts in self._counts.values() for kind in counts} - {"faults", "right"})
        table = Table(title=f"{self._done} faults in {time.monotonic() - self._began_s:.0f} s")
        table.add_column("")
        for column in ("faults", "right", *kinds):
            table.add_column(column, justify="right")
        for group in (FAULTS, MOMENTS, STRATEGIES, ("all",)):
            for key in group:
                if key in self._counts:
                    counts = self._counts[key]
                    table.add_row(key, *(str(counts[column]) for column in ("faults", "right", *kinds)))
            table.add_section()
        Console(width=160).print(table)


def _kind(scenario: Scenario) -> tuple[object, ...]:
    """Scenarios that come to the same models if nothing goes wrong."""
    saves = (scenario.moment, scenario.step) if scenario.moment in ("average", "state_dict") else ()
    return scenario.strategy, scenario.world_size, scenario.batch_norm, saves


if __name__ == "__main__":
    sys.exit(main())
