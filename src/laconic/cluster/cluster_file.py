"""A cluster as TOML.

name = "lab"                     # what reports call it; may be left out
source = "Made up."              # where the figures come from; may be left out
bandwidth = "100mbit"            # of every host's link, unless its own table says otherwise
delay = "5ms"                    # one way, added to every link
loss = "0.1%"
hosts = 4
devices_per_host = 8             # default: 1
nics = 2                         # per host; default: 1

[inside]                         # the port of each device on its host's bus
bandwidth = "200gbit"

[topology]                       # default: one switch
kind = "fat_tree"
hosts_per_leaf = 2
oversubscription = 4

[[host]]                         # exceptions
index = 2
bandwidth = "10mbit"
speed = 0.5                      # how fast it computes

[[rack]]                         # instead of hosts = ... and [topology]: racks behind an uplink of their own
hosts = 2                        # so many, or which ones: [0, 2]
uplink = "50mbit"

[measured]                       # what laconic probe has written: measured.py
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict

from laconic.cluster.link import Link, usual_link
from laconic.cluster.measured import Measured
from laconic.cluster.topologies import TOPOLOGIES, Racks, Switch, Topology
from laconic.cluster.values import (
    Number,
    Rate,
    Seconds,
    Several,
    Text,
    Whole,
    check_keys,
    read_table,
    read_tables,
)
from laconic.errors import UsageError, did_you_mean, one_line
from laconic.units import format_rate, format_time, parse_quantity

if TYPE_CHECKING:
    from laconic.cluster.cluster import Cluster

_WHERE = "cluster TOML"
_LINK_KEYS = ("bandwidth", "delay", "loss")
_KEYS = (
    *("name", "source", "hosts", "devices_per_host", "nics", *_LINK_KEYS),
    *("inside", "topology", "host", "rack", "measured"),
)
_MEMBERS = Several(Whole(least=0))
"""The hosts of a rack."""


class Parts(TypedDict):
    """The fields of a Cluster."""

    links: tuple[Link, ...]
    topology: Topology
    devices_per_host: int
    inside: Link | None
    nics: int
    speeds: tuple[float, ...]
    name: str
    source: str
    measured: Measured | None


def parse(text: str) -> Mapping[str, object]:
    """The tables of a document."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError, OverflowError) as exc:
        raise UsageError(f"{_WHERE} cannot be read: {one_line(exc)}.") from exc


def read(table: Mapping[str, object]) -> Parts:
    """The parts of the cluster that a document describes; ambiguous documents are refused."""
    check_keys(table, _KEYS, _WHERE)
    link = _read_link(table, None, _WHERE)
    topology = _read_topology(table)
    num_hosts = sum(topology.sizes) if isinstance(topology, Racks) else _count(table, "hosts", _WHERE)
    if num_hosts > Whole().most:
        raise UsageError(f"{_WHERE}: the racks must hold at most {Whole().most} hosts, got {num_hosts}.")
    links, speeds = [link] * num_hosts, [1.0] * num_hosts
    for host in read_tables(table, "host", _WHERE):
        check_keys(host, ("index", *_LINK_KEYS, "speed"), f"{_WHERE}, host")
        index = _count(host, "index", f"{_WHERE}, host", least=0)
        check_host(index, num_hosts)
        where = f"{_WHERE}, host {index}"
        links[index] = _read_link(host, link, where)
        speeds[index] = Number(least=1e-3, most=1e3).read(host.get("speed", 1.0), f"{where}.speed")
    inside, measured = read_table(table, "inside", _WHERE), read_table(table, "measured", _WHERE)
    if inside is not None:
        check_keys(inside, _LINK_KEYS, f"{_WHERE}, inside")
    return Parts(
        links=tuple(links),
        topology=topology,
        devices_per_host=_count(table, "devices_per_host", _WHERE, most=1024, default=1),
        inside=None if inside is None else _read_link(inside, None, f"{_WHERE}, inside"),
        nics=_count(table, "nics", _WHERE, most=1024, default=1),
        speeds=tuple(speeds),
        name=Text().read(table.get("name", ""), f"{_WHERE}: name"),
        source=Text().read(table.get("source", ""), f"{_WHERE}: source"),
        measured=None if measured is None else Measured.from_table(measured),
    )


def check_host(host: int, num_hosts: int) -> None:
    """Raise UsageError if there is no such host."""
    if not 0 <= host < num_hosts:
        raise UsageError(f"there is no host {host}; hosts are numbered 0 to {num_hosts - 1}.")


