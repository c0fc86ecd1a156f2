"""`laconic lab ... -- COMMAND`: run a torchrun-style script on virtual hosts behind real, shaped links."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.text import Text

from laconic.cli.terminal import emit, emit_sections, plain_table, printable
from laconic.cluster import Cluster, Link, parse_bandwidth
from laconic.errors import UsageError
from laconic.lab.launch import RankFailed, run_ranks
from laconic.lab.virtual_hosts import HostCounter, VirtualHosts, places_on
from laconic.units import human_bytes, human_seconds, parse_quantity


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Run a script on virtual hosts: a network namespace each, behind links with the bandwidth you ask for."""

    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- COMMAND ...")]
    """What each rank runs, e.g. -- python train.py --epochs 1; it finds the variables torchrun sets."""
    hosts: int = 4
    """Number of virtual hosts."""
    bandwidth: Annotated[str, tyro.conf.arg(metavar="RATE")] = "100mbit"
    """Of each host's link, both ways: 10mbit, 1gbit."""
    delay: Annotated[str, tyro.conf.arg(metavar="TIME")] = "0ms"
    """Added one way on every link; needs netem in the kernel."""
    loss: Annotated[str, tyro.conf.arg(metavar="SHARE")] = "0%"
    """Share of packets lost on every link; needs netem in the kernel."""
    link: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="HOST=RATE")] = ()
    """Another bandwidth for one host, e.g. --link 2=10mbit; repeat for several."""
    cluster: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Hosts, links and racks from a file, instead of the options above."""
    ranks_per_host: int = 1
    """Processes on each host."""
    timeout: Annotated[str, tyro.conf.arg(metavar="TIME")] = "1h"
    """End the run after this long."""


def run(arguments: Arguments) -> int:
    """Run the command and sum up; the worst exit code is ours."""
    if not arguments.command:
        raise UsageError("lab: nothing to run. Put the command after --, as in: laconic lab -- python train.py")
    cluster = _cluster(arguments)
    timeout_s = parse_quantity(arguments.timeout, "time", "--timeout")
    lock = threading.Lock()

    def on_line(rank: int, line: str) -> None:
        with lock:
            emit(f"[{rank}] {printable(line)}\n")

    began_s = time.monotonic()
    with VirtualHosts(cluster) as hosts:
        print(f"lab: {cluster.describe()} (shaped)", file=sys.stderr, flush=True)
        places = places_on(hosts, ranks_per_host=arguments.ranks_per_host, gpu=_cuda_is_there())
        failure: RankFailed | None = None
        try:
            run_ranks(arguments.command, places, timeout_s=timeout_s, on_line=on_line)
        except RankFailed as exc:
            failure = exc
        counters = hosts.counters()
    _sum_up(cluster, counters, time.monotonic() - began_s)
    if failure is not None:
        print(f"laconic: error: {failure}", file=sys.stderr)
        return failure.exit_code
    return 0


def _cluster(arguments: Arguments) -> Cluster:
    if arguments.cluster is not None:
        defaults = {field.name: field.default for field in dataclasses.fields(Arguments)}
        for option in ("hosts", "bandwidth", "delay", "loss", "link"):
            if getattr(arguments, option) != defaults[option]:
                raise UsageError(f"--{option} has no effect beside --cluster; write it in {arguments.cluster}.")
        return Cluster.load(arguments.cluster)
    link = Link(
        bandwidth_bps=parse_bandwidth(arguments.bandwidth, "--bandwidth"),
        delay_s=parse_quantity(arguments.delay, "time", "--delay"),
        loss_ratio=parse_quantity(arguments.loss, "share", "--loss"),
    )
    exceptions: dict[int, Link] = {}
    for text in arguments.link:
        host, equals, rate = text.partition("=")
        if not equals or not host.strip().isdigit():
            raise UsageError(f'--link must be HOST=RATE such as 2=10mbit, got "{text}".')
        exceptions[int(host)] = Link(
            bandwidth_bps=parse_bandwidth(rate, "--link"), delay_s=link.delay_s, loss_ratio=link.loss_ratio
        )
    return Cluster.uniform(arguments.hosts, link, exceptions)


def _cuda_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def _sum_up(cluster: Cluster, counters: list[HostCounter], seconds: float) -> None:
    table = plain_table("host", "link", "sent", "received", numbers=("sent", "received"))
    for host, (link, counter) in enumerate(zip(cluster.links, counters, strict=True)):
        table.add_row(str(host), str(link), human_bytes(counter.sent_bytes), human_bytes(counter.received_bytes))
    emit_sections(Text(f"{human_seconds(seconds)} in the lab; bytes as the kernel counted them"), table)
