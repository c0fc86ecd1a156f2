"""Runs a comparison link by link and keeps everything in a folder.

One job per link; the contenders take turns in it (contest.py). The ranks write events; rows, curves, trace and page
are made from those, also when a run ends early, so measurements until then are kept.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

from laconic.errors import LaconicError, UsageError, one_line
from laconic.experiments.comparison import UNLIMITED, Comparison, Network, short_name
from laconic.experiments.config_file import to_toml
from laconic.experiments.contest import ContestConfig
from laconic.experiments.rank_messages import Failure, Progress, Refusal, read
from laconic.experiments.tasks import Task, make_task
from laconic.lab.capabilities import Capabilities, detect_capabilities
from laconic.lab.launch import Place, RankFailed, places_here, run_ranks
from laconic.lab.machine import gpus, machine, versions
from laconic.lab.mps import GpuSharing, shared_gpu
from laconic.lab.pacing import choose_links, places_paced
from laconic.lab.virtual_hosts import VirtualHosts, check_possible, places_on
from laconic.report import measures
from laconic.report.advice import advise
from laconic.report.perfetto import trace
from laconic.report.results import Links, Results
from laconic.report.run_folder import RunFolder


class Watcher(Protocol):
    """Receives the progress of a comparison."""

    def begin(self, link: str, links: Links) -> None:
        """A contest starts."""
        ...

    def step(self, link: str, progress: Progress) -> None:
        """A step has been made."""
        ...

    def refuse(self, link: str, refusal: Refusal) -> None:
        """A strategy does not take part."""
        ...

    def note(self, text: str) -> None:
        """Any other message."""
        ...


def run_comparison(comparison: Comparison, watcher: Watcher, out: str | None = None) -> tuple[Results, RunFolder]:
    """Run every contest and write the files of the folder `out`; if one fails, write the results so far and raise."""
    task = make_task(comparison.task)  # here, so that a missing file is noticed before anything starts
    capabilities = detect_capabilities()
    _kind_of_links(comparison, capabilities)  # raises, before there is a folder, if they are not possible
    folder = RunFolder.create(comparison.kind, out)
    folder.write_text("config.toml", to_toml(comparison))
    folder.write_text("env.json", json.dumps(describe_environment(capabilities), indent=2) + "\n")
    run = _Run(comparison, capabilities, folder, watcher, task)
    problem: BaseException | None = None
    try:
        run.hold()
    except (LaconicError, KeyboardInterrupt) as exc:
        problem = exc
    reason = None if problem is None else one_line(problem, 500) or "interrupted from the keyboard"
    try:
        results = run.results(reason)
        run.write(results)
    except LaconicError as exc:
        if problem is None:
            raise
        watcher.note(str(exc))  # the first failure is the one to raise
    else:
        if problem is None:
            return results, folder
        watcher.note(f"the measurements until then are in {folder.path}")
    raise problem


def _kind_of_links(comparison: Comparison, capabilities: Capabilities) -> Links:
    clusters = [network.cluster for network in comparison.networks if network.cluster is not None]
    if not clusters:
        return "unlimited"
    if len(clusters) < len(comparison.networks):
        raise UsageError(
            f"{comparison.kind}: --bandwidth {UNLIMITED} cannot be combined with others. Give it a run of its own."
        )
    links = choose_links(comparison.links, capabilities)
    if links == "paced" and comparison.torch_hooks:
        raise UsageError("torch's communication hooks cannot be paced. Use --links shaped, or --bandwidth unlimited.")
    if links == "paced" and comparison.sharded:
        raise UsageError("FSDP2 cannot be paced. For sharded models use --links shaped, or --bandwidth unlimited.")
    if links == "shaped":
        for cluster in clusters:
            check_possible(cluster, capabilities)
    return links


class _Run:
    """A running comparison."""

    def __init__(
        self, comparison: Comparison, capabilities: Capabilities, folder: RunFolder, watcher: Watcher, task: Task
    ) -> None:
        self._comparison = comparison
        self._task = task
        self._links = _kind_of_links(comparison, capabilities)
        self._capabilities = capabilities
        self._folder = folder
        self._watcher = watcher
        self._began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._began_s = time.monotonic()
        self._sharing: GpuSharing | None = None

    def hold(self) -> None:
        """One contest after the other; on a GPU with an MPS daemon, if possible."""
        if self._comparison.device == "cpu":
            self._hold()
            return
        with shared_gpu(self._comparison.mps) as sharing:
            self._sharing = sharing
            self._watcher.note(f"ranks are {sharing}" + (f": {sharing.reason}" if sharing.reason else ""))
            self._hold()

    def _hold(self) -> None:
        gpu, each = self._comparison.device == "cuda", self._comparison.ranks_per_host
        for network in self._comparison.networks:
            self._watcher.begin(network.name, self._links)
            if network.cluster is None:
                self._contest(network, places_here(self._comparison.hosts * each))
            elif self._links == "paced":
                self._contest(network, places_paced(network.cluster, ranks_per_host=each, gpu=gpu))
            else:
                with VirtualHosts(network.cluster, self._capabilities) as hosts:
                    self._contest(network, places_on(hosts, ranks_per_host=each, gpu=gpu))

    def _contest(self, network: Network, places: Sequence[Place]) -> None:
        with tempfile.TemporaryDirectory(prefix="laconic-") as scratch:
            config_path = Path(scratch) / "contest.json"
            ContestConfig(
                task=self._comparison.task,
                contenders=self._comparison.contenders,
                steps=self._comparison.steps,
                seconds=self._comparison.seconds,
                link=network.name,
                events=str(self._folder.events_path.resolve()),
                device=self._comparison.device,
                ranks_per_host=self._comparison.ranks_per_host,
                sharded=self._comparison.sharded,
            ).write(config_path)

            failures: list[Failure] = []

            def on_line(rank: int, line: str) -> None:
                message = read(line)
                if isinstance(message, Failure):
                    failures.append(message)
                elif message is not None:
                    self._show(network.name, message)

            try:
                run_ranks(
                    [sys.executable, "-m", "laconic.experiments.contest", str(config_path)],
                    places,
                    timeout_s=self._comparison.timeout_s,
                    # One thread per rank: ranks that compete for cores would measure the scheduler, not the strategy.
                    environment={"OMP_NUM_THREADS": "1", **(self._sharing.environment if self._sharing else {})},
                    on_line=on_line,
                )
            except RankFailed as exc:
                if not failures:
                    raise
                # Other ranks fail because the first did; only its error names the cause.
                first = min(failures, key=lambda failure: failure.time_s)
                raise LaconicError(f"rank {first.rank} of {len(places)} failed: {first.error}") from exc

    def _show(self, link: str, message: Progress | Refusal) -> None:
        if isinstance(message, Progress):
            self._watcher.step(link, message)
        else:
            self._watcher.refuse(link, message)

    def _where(self) -> str:
        hosts, each = self._comparison.hosts, self._comparison.ranks_per_host
        if each == 1:
            return f"{hosts} {'hosts' if self._links == 'shaped' else 'ranks'}"
        sharing = " that share one model" if self._comparison.sharded else ""
        return f"{hosts} hosts of {each} ranks{sharing}"

    def results(self, problem: str | None) -> Results:
        """The results from the events so far."""
        comparison = self._comparison
        found = measures.recordings(self._folder.events())
        refused = measures.refusals(self._folder.events())
        target = comparison.target_loss if comparison.target_loss is not None else measures.default_target(found)
        names = {strategy: short_name(strategy) for strategy in comparison.contenders}
        rows = measures.rows(found, links=self._links, target_loss=target, names=names)
        learns_text = comparison.kind == "compare" and comparison.task.kind == "text"
        return Results(
            kind=comparison.kind,
            title=f"{self._task.title}, {self._where()}" + (f" {self._sharing}" if self._sharing else ""),
            began=self._began,
            seconds=time.monotonic() - self._began_s,
            problem=problem,
            target_loss=target,
            rows=tuple(rows),
            curves=tuple(measures.curve(recording) for recording in found),
            refused=tuple(replace(refusal, name=names.get(refusal.strategy, refusal.name)) for refusal in refused),
            advice=tuple(advise(rows, gpt_parameters=self._task.num_parameters if learns_text else None)),
        )

    def write(self, results: Results) -> None:
        """Results, trace and page."""
        self._folder.write_results(results)
        self._folder.write_text("trace.json", json.dumps(trace(self._folder.events())))
        if not results.rows:
            return
        try:
            from laconic.report.page import render  # noqa: PLC0415 - jinja2 may be missing
        except ModuleNotFoundError as exc:
            where = self._folder.path
            self._watcher.note(f"no report.html: {exc.name} is not installed; elsewhere: laconic report {where}")
            return
        self._folder.write_text("report.html", render([self._folder]))


def describe_environment(capabilities: Capabilities) -> dict[str, object]:
    """The contents of env.json."""
    packages = ("torch", "numpy", "numba", "triton", "pyroute2")
    return {
        "versions": versions(packages),
        "machine": asdict(machine()),
        "gpus": [asdict(device) for device in gpus()[0].devices],
        "virtual_hosts": asdict(capabilities),
    }
