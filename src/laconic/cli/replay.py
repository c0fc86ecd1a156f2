"""`laconic replay`: a known workload with slept compute and real communication, under torch DDP and strategies.

With --json, the document that is also in the run's folder as results.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from laconic.cli.compare import hold, read_networks, read_strategies, refuse_beside
from laconic.errors import UsageError
from laconic.experiments import config_file
from laconic.experiments.comparison import Comparison, default_strategies
from laconic.experiments.tasks import TaskConfig
from laconic.strategy import SEVEN
from laconic.units import parse_quantity


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Sleep each layer's compute time while its gradients, which are real, cross real links; torch DDP beside.

    Schedules are measured cleanly this way even on few cores, for models no machine at hand could train.
    """

    workload: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.json")] = "resnet50"
    """resnet50, bert-base, gpt2, or a JSON file (docs/workloads.md)."""
    strategy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="STRATEGY")] = ()
    """A preset or strategy text; repeat for several. Left out: one of each kind."""
    preset: Literal["seven"] | None = None
    """seven: the seven lossless methods of the quantitative survey, instead of --strategy."""
    strategies: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A file with one strategy per line; empty lines and what follows a # are left out."""
    hosts: int = 4
    """Number of virtual hosts, one process each."""
    bandwidth: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="RATE")] = ()
    """Of every host's link: 100mbit, 1gbit; repeat for several. Left out: 1gbit."""
    cluster: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Hosts, links and racks from a file, instead of --hosts and --bandwidth."""
    links: Literal["auto", "shaped", "paced"] = "auto"
    """shaped: real links of virtual hosts; paced: held back in software; auto: shaped where this machine allows it."""
    compute: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """How long forward and backward take together, e.g. 500ms. Left out: as long as the workload says."""
    steps: Annotated[int, tyro.conf.arg(metavar="N")] = 10
    """Steps under each strategy, in turns."""
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 1800.0
    """How long the replay on one link may take."""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Repeat a run from its config.toml, instead of the options above."""
    out: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where to keep the run. Left out: runs/TIME-replay."""
    json: bool = False
    """Print JSON instead of tables."""


def run(arguments: Arguments) -> int:
    """Replay, keep everything, print."""
    return hold(_comparison(arguments), out=arguments.out, as_json=arguments.json)


def _comparison(arguments: Arguments) -> Comparison:
    if arguments.config is not None:
        refuse_beside(arguments, "config", Arguments(), but=("out", "json"))
        return config_file.load(arguments.config, "replay")
    if arguments.preset is not None and (arguments.strategy or arguments.strategies):
        raise UsageError("replay: give --preset or strategies of your own, not both.")
    hosts, networks = read_networks(arguments.cluster, arguments.hosts, arguments.bandwidth, ("1gbit",))
    path = Path(arguments.workload)
    return Comparison(
        kind="replay",
        task=TaskConfig(
            kind="replay",
            data=str(path.resolve()) if path.is_file() else arguments.workload,
            compute_s=None if arguments.compute is None else parse_quantity(arguments.compute, "time", "--compute"),
        ),
        strategies=SEVEN
        if arguments.preset == "seven"
        else read_strategies(arguments.strategy, arguments.strategies, default_strategies(arguments.steps)),
        hosts=hosts,
        networks=networks,
        links=arguments.links,
        steps=arguments.steps,
        timeout_s=arguments.timeout,
    )