def _read_topology(table: Mapping[str, object]) -> Topology:
    racks, settings = read_tables(table, "rack", _WHERE), read_table(table, "topology", _WHERE)
    if racks and "hosts" in table:
        raise UsageError(f"{_WHERE}: give hosts or [[rack]] tables, not both.")
    if racks and settings is not None:
        raise UsageError(f"{_WHERE}: give [topology] or [[rack]] tables, not both.")
    if racks:
        return _read_racks(racks)
    if settings is None:
        return Switch()
    kind = settings.get("kind")
    if not isinstance(kind, str) or kind not in TOPOLOGIES:
        found = f'there is no kind "{one_line(kind, 40)}".' if kind is not None else "kind is missing."
        raise UsageError(f"{_WHERE}, topology: {found} {did_you_mean(str(kind), TOPOLOGIES)}")
    if kind == Racks.kind:
        raise UsageError(f'{_WHERE}, topology: write racks as [[rack]] tables with hosts = 2 and uplink = "50mbit".')
    rest = {key: value for key, value in settings.items() if key != "kind"}
    return TOPOLOGIES[kind].from_table(rest, f"{_WHERE}, topology {kind}")


def _read_racks(tables: list[Mapping[str, object]]) -> Racks:
    sizes: list[int] = []
    members: list[tuple[int, ...]] = []
    uplinks: list[Link] = []
    for number, rack in enumerate(tables):
        where = f"{_WHERE}, rack {number}"
        check_keys(rack, ("hosts", "uplink", "delay", "loss"), where)
        if "uplink" not in rack:
            raise UsageError(f'{where}: uplink is missing. Write e.g. uplink = "50mbit".')
        if isinstance(rack.get("hosts"), list):
            members.append(_MEMBERS.read(rack["hosts"], f"{where}: hosts"))
        else:
            sizes.append(_count(rack, "hosts", where))
        uplinks.append(_read_link({"bandwidth": rack["uplink"], **rack}, None, where, bandwidth_key="uplink"))
    if sizes and members:
        raise UsageError(f"{_WHERE}: give the number of hosts of every rack, or the hosts of every rack, not both.")
    return Racks(sizes=tuple(sizes), members=tuple(members), uplinks=tuple(uplinks))


def _count(
    table: Mapping[str, object], key: str, where: str, *, least: int = 1, most: int = 65_536, default: int | None = None
) -> int:
    return Whole(least=least, most=most).read(table.get(key, default), f"{where}: {key}")


def _read_link(table: Mapping[str, object], base: Link | None, where: str, *, bandwidth_key: str = "bandwidth") -> Link:
    if base is None and "bandwidth" not in table:
        raise UsageError(f'{where}: bandwidth is missing. Write e.g. bandwidth = "100mbit".')
    bandwidth_bps = base.bandwidth_bps if base else 0.0
    delay_s, loss_ratio = (base.delay_s, base.loss_ratio) if base else (0.0, 0.0)
    if "bandwidth" in table:
        bandwidth_bps = Rate().read(table["bandwidth"], f"{where}.{bandwidth_key}")
    if "delay" in table:
        delay_s = Seconds().read(table["delay"], f"{where}.delay")
    if "loss" in table:
        loss_ratio = parse_quantity(str(table["loss"]), "share", f"{where}.loss")
    return Link(bandwidth_bps=bandwidth_bps, delay_s=delay_s, loss_ratio=loss_ratio)


def write(cluster: Cluster, table: str) -> str:
    """The inverse of `read`; with `table`, as a table of that name in a larger document."""
    usual, prefix = usual_link(cluster.links), f"{table}." if table else ""
    lines = [f"[{table}]"] if table else []
    lines += [f"{key} = {Text().write(text)}" for key in ("name", "source") if (text := getattr(cluster, key))]
    lines += _link_lines(usual)
    if not isinstance(cluster.topology, Racks):
        lines.append(f"hosts = {cluster.num_hosts}")
    lines += [f"{key} = {number}" for key in ("devices_per_host", "nics") if (number := getattr(cluster, key)) != 1]
    if cluster.inside is not None:
        lines += [f"[{prefix}inside]", *_link_lines(cluster.inside)]
    if isinstance(cluster.topology, Racks):
        racks = cluster.topology
        for members, uplink in zip(racks.members, racks.uplinks, strict=True):
            hosts = str(len(members)) if racks.is_in_order else _MEMBERS.write(members)
            lines += [f"[[{prefix}rack]]", f"hosts = {hosts}", *_link_lines(uplink, bandwidth_key="uplink")]
    elif cluster.topology != Switch():
        lines += [f"[{prefix}topology]", f'kind = "{cluster.topology.kind}"', *cluster.topology.to_lines()]
    for host, (link, speed) in enumerate(zip(cluster.links, cluster.speeds, strict=True)):
        if link != usual or speed != 1:
            lines += [f"[[{prefix}host]]", f"index = {host}"]
            lines += _link_lines(link) if link != usual else []
            lines += [f"speed = {speed!r}"] if speed != 1 else []
    if cluster.measured is not None:
        lines += cluster.measured.to_lines(f"{prefix}measured")
    return "".join(f"\n{line}\n" if index and line.startswith("[") else f"{line}\n" for index, line in enumerate(lines))


def _link_lines(link: Link, *, bandwidth_key: str = "bandwidth") -> list[str]:
    return [
        f'{bandwidth_key} = "{format_rate(link.bandwidth_bps)}"',
        f'delay = "{format_time(link.delay_s)}"',
        f"loss = {link.loss_ratio!r}",
    ]
