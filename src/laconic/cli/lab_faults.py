"""`laconic lab --kill ... --join ... --freeze ... --cut-link ... --slow ...`: an elastic script, and faults.

The script runs on virtual hosts as under `laconic run`. Faults that had no effect are reported when the job has ended.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

from laconic.cli.options.lab import Arguments
from laconic.cli.terminal import emit, printable
from laconic.cluster import Cluster
from laconic.errors import UsageError
from laconic.lab.capabilities import Capabilities
from laconic.lab.faults import FAULT_KINDS, Fault, check_faults, parse_fault
from laconic.lab.launch import Place, RankFailed, run_ranks
from laconic.lab.virtual_hosts import NO_HOSTNAME, VirtualHosts, places_on
from laconic.report.run_folder import RunFolder

_USAGE = 2
"""The exit code of a job that has said why it failed."""


def read(arguments: Arguments, cluster: Cluster) -> list[Fault]:
    """The faults that were typed, in the order of options."""
    faults = [parse_fault(kind, text) for kind in FAULT_KINDS for text in getattr(arguments, kind.replace("-", "_"))]
    if faults and (arguments.ranks_per_replica < 1 or arguments.ranks_per_host % arguments.ranks_per_replica):
        raise UsageError(
            f"--ranks-per-replica must divide --ranks-per-host {arguments.ranks_per_host}, got "
            f"{arguments.ranks_per_replica}: the processes of a replica are on one host."
        )
    check_faults(faults, num_hosts=cluster.num_hosts, num_ranks=cluster.num_hosts * arguments.ranks_per_host)
    return faults


def run(
    arguments: Arguments, faults: Sequence[Fault], cluster: Cluster, capabilities: Capabilities, timeout_s: float
) -> int:
    """Run the job; 0 if it has come to its end and every fault had an effect."""
    if arguments.links == "paced" or not capabilities.virtual_hosts:
        why = "" if arguments.links == "paced" else f", which are not possible here: {capabilities.reason}"
        raise UsageError(f"{faults[0]} needs shaped links of virtual hosts{why}. Leave out the fault or --links paced.")
    from laconic.lab.elastic_job import ElasticJob

    folder = RunFolder.create("lab", arguments.output)
    with VirtualHosts(cluster, capabilities) as hosts:
        print(f"lab: {cluster.describe()} (shaped)", file=sys.stderr)
        places = places_on(hosts, ranks_per_host=arguments.ranks_per_host)
        threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
        job = ElasticJob(
            command=_command(arguments.command),
            switch=hosts.switch.address,
            namespaces=tuple(hosts.namespace(host) for host in range(cluster.num_hosts)),
            environments=tuple(
                {**threads, **places[host * arguments.ranks_per_host].environment} for host in range(cluster.num_hosts)
            ),
            ranks_per_host=arguments.ranks_per_host,
            ranks_per_replica=arguments.ranks_per_replica,
            faults=tuple(faults),
            seed=arguments.seed,
            events=str(folder.events_path.resolve()),
        )
        code = _run_on_switch(job.to_json(), Place({}, hosts.entrance_to_switch()), timeout_s)
    print(f"laconic report {printable(str(folder.path))} shows what happened", file=sys.stderr)
    return code


def _command(words: Sequence[str]) -> tuple[str, ...]:
    return (*([sys.executable] if words[0].endswith(".py") else []), *words)


def _run_on_switch(job: str, switch: Place, timeout_s: float) -> int:
    lock = threading.Lock()

    def on_line(rank: int, line: str) -> None:
        if NO_HOSTNAME not in line:
            with lock:
                emit(f"{printable(line)}\n")

    try:
        run_ranks(
            [sys.executable, "-m", "laconic.lab.elastic_job", job], [switch], timeout_s=timeout_s, on_line=on_line
        )
    except RankFailed as exc:
        if exc.exit_code != _USAGE:  # otherwise it has said why
            print(f"laconic: error: {printable(str(exc))}", file=sys.stderr)
        return exc.exit_code
    return 0
