"""`laconic probe`: how long operations take between these ranks, as a table and as a cluster file for the simulator.

Runs on every rank of a job, as a training script does; rank 0 prints and writes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from laconic.cli.options.probe import Arguments
from laconic.cli.terminal import emit_json, emit_sections, plain_table, printable
from laconic.errors import CommunicationError, LaconicError, UsageError, did_you_mean, one_line
from laconic.units import format_rate, human_bytes, human_seconds, parse_quantity

if TYPE_CHECKING:
    import torch

    from laconic.cluster import Cluster, Curve, Measured
    from laconic.cluster.trials import StartSum
    from laconic.core.transport import Transport

_HOW = (
    "Start it with: torchrun --nproc-per-node 4 -m laconic.cli probe --output cluster.toml, or on virtual hosts with: "
    "laconic lab -- python -m laconic.cli probe --output cluster.toml"
)


def run(arguments: Arguments) -> int:
    """Measure; rank 0 prints and writes."""
    from laconic.cluster import Link, parse_bandwidth
    from laconic.cluster.probe import SIZES, check_hosts, cluster_of, probe
    from laconic.core.clock import WallClock

    timeout_s, limit_s = _seconds(arguments.timeout, "--timeout"), _seconds(arguments.limit, "--limit")
    sizes = sorted({int(parse_quantity(text, "size", "--sizes")) for text in arguments.sizes}) or list(SIZES)
    stated_bps = None
    if arguments.bandwidth is not None:
        # A link refuses what no link can have, before anything is measured.
        stated_bps = Link(bandwidth_bps=parse_bandwidth(arguments.bandwidth, "--bandwidth")).bandwidth_bps
    with _ranks(arguments.backend, timeout_s) as (transport, device):
        chief = transport.rank == 0
        try:
            check_hosts(transport.hosts)
            algorithms = _algorithms(arguments.algorithms, transport)
            if chief and arguments.output is not None:
                _check_output(Path(arguments.output))
            measured = probe(
                transport,
                WallClock(),
                device=device,
                sizes=sizes,
                limit_s=limit_s,
                algorithms=algorithms,
                pairs=arguments.pairs,
                on_progress=_say if chief else None,
            )
        except LaconicError as exc:
            transport.announce_failure(one_line(exc))  # so that no other rank waits for this one
            raise
        if not chief:
            return 0
        stem = Path(arguments.output).stem if arguments.output is not None else ""
        made = cluster_of(measured, transport.hosts, bandwidth_bps=stated_bps, name=stem, source=_source(stated_bps))
        if arguments.json:
            emit_json(_as_json(made, measured))
        else:
            _show(made, measured, stated_bps)
        if arguments.output is not None:
            _write(Path(arguments.output), made.to_toml())
            _say(f"written to {arguments.output}; give it as --cluster")
    return 0


def _say(text: str) -> None:
    print(f"probe: {printable(text)}", file=sys.stderr, flush=True)


def _seconds(text: str, option: str) -> float:
    seconds = parse_quantity(text, "time", option)
    if not 0 < seconds <= 86_400:
        raise UsageError(f'probe: {option} must be above 0 and at most a day, got "{text}".')
    return seconds


@contextlib.contextmanager
def _ranks(backend: str, timeout_s: float) -> Iterator[tuple[Transport, torch.device]]:
    """This rank's transport and device, in the job it is part of or in one that torchrun set up."""
    import torch
    import torch.distributed as dist

    from laconic.core.paced import PacedTransport, link_from_environment
    from laconic.core.torch_distributed import TorchTransport

    made_here = not dist.is_initialized()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if made_here:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UsageError(f"probe runs on every rank of a job, and {missing[0]} is not set here. {_HOW}")
        if os.environ["WORLD_SIZE"] == "1":
            raise UsageError(f"probe: there is nothing to measure with one rank. {_HOW}")
        if backend == "nccl" and not gpus:
            raise UsageError("probe: --backend nccl needs a GPU, and torch finds none here. Use --backend gloo.")
        chosen = ("nccl" if gpus else "gloo") if backend == "auto" else backend
        if chosen == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
        try:
            dist.init_process_group(chosen, timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as exc:
            raise CommunicationError(f"probe: the ranks could not meet: {one_line(exc)}.") from exc
    elif backend != "auto":
        raise UsageError("probe: --backend has no effect inside a job that has a process group. Leave it out.")
    try:
        transport: Transport = TorchTransport(timeout_s=timeout_s)
        link = link_from_environment(os.environ)
        if link is not None:
            transport = PacedTransport(transport, link, timeout_s=timeout_s)
        try:
            on_gpu = "nccl" in dist.get_backend()
            yield transport, torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        finally:
            transport.close()
    finally:
        if made_here:
            dist.destroy_process_group()


def _algorithms(names: tuple[str, ...], transport: Transport) -> dict[str, StartSum]:
    from laconic.collectives import ALGORITHMS
    from laconic.collectives.execution import WholeExchange, run

    def start_with(name: str) -> StartSum:
        collective = ALGORITHMS[name](transport.hosts)
        return lambda tensor: WholeExchange(run(collective, transport, (tensor,), what="a probe", purpose="control"))

    for name in names:
        if name not in ALGORITHMS:
            raise UsageError(f'probe: there is no algorithm "{one_line(name, 40)}". {did_you_mean(name, ALGORITHMS)}')
    return {name: start_with(name) for name in names}


def _source(stated_bps: float | None) -> str:
    stated = f"; bandwidth as stated, {format_rate(stated_bps)}" if stated_bps else ""
    return f"Measured by laconic probe on {time.strftime('%Y-%m-%d')}{stated}."


def _wire_bps(curve: Curve) -> float:
    """Bits per second that one rank sends, for large sizes."""
    return 8 * curve.plateau_bytes_per_s * curve.sent_bytes(10**9) / 10**9


def _as_json(cluster: Cluster, measured: Measured) -> dict[str, object]:
    return {
        "hosts": cluster.num_hosts,
        "devices_per_host": cluster.devices_per_host,
        "transport": measured.transport,
        "curves": [
            {**asdict(curve), "startup_s": curve.startup_s, "plateau_sent_bps": _wire_bps(curve)}
            for curve in measured.curves
        ],
        "pairs_bps": measured.pairs_bps,
    }


def _show(cluster: Cluster, measured: Measured, stated_bps: float | None) -> None:
    """Print the measurements; rates are those of the bytes a rank sends."""
    headers = ["operation", "start-up", "each further", "plateau", "up to"]
    # Between hosts is where a stated bandwidth means something.
    compared = stated_bps is not None and cluster.num_hosts > 1
    table = plain_table(*headers, *(["of stated"] if compared else []), numbers=(*headers[1:], "of stated"))
    for curve in measured.curves:
        wire_bps = _wire_bps(curve)
        cells = [
            curve.kind,
            human_seconds(curve.startup_s),
            human_seconds(curve.issue_s),
            f"{wire_bps / 1e9:.3g} Gbit/s",
            human_bytes(curve.sizes[-1]),
        ]
        if compared and stated_bps is not None:
            cells.append(_share(curve, cluster, wire_bps / stated_bps))
        table.add_row(*cells)
    emit_sections(Text(f"{cluster.describe()}\n{measured.transport}"), table, *_pairs(measured))


def _share(curve: Curve, cluster: Cluster, share: float) -> str:
    """How much of a host's link an operation uses; a ring leaves each host once, whatever its number of ranks."""
    if curve.kind == "send(inside)":
        return "-"
    if curve.kind == "all_to_all":
        others = cluster.num_devices - cluster.devices_per_host
        share *= cluster.devices_per_host * others / (cluster.num_devices - 1)
    return f"{share:.0%}"


def _pairs(measured: Measured) -> list[Text]:
    from laconic.collectives.placement import groups_in_words, placement_of

    rates = [
        (rate, source, destination)
        for source, row in enumerate(measured.pairs_bps)
        for destination, rate in enumerate(row)
        if source < destination
    ]
    if not rates:
        return []
    told = [
        f"{word} pair while all exchange: ranks {source} and {destination}, {rate / 1e9:.3g} Gbit/s"
        for word, (rate, source, destination) in (("slowest", min(rates)), ("fastest", max(rates)))
    ]
    found = placement_of(measured.pairs_bps)
    if len(found.groups) > 1:
        told.append(f"{found.drop:.1f} times as fast among themselves as with others: {groups_in_words(found.groups)}")
    return [Text("\n".join(told))]


def _check_output(path: Path) -> None:
    """Raise for a path that cannot be written, before anything is measured."""
    if path.suffix != ".toml":
        raise UsageError(f"probe: --output must end in .toml, got {path}.")
    if not path.parent.is_dir():
        raise UsageError(f"probe: --output {path}: there is no folder {path.parent}.")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"probe: cannot write {path}: {exc.strerror}.") from exc
