"""`laconic replay`: a known workload with sleeps for compute and real communication, under torch DDP and strategies.

With --json, the document that is also in the run's folder as results.json.
"""

from __future__ import annotations

from pathlib import Path

from laconic.cli.compare import hold, read_networks, refuse_beside
from laconic.cli.files import read_strategies
from laconic.cli.options.replay import Arguments
from laconic.errors import UsageError
from laconic.experiments import config_file
from laconic.experiments.comparison import Comparison, default_strategies
from laconic.experiments.tasks import TaskConfig
from laconic.strategy import SEVEN
from laconic.units import parse_quantity


def run(arguments: Arguments) -> int:
    """Replay, keep everything, print."""
    return hold(_comparison(arguments), out=arguments.output, as_json=arguments.json)


def _comparison(arguments: Arguments) -> Comparison:
    if arguments.config is not None:
        refuse_beside(arguments, "config", Arguments(), but=("output", "json"))
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
        timeout_s=parse_quantity(arguments.timeout, "time", "--timeout"),
    )
