"""`laconic compare`: train the same model with torch DDP and under several strategies, on slow links, side by side.

With --json, the document that is also in the run's folder as results.json; with --plan, see compare_plan.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

from laconic.cli.compare_plan import hold_with_plan
from laconic.cli.contest_view import tables, watching
from laconic.cli.files import read_strategies
from laconic.cli.options.compare import Arguments
from laconic.cli.terminal import emit, emit_json, emit_sections
from laconic.cluster import Cluster, parse_bandwidth
from laconic.errors import UsageError
from laconic.experiments import config_file
from laconic.experiments.comparison import (
    DEFAULT_STEPS,
    UNLIMITED,
    Comparison,
    Network,
    default_strategies,
    uniform_network,
)
from laconic.experiments.run import run_comparison
from laconic.experiments.tasks import TaskConfig
from laconic.units import parse_quantity


def run(arguments: Arguments) -> int:
    """Train, keep everything, print."""
    if arguments.plan:
        if arguments.strategy or arguments.strategies is not None or arguments.config is not None:
            raise UsageError("compare: --plan chooses the strategies itself. Leave the strategies and --config out.")
        return hold_with_plan(_comparison(arguments), out=arguments.output, as_json=arguments.json)
    comparison = _comparison(arguments)
    return hold(comparison, out=arguments.output, as_json=arguments.json)


def hold(comparison: Comparison, *, out: str | None, as_json: bool) -> int:
    """Run a comparison with a live view and print the results."""
    with watching(comparison) as watcher:
        results, folder = run_comparison(comparison, watcher, out)
    if as_json:
        emit_json(json.loads(results.to_json()))
        return 0
    emit_sections(*tables(results))
    emit(f"\nEverything is in {folder.path}\n")
    if folder.report_path.exists():
        emit(f"Open {folder.report_path}\n")
    return 0


def _comparison(arguments: Arguments) -> Comparison:
    if arguments.config is not None:
        refuse_beside(arguments, "config", Arguments(), but=("output", "json"))
        return config_file.load(arguments.config, "compare")
    if arguments.data is not None and arguments.images is not None:
        raise UsageError("compare: give --data or --images, not both.")
    data = arguments.images or arguments.data
    steps = DEFAULT_STEPS if arguments.steps is None and arguments.seconds is None else arguments.steps
    hosts, networks = read_networks(arguments.cluster, arguments.hosts, arguments.bandwidth, ("100mbit",))
    return Comparison(
        task=TaskConfig(
            kind="images" if arguments.images is not None else "text",
            size=arguments.size,
            batch=arguments.batch if arguments.batch is not None else 2 if arguments.images is None else 32,
            learning_rate=arguments.learning_rate,
            seed=arguments.seed,
            data=str(Path(data).resolve()) if data is not None else None,
        ),
        strategies=read_strategies(
            arguments.strategy, arguments.strategies, default_strategies(steps, sharded=arguments.sharded)
        ),
        hosts=hosts,
        ranks_per_host=arguments.ranks_per_host,
        sharded=arguments.sharded,
        networks=networks,
        links=arguments.links,
        device=choose_device(arguments.device),
        mps=arguments.mps,
        steps=steps,
        seconds=arguments.seconds,
        torch_hooks=arguments.torch_hook,
        no_communication=arguments.no_communication,
        target_loss=arguments.target_loss,
        timeout_s=parse_quantity(arguments.timeout, "time", "--timeout"),
    )


def refuse_beside(given: object, option: str, defaults: object, *, but: tuple[str, ...]) -> None:
    """Raise if another option than those in `but` was given with `option`: it would have no effect."""
    assert dataclasses.is_dataclass(given)
    for other in dataclasses.fields(given):
        if other.name not in (option, *but) and getattr(given, other.name) != getattr(defaults, other.name):
            name = other.name.replace("_", "-")
            raise UsageError(f"--{name} has no effect together with --{option}; change the file.")


def read_networks(
    cluster: str | None, hosts: int, bandwidths: tuple[str, ...], default: tuple[str, ...]
) -> tuple[int, tuple[Network, ...]]:
    """The number of hosts, and every setting of their links."""
    if cluster is not None:
        if bandwidths or hosts != Arguments.hosts:
            raise UsageError(f"--hosts and --bandwidth have no effect together with --cluster; change {cluster}.")
        made = Cluster.load(cluster)
        return made.num_hosts, (Network(name=Path(cluster).stem, cluster=made),)
    return hosts, tuple(
        Network(name=UNLIMITED, cluster=None)
        if text == UNLIMITED
        else uniform_network(hosts, parse_bandwidth(text, "--bandwidth"))
        for text in bandwidths or default
    )


def choose_device(asked: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """The GPU if there is one, unless something else is asked for."""
    if asked != "auto":
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
