"""`laconic lab ... -- COMMAND`: run a torchrun-style script on virtual hosts behind real, shaped links.

Where virtual hosts are not possible, the ranks share this host and laconic paces its own traffic (docs/lab.md).
`laconic lab --clean` ends processes that a killed lab has left behind. Faults (--kill and so on) are in lab_faults.py.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Iterable

from rich.text import Text

from laconic.cli import lab_faults
from laconic.cli.options.lab import Arguments
from laconic.cli.terminal import emit, emit_sections, plain_table, printable
from laconic.cluster import Cluster, Link, parse_bandwidth
from laconic.errors import UsageError, one_line
from laconic.lab import leftovers
from laconic.lab.capabilities import Capabilities, detect_capabilities
from laconic.lab.launch import Place, RankFailed, run_ranks
from laconic.lab.pacing import PACED_MEANS, choose_links, places_paced
from laconic.lab.virtual_hosts import NO_HOSTNAME, HostCounter, VirtualHosts, places_on
from laconic.units import human_bytes, human_seconds, parse_quantity


def run(arguments: Arguments) -> int:
    """Run the command and sum up; returns the worst exit code."""
    if arguments.clean:
        return _clean(arguments)
    if not arguments.command:
        raise UsageError("lab: nothing to run. Put the command after --, as in: laconic lab -- python train.py")
    cluster = _cluster(arguments)
    timeout_s = parse_quantity(arguments.timeout, "time", "--timeout")
    if timeout_s <= 0:
        raise UsageError(f"lab: --timeout must be longer than 0 s, got {one_line(arguments.timeout, 40)}.")
    faults = lab_faults.read(arguments, cluster)
    capabilities = detect_capabilities()
    if faults:
        return lab_faults.run(arguments, faults, cluster, capabilities, timeout_s)
    _refuse(arguments, ("seed", "output", "ranks_per_replica"), "has no effect without a fault such as --kill.")
    began_s = time.monotonic()
    counters: list[HostCounter] | None = None
    if choose_links(arguments.links, capabilities) == "paced":
        places = places_paced(cluster, ranks_per_host=arguments.ranks_per_host, gpu=_cuda_is_there())
        print(f"lab: {cluster.describe()} (paced: {PACED_MEANS}){_why_paced(arguments, capabilities)}", file=sys.stderr)
        failure = _run_ranks(arguments, places, timeout_s)
    else:
        with VirtualHosts(cluster, capabilities) as hosts:
            print(f"lab: {cluster.describe()} (shaped)", file=sys.stderr)
            places = places_on(hosts, ranks_per_host=arguments.ranks_per_host, gpu=_cuda_is_there())
            failure = _run_ranks(arguments, places, timeout_s)
            counters = hosts.counters()
    _sum_up(cluster, counters, time.monotonic() - began_s)
    if failure is not None:
        print(f"laconic: error: {failure}", file=sys.stderr)
        return failure.exit_code
    return 0


def _run_ranks(arguments: Arguments, places: list[Place], timeout_s: float) -> RankFailed | None:
    """Run the command on every rank and show its output; return how it failed, if it did."""
    lock = threading.Lock()

    def on_line(rank: int, line: str) -> None:
        if NO_HOSTNAME in line:
            return
        with lock:
            emit(f"[{rank}] {printable(line)}\n")

    try:
        run_ranks(arguments.command, places, timeout_s=timeout_s, on_line=on_line)
    except RankFailed as exc:
        return exc
    return None


def _why_paced(arguments: Arguments, capabilities: Capabilities) -> str:
    if arguments.links == "paced":
        return ""
    return f"; virtual hosts are not possible here: {capabilities.reason or 'no privilege'}"


def _clean(arguments: Arguments) -> int:
    """End leftovers and name them."""
    if arguments.command:
        raise UsageError("lab: --clean runs no command. Leave out the command, or --clean.")
    others = [field.name for field in dataclasses.fields(Arguments) if field.name not in ("clean", "command")]
    _refuse(arguments, others, "has no effect together with --clean; leave it out.")
    ended = leftovers.end_leftovers()
    if not ended:
        emit("nothing was left behind\n")
        return 0
    table = plain_table("pid", "lab", "command", numbers=("pid", "lab"))
    for leftover in ended:
        table.add_row(str(leftover.pid), str(leftover.lab_pid), printable(one_line(leftover.command, 120)))
    noun = "process that a lab had" if len(ended) == 1 else "processes that labs had"
    emit_sections(Text(f"ended {len(ended)} {noun} left behind"), table)
    return 0


def _refuse(arguments: Arguments, options: Iterable[str], told: str) -> None:
    """Raise for an option that was given and would be ignored."""
    defaults = {field.name: field.default for field in dataclasses.fields(Arguments)}
    for option in options:
        if getattr(arguments, option) != defaults[option]:
            raise UsageError(f"--{option.replace('_', '-')} {told}")


def _cluster(arguments: Arguments) -> Cluster:
    if arguments.cluster is not None:
        told = f"has no effect together with --cluster; write it in {arguments.cluster}."
        given = ("hosts", "bandwidth", "delay", "loss", "link", "racks", "oversubscription", "in_turn")
        _refuse(arguments, given, told)
        return Cluster.load(arguments.cluster)
    link = Link(
        bandwidth_bps=parse_bandwidth(arguments.bandwidth, "--bandwidth"),
        delay_s=parse_quantity(arguments.delay, "time", "--delay"),
        loss_ratio=parse_quantity(arguments.loss, "share", "--loss"),
    )
    if arguments.racks != 1:
        _refuse(arguments, ("link",), "has no effect together with --racks; write a cluster file.")
        return Cluster.in_racks(
            arguments.hosts,
            link,
            racks=arguments.racks,
            oversubscription=arguments.oversubscription,
            in_turn=arguments.in_turn,
        )
    _refuse(arguments, ("oversubscription", "in_turn"), "has no effect without --racks; leave it out.")
    exceptions: dict[int, Link] = {}
    for text in arguments.link:
        host, equals, rate = text.partition("=")
        if not equals or not host.strip().isdecimal():
            raise UsageError(f'--link must be HOST=RATE such as 2=10mbit, got "{one_line(text, 60)}".')
        if int(host) in exceptions:
            raise UsageError(f"--link is given twice for host {int(host)}. Give it once.")
        exceptions[int(host)] = Link(
            bandwidth_bps=parse_bandwidth(rate, "--link"), delay_s=link.delay_s, loss_ratio=link.loss_ratio
        )
    return Cluster.uniform(arguments.hosts, link, exceptions)


def _cuda_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def _sum_up(cluster: Cluster, counters: list[HostCounter] | None, seconds: float) -> None:
    """Print the bytes of each host, where the kernel has counted them."""
    took = f"{human_seconds(seconds)} in the lab"
    if counters is None:
        table = plain_table("host", "link")
        for host, link in enumerate(cluster.links):
            table.add_row(str(host), str(link))
        emit_sections(Text(f"{took}; links were paced: {PACED_MEANS}"), table)
        return
    table = plain_table("host", "link", "sent", "received", numbers=("sent", "received"))
    for host, (link, counter) in enumerate(zip(cluster.links, counters, strict=True)):
        table.add_row(str(host), str(link), human_bytes(counter.sent_bytes), human_bytes(counter.received_bytes))
    emit_sections(Text(f"{took}; bytes as the kernel counted them"), table)
